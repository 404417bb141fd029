"""The options of a compilation, but for those of its steps, which stand with each step in ``permtriton/methods``."""

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from permtriton.errors import ConfigError
from permtriton.option import Option, check_options, documented, option, options_of
from permtriton.sparsity import MAX_GROUP, NMPattern
from permtriton.step import Step

ImportanceMethod = Literal["auto", "magnitude", "wanda", "ria", "obs"]
ObjectiveKind = Literal["kl", "cosine"]
Layout = Literal["portable", "fused"]
OProj = Literal["tied", "free"]

METHOD, CALIBRATION, RUNNING = PANELS = ("What to do", "Calibration and evaluation", "Running")
_method = partial(option, panel=METHOD)
_calibration = partial(option, panel=CALIBRATION)
_running = partial(option, panel=RUNNING)
LINEARS = (
    "names of linears or of modules that hold them, globs (*.down_proj), regular expressions after re:, or names of "
    "classes"
)
WRITTEN = "none"  # the calibration source of a compilation that reads nothing but what the dense model writes


@documented
@dataclass(frozen=True)
class CalibrationConfig:
    """The samples that statistics, learning and reconstruction see."""

    calibration: str = _calibration(
        "c4",
        "Calibration data: text (the demo model takes demo), or what else the model reads.",
        values="demo, c4, wikitext2, pile, or a .txt, .jsonl (text or input_ids) or .parquet file; none for the text "
        "that the model writes alone (--generated); for a model of images or sound a folder of images or .wav files; "
        "for any model a .safetensors file with its inputs",
    )
    samples: int = _calibration(128, "Number of calibration sequences, images or sounds.", minimum=1)
    sequence_length: int = _calibration(1024, "Tokens per calibration sequence.", minimum=2)
    generated: int = _calibration(
        0,
        "Further sequences, which the dense model writes, for the steps that bring the pruned model back to it (refit, "
        "reconstruct, distill); only for models that write text.",
    )

    def __post_init__(self) -> None:
        check_options(self)


@documented
@dataclass(frozen=True)
class CompileConfig:
    """Everything that decides a compilation's result; `permtriton.recipe.config_from` makes one from a recipe.

    Without steps, it says only how a model is planned.
    """

    sparsity: NMPattern = _method(
        NMPattern(2, 4),
        "Sparsity pattern: N of every M consecutive weights of a row are kept.",
        values=f"N:M with 0 < N < M <= {MAX_GROUP}",
    )
    importance: ImportanceMethod = _method(
        "auto",
        "Score that decides which weights are kept. auto means obs in a recipe with sparsegpt or refit, else wanda.",
    )
    layout: Layout = _method(
        "portable",
        "portable: all permutations folded into weights, a plain checkpoint that loads anywhere. fused: a permutation "
        "for every layer input; what does not fold runs inside the norms or as a gather, and loading needs permtriton.",
    )
    o_proj: OProj = _method(
        "tied",
        "With fused, the permutation of the attention output: tied (within heads, folded) or free (over all its "
        "channels, with a gather).",
        needs={"layout": ("fused",)},
    )
    skip_indivisible: bool = _method(
        False, "Leave linears dense if their number of input channels is not a multiple of M."
    )
    targets: tuple[str, ...] = _method(
        (),
        "The only linears that are pruned; none for all that can be. Repeat the flag for several.",
        values=LINEARS,
    )
    ignore: tuple[str, ...] = _method(
        (), "Linears that stay dense, among the targets, too. Repeat the flag for several.", values="as for targets"
    )
    seed: int = _running(0, "Seed of all that is drawn at random, such as calibration sequences.", maximum=2**32 - 1)
    micro_batch_size: int = _running(
        4,
        "Sequences per forward and backward pass: fewer need less memory, for the same result.",
        minimum=1,
        gradients=True,
    )
    activation_checkpointing: bool = _running(
        True,
        "Recompute activations in the backward pass, one layer at a time: less memory, more time.",
        gradients=True,
    )
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        check_options(self)
        if self.importance == "auto":
            wanted = (step.importance for step in self.steps if step.importance)
            object.__setattr__(self, "importance", next(wanted, "wanda"))
        names = [step.name for step in self.steps]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"recipe {self.recipe} has the step {repeated[0]} more than once: name each step once")
        for first, second in zip(self.steps, self.steps[1:], strict=False):
            if second.stage < first.stage:
                raise ConfigError(
                    f"recipe {self.recipe}: {second.name} cannot follow {first.name}: first come the steps that order "
                    "channels, then the one that prunes, then those that train the kept weights"
                )
        for step in self.steps:
            if problem := step.conflicts(self):
                raise ConfigError(problem)

    @property
    def recipe(self) -> str:
        """The names of the steps, separated by commas."""
        return ",".join(step.name for step in self.steps)

    @property
    def uses_importance(self) -> bool:
        """Whether the importance decides anything in one of the steps."""
        return any(step.uses_importance() for step in self.steps)

    @property
    def alone(self) -> bool:
        """Whether the text that the dense model writes is all there is."""
        return self.calibration.calibration == WRITTEN

    @property
    def generated(self) -> int:
        """Number of sequences that it writes beside the calibration samples: 0 where no step reads them."""
        return 0 if self.alone or not any(step.reads_generated for step in self.steps) else self.calibration.generated

    @property
    def writes(self) -> int:
        """Number of all sequences that it writes."""
        return self.calibration.generated if self.alone else self.generated

    def has(self, name: str) -> bool:
        """Whether the recipe has a step of this name."""
        return any(step.name == name for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Returns the flat options that `permtriton.recipe.config_from` reads back to an equal config."""
        own = {each.name: getattr(self, each.field) for each in options_of(self)}
        own |= {"sparsity": str(self.sparsity), "targets": list(self.targets), "ignore": list(self.ignore)}
        for step in self.steps:
            own |= {each.name: getattr(step, each.field) for each in options_of(step)}
        return {"recipe": self.recipe} | own | asdict(self.calibration)


def has_effect(option: Option, config: CompileConfig) -> bool:
    """Returns whether an option has an effect with the rest of a config."""
    return not why_no_effect(option, config)


def why_no_effect(option: Option, config: CompileConfig) -> str:
    """Returns with what an option has no effect, and what to do, as the end of a sentence; empty if it has one."""
    recipe = f"--recipe {config.recipe}"
    if option.step and not config.has(option.step):
        return f"{recipe}: it is an option of the step {option.step}; leave it out, or add {option.step} to the recipe"
    if option.gradients and not any(step.gradients for step in config.steps):
        return f"{recipe}, which computes no gradients: leave it out"
    if option.name == "importance" and not config.uses_importance:
        return f"{recipe}, which chooses its own mask: leave it out"
    if option.name == "generated" and not config.alone and not any(step.reads_generated for step in config.steps):
        return f"{recipe}, none of whose steps reads such text: leave it out"
    if option.name == "samples" and config.alone:
        return f"--calibration {WRITTEN}, where all sequences are written: leave it out, and set --generated"
    values = config.to_dict()
    for other, allowed in option.needs.items():
        if values[other] not in allowed:
            return f"--{other} {values[other]}: leave it out, or choose --{other} {' or '.join(allowed)}"
    return ""
