"""A recipe's steps with the options that they share; **add a shared option in** `permtriton.config`, not here."""

from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any

from permtriton.config import SURPLUS, CommonConfig
from permtriton.errors import ConfigError
from permtriton.methods.step import Step
from permtriton.util.option import Option, options_of


@dataclass(frozen=True)
class CompileConfig(CommonConfig):
    """Everything that decides a compilation's result; `permtriton.recipe.config_from` makes one from a recipe.

    ``named`` is the text that named the recipe or its steps; empty if the steps were given as objects.
    """

    steps: tuple[Step, ...] = ()
    named: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.importance == "auto":
            preferred = (step.importance for step in self.steps if step.importance)
            object.__setattr__(self, "importance", next(preferred, "wanda"))
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
            if problem := step.conflicts(self, self.steps):
                raise ConfigError(problem)

    @property
    def recipe(self) -> str:
        """The names of the steps, separated by commas."""
        return ",".join(step.name for step in self.steps)

    @property
    def uses_importance(self) -> bool:
        return bool(self.dense_share) or any(step.uses_importance() for step in self.steps)

    @property
    def gradients(self) -> bool:
        return bool(self.dense_share) or any(step.gradients for step in self.steps)

    @property
    def surplus(self) -> int:
        extras = (step.extra_per_sample + ceil(step.fresh_samples / self.calibration.samples) for step in self.steps)
        return max([SURPLUS, *(1 + per_sample for per_sample in extras)])

    @property
    def generated(self) -> int:
        """Number of sequences that the dense model writes beside the calibration samples; 0 if no step reads them."""
        return self.calibration.generated if any(step.reads_generated for step in self.steps) else 0

    def has(self, name: str) -> bool:
        return any(step.name == name for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Returns the flat options that `permtriton.recipe.config_from` reads back to an equal config."""
        values = {option.name: getattr(self, option.field) for option in options_of(self)}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        values["sparsity"] = str(self.sparsity)
        for step in self.steps:
            values |= {option.name: getattr(step, option.field) for option in options_of(step)}
        return {"recipe": self.recipe} | values | asdict(self.calibration)


def no_effect_refusal(option: Option, config: CompileConfig) -> str:
    """Returns the end of the sentence "OPTION has no effect with", and what to do; empty if it has an effect."""
    recipe = f"`recipe={config.recipe}`"
    if option.step and not config.has(option.step):
        return f"{recipe}: it is an option of the step {option.step}; leave it out, or add {option.step} to the recipe"
    if option.name == "importance" and not config.uses_importance:
        return f"{recipe}, which chooses its own mask: leave it out"
    if option.name == "generated" and not any(step.reads_generated for step in config.steps):
        return f"{recipe}, none of whose steps reads such text: leave it out"
    values = config.to_dict()
    for other, allowed in option.needs.items():
        if values[other] not in allowed:
            choices = " or ".join(f"`{other}={value}`" for value in allowed)
            return f"`{other}={values[other]}`: leave it out, or choose {choices}"
    return ""
