"""The interface of a recipe's steps: each step is one method of ordering, pruning or training, with its options.

A recipe is a tuple of steps, which run one after another. Memory, time, disk, resume, dry run, report and ``--help``
are derived from each step's attributes and functions, so a new step is one file in ``permtriton/methods``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, ClassVar, Protocol

from permtriton.config import CommonConfig
from permtriton.methods.sizes import Memory, ModelSizes
from permtriton.util.option import check_options

BACKWARD = 3  # time of a forward and a backward pass together, in forward passes


def from_options(compute: Callable[[Any], Any]) -> Any:
    """Returns the value of an attribute of a step that follows from its options: a property, computed from the step."""
    return property(compute)


class Stage(IntEnum):
    """What a step does. The steps of a recipe stand in the order of their stages, and exactly one of them prunes."""

    ORDER = 0  # changes the order of channels, not what the model computes
    PRUNE = 1  # makes the weight of every pruned linear N:M
    TRAIN = 2  # changes the values of kept weights


@dataclass
class Outcome:
    """What a step reports of its run, as ``permtriton.json`` holds it."""

    unit: str = ""  # what each row of ``history`` describes: ``round`` or ``epoch``
    # row 0 for the state before the step, then a row per round or epoch: its number, under the key that ``unit`` names;
    # the ``loss``; ``held_out``, the loss on samples that the step holds out, if any; further values of the step
    history: list[dict[str, Any]] = field(default_factory=list)
    kept: int | None = None  # number of the round or epoch whose result was kept; None for the last
    # a row per part that the step changed, such as a linear: ``name``, the error at ``start`` and ``end``, ``seconds``,
    # and further values of the step
    parts: list[dict[str, Any]] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # name of each part that the step left unchanged -> the reason

    @property
    def kept_row(self) -> dict[str, Any]:
        """The row of the round or epoch whose result was kept."""
        return self.history[-1 if self.kept is None else self.kept]


class Step(Protocol):
    """One step of a recipe: a frozen dataclass whose fields are its options, see `permtriton.util.option.option`."""

    name: ClassVar[str]  # name in ``--recipe``, in TOML, in files and in reports
    prefix: ClassVar[str]  # what the flags of its options begin with
    summary: ClassVar[str]  # what it does, in one line
    stage: ClassVar[Stage]  # what it does to the model
    # importance that the step prefers where the user chooses none; empty if it has no preference
    importance: ClassVar[str] = ""
    keeps_values: ClassVar[bool] = True  # whether the weights that are kept keep their values
    dense_weights: ClassVar[bool] = False  # whether it needs the dense weights after the model is pruned
    shards: ClassVar[bool] = True  # whether it can run while the weights of layers are spread over several GPUs
    onloads: ClassVar[bool] = True  # whether it can run on a model whose layers come to a GPU one by one

    # What may follow from the options of a step, by `from_options` or as a property.
    gradients: ClassVar[bool] = False  # whether it runs backward passes
    # the distance from the dense outputs that it minimises: kl, cosine, before_norm or auto; empty if none
    objective: ClassVar[str] = ""
    # largest number of sequences whose gradients are accumulated for one update; 0 for all sequences
    backward_batch: ClassVar[int] = 0
    # whether it reads the text that the dense model writes (``--generated``) beside the calibration samples
    reads_generated: ClassVar[bool] = False
    # number of surplus samples of the same text that it reads per calibration sample, in addition to that one
    extra_per_sample: ClassVar[int] = 0
    fresh_samples: ClassVar[int] = 0  # number of samples that it reads in place of the calibration samples; 0 if none

    def __post_init__(self) -> None:
        check_options(self)

    def conflicts(self, config: CommonConfig, steps: Sequence["Step"]) -> str:
        """Returns why the step cannot run with a config or with the other steps of the recipe, and what to do instead.

        The reason is a sentence; it is empty if the step can run.
        """
        return ""

    def uses_importance(self) -> bool:
        """Returns whether the importance that the user chooses decides anything in this step."""
        return True

    def sizes(self, sizes: ModelSizes) -> ModelSizes:
        """Returns ``sizes`` for the samples that the step reads, with its ``backward_batch``."""
        surplus = 0 if self.fresh_samples else min(self.extra_per_sample * sizes.sequences, sizes.surplus)
        sequences = sizes.sequences + surplus + (sizes.generated if self.reads_generated else 0)
        if self.fresh_samples:
            sequences = min(self.fresh_samples, sequences + sizes.surplus)
        positions = sizes.positions // sizes.sequences * sequences
        batch = self.backward_batch
        return replace(sizes, sequences=sequences, positions=positions, backward_batch=batch, generated=0, surplus=0)

    def memory(self, sizes: ModelSizes) -> Memory:
        """Returns the memory that the step takes at most."""
        return Memory()

    def passes(self, sizes: ModelSizes) -> float:
        """Returns the step's time as a number of forward passes over the samples that it reads, measured on SmolLM2."""
        return 0.0

    def state_bytes(self, sizes: ModelSizes) -> int:
        """Returns the bytes of the states from which the step resumes after an interruption; 0 if it keeps none.

        A state that a new one replaces counts twice, because both are on the disk for a moment.
        """
        return 0

    def run(self, run: Any) -> Outcome | None:
        """Changes the model of a run, which is a `permtriton.methods.run.Run`; returns what to report.

        Raises:
            PermTritonError: it fails, or a check of its result does.
        """
        ...

    def words(self, outcome: Outcome) -> Sequence[tuple[str, str]]:
        """Returns lines for the table of results, each with its name and its value."""
        lines = []
        if len(outcome.history) > 1:
            row = outcome.kept_row
            measure, words = ("held_out", "loss on other calibration text") if "held_out" in row else ("loss", "loss")
            start_loss, kept_loss = outcome.history[0][measure], row[measure]
            progress = f"{outcome.unit} {row[outcome.unit]} of {len(outcome.history) - 1}"
            lines.append((f"{self.name}: {words}", f"{start_loss:.4f} to {kept_loss:.4f} ({progress})"))
        changes = [(part["name"], f"{part['start']:.4f} to {part['end']:.4f}") for part in outcome.parts]
        changes += [(name, f"left as it was: {reason}") for name, reason in outcome.left.items()]
        return lines + [(f"{self.name}: {name}", values) for name, values in changes]
