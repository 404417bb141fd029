"""What a step of a recipe is: one method, with its options, what it needs, and what it does.

A recipe is a tuple of steps, which run one after another. Memory, time, disk, resume, dry run, report and ``--help``
follow from what each step says of itself, so that a new method is one file in ``permtriton/methods``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, ClassVar, Protocol

from permtriton.config import CommonConfig
from permtriton.util.option import check_options

BACKWARD = 3  # forward passes that a forward and a backward pass take as long as
FLOAT32 = 4  # bytes
GENERATED = "Read what --generated adds to the samples, too."  # help of an option that several steps have


def without_gradients(tokens: int, hidden: int, width: int) -> int:
    """Returns the bytes of the activations of a pass without gradients and logits; sizes as of `ModelSizes`."""
    return tokens * (hidden + 8 * width) * FLOAT32


class Stage(IntEnum):
    """What a step does; the steps of a recipe stand in this order, and exactly one of them prunes."""

    ORDER = 0  # changes the order of channels, not what the model computes
    PRUNE = 1  # makes every weight N:M
    TRAIN = 2  # changes the values of kept weights


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model and its calibration samples that memory, time and disk follow from.

    Attributes:
        model: bytes of all parameters.
        element: bytes of a weight.
        pruned: number of weights that are pruned, kept ones included.
        layer: the same, in the largest layer.
        outside: most pruned weights outside a list of layers: of an encoder-decoder, those of its larger half.
        largest_weight: number of weights in the largest linear that is pruned.
        layers: number of layers.
        hidden: channels of the hidden states.
        width: most channels that a linear reads, or `hidden` if there are more.
        widest: most channels that a pruned linear reads.
        between_turns: most channels that wait while the linears of a layer are pruned in turns, in the layer with most:
            inputs of sites, the residual stream that their outputs are added to, and outputs of linears that are
            pruned; experts inside it count once.
        vocabulary: size of the logits of a token; 0 without a language-model head.
        hessians: most bytes that the Hessians of one layer take, with what inverting them takes.
        forward: bytes of the activations of a pass without gradients and logits.
        spaces: number of units of each channel space that may move.
        kept: share of the weights that are kept.
        sequences: number of samples that a step reads.
        calibration: number of calibration samples.
        generated: number of sequences that the dense model writes beside them, for the steps that read such text.
        surplus: number of further samples of the same text, for the steps that read such.
        vectors: values of all parameters that are vectors, and rows of the pruned linears.
        rows: rows of the pruned linears that a token runs through: of each expert, the share of tokens that it is sent.
        tokens: tokens of a sample that have logits.
        longest: positions of a sample, in the longer half of an encoder-decoder.
        positions: positions of all samples that the last hidden state has.
        micro_batch_size: as the option.
        backward_batch: most sequences of a step's backward pass, if they are fewer than ``micro_batch_size``; 0 if not.
        checkpointing: whether activations are recomputed.
        one_layer: whether gradients are of one layer at a time, because layers come to a GPU one by one.
        low_memory: whether steps shall save memory, because what they could keep does not fit.
        ranks: number of processes that share the samples.
    """

    model: int
    element: int
    pruned: int
    layer: int
    outside: int
    largest_weight: int
    layers: int
    hidden: int
    width: int
    widest: int
    between_turns: int
    vocabulary: int
    hessians: int
    forward: int
    spaces: tuple[int, ...]
    kept: float
    sequences: int
    calibration: int
    tokens: int
    longest: int
    positions: int
    micro_batch_size: int
    checkpointing: bool
    one_layer: bool = False
    low_memory: bool = False
    ranks: int = 1
    generated: int = 0
    surplus: int = 0
    vectors: int = 0
    rows: int = 0
    backward_batch: int = 0

    def samples_for(self, step: "Step") -> "ModelSizes":
        """Returns the sizes of all samples that a step reads, which may be others than the calibration samples."""
        surplus = 0 if step.fresh_samples else min(step.extra_per_sample * self.sequences, self.surplus)
        sequences = self.sequences + surplus + (self.generated if step.reads_generated else 0)
        if step.fresh_samples:
            sequences = min(step.fresh_samples, sequences + self.surplus)
        positions = self.positions // self.sequences * sequences
        batch = step.backward_batch
        return replace(self, sequences=sequences, positions=positions, backward_batch=batch, generated=0, surplus=0)

    @property
    def all_positions(self) -> int:
        """Positions that a layer reads of all samples."""
        return self.sequences * self.longest

    def gradients(self) -> dict[str, int]:
        """Returns the bytes that forward and backward passes keep."""
        layers = 1 if self.one_layer else self.layers
        kept = self.hidden if self.checkpointing else 10 * self.hidden + 5 * self.width  # as measured on a LLaMA
        together = min(self.micro_batch_size, self.backward_batch or self.micro_batch_size)
        backward = together * (layers * kept + 16 * self.width)
        measuring = without_gradients(self.micro_batch_size * self.longest, self.hidden, self.width)
        return {
            "activations": max(self.longest * backward * FLOAT32, measuring),
            "logits": self.micro_batch_size * self.tokens * self.vocabulary * 4 * FLOAT32,
        }

    def targets(self) -> dict[str, int]:
        """Returns the bytes of the dense model's last hidden states."""
        return {"targets": self.positions * self.hidden * self.element}

    def layer_by_layer(self) -> dict[str, int]:
        """Returns the bytes of the Hessians of one layer, and of the inputs of that layer and the next one."""
        between = 3 * self.all_positions * self.hidden * self.element  # which are joined from parts
        return {
            "activations": self.forward, "hessians": self.hessians, **self.mask(), "inputs of layers": between,
        }  # fmt: skip

    def finished_layers(self) -> int:
        """Returns the bytes of all pruned weights, packed; a position takes half a byte in groups of up to 16."""
        return int(self.pruned * self.kept * (self.element + 0.5))

    def mask(self) -> dict[str, int]:
        """Returns the bytes of the temporaries of one mask."""
        return {"one layer": self.largest_weight * 6 * FLOAT32}


@dataclass
class Outcome:
    """What a step reports of its run, as ``permtriton.json`` holds it.

    Attributes:
        unit: what a line of ``history`` is of: ``round`` or ``epoch``.
        history: the rounds or epochs, from 0, the state before; each with its number under ``unit``, its ``loss`` on
            the calibration samples or ``held_out``, and whatever else is known of it.
        kept: number of the epoch whose result was kept; None if it is the last.
        parts: what was changed part by part, such as layers: ``name``, the error at its ``start`` and ``end``,
            ``seconds``, and whatever else is known of it.
        left: name of what the step left as it was -> the reason.
    """

    unit: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)
    kept: int | None = None
    parts: list[dict[str, Any]] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


class Step(Protocol):
    """One method of a recipe: a frozen dataclass whose fields are its options, see `permtriton.util.option.option`.

    Attributes:
        name: name in ``--recipe``, in TOML, in files and in reports.
        prefix: what the flags of its options begin with.
        summary: what it does, in one line.
        stage: what it does to the model.
        importance: score that decides which weights are kept, where the user chooses none; empty if it does not matter.
        keeps_values: whether the weights that are kept keep their values.
        dense_weights: whether it needs the dense weights after the model is pruned.
        shards: whether it can run while the weights of layers are spread over several GPUs.
        onloads: whether it can run on a model whose layers come to a GPU one by one.
        low_memory_words: what it does where memory is short, in words; empty if it has no choice.
    """

    name: ClassVar[str]
    prefix: ClassVar[str]
    summary: ClassVar[str]
    stage: ClassVar[Stage]
    importance: ClassVar[str] = ""
    keeps_values: ClassVar[bool] = True
    dense_weights: ClassVar[bool] = False
    shards: ClassVar[bool] = True
    onloads: ClassVar[bool] = True
    low_memory_words: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def gradients(self) -> bool:
        """Whether it runs backward passes."""
        return False

    @property
    def reads_generated(self) -> bool:
        """Whether it reads the text that the dense model writes (``--generated``) beside the calibration samples."""
        return False

    @property
    def backward_batch(self) -> int:
        """Most sequences that it has gradients of before it changes anything; 0 where that is all of them."""
        return 0

    @property
    def saves_memory(self) -> str:
        """An option that lowers the memory it needs, as ``name=value``; empty if there is none."""
        return ""

    @property
    def fresh_samples(self) -> int:
        """Number of new samples that it reads in place of the calibration samples; 0 where it reads these."""
        return 0

    @property
    def extra_per_sample(self) -> int:
        """Number of spare samples of the same text that it reads, per calibration sample, beside these."""
        return 0

    def conflicts(self, config: CommonConfig, steps: Sequence["Step"]) -> str:
        """Returns why the step cannot run with a config or with the other steps of the recipe, and what to do instead.

        It is a sentence, empty if the step can run.
        """
        return ""

    def uses_importance(self) -> bool:
        """Returns whether the importance that the user chooses decides anything in this step."""
        return True

    @property
    def objective(self) -> str:
        """The distance from the dense model's outputs that it minimises: kl, cosine or auto; empty if it has none."""
        return ""

    def needs(self, sizes: ModelSizes) -> Mapping[str, Mapping[str, int]]:
        """Returns what it is doing -> use -> bytes, beside the program and the model."""
        return {}

    def passes(self, sizes: ModelSizes) -> float:
        """Returns how many forward passes over the samples that it reads take as long as it, as measured on SmolLM2."""
        return 0.0

    def state_bytes(self, sizes: ModelSizes) -> int:
        """Returns the bytes of the states from which it continues after an interruption; 0 if it has none.

        A state that a new one replaces counts twice, because both are on the disk for a moment.
        """
        return 0

    def batches(self, sequences: int) -> Sequence[int]:
        """Returns the numbers of sequences that it runs together, which ranks in step must be able to share."""
        return ()

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
            kept = outcome.history[-1 if outcome.kept is None else outcome.kept]
            measure, words = ("held_out", "loss on other calibration text") if "held_out" in kept else ("loss", "loss")
            before, after = outcome.history[0][measure], kept[measure]
            done = f"{outcome.unit} {kept[outcome.unit]} of {len(outcome.history) - 1}"
            lines.append((f"{self.name}: {words}", f"{before:.4f} to {after:.4f} ({done})"))
        changed = [(part["name"], f"{part['start']:.4f} to {part['end']:.4f}") for part in outcome.parts]
        changed += [(name, f"left as it was: {why}") for name, why in outcome.left.items()]
        return lines + [(f"{self.name}: {name}", values) for name, values in changed]
