"""What an option is. Its help, choices and limits stand beside its default, in config.py or in the class of a step."""

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args, get_origin

from permtriton.errors import ConfigError, shown
from permtriton.util.sparsity import NMPattern

Config = TypeVar("Config")
TRUTH = {"true": True, "false": False}


@dataclass(frozen=True)
class Option:
    """One option, as its field in a dataclass of options describes it."""

    field: str  # name of the field
    type: Any  # type of the value; a ``Literal`` lists the choices
    default: Any  # value where neither the user nor the recipe gives one
    help: str  # what the option sets, in a sentence or two
    panel: str  # heading of the option in ``--help-all`` and docs/options.md
    step: str = ""  # name of the step that has the option; empty for an option of the whole compilation
    prefix: str = ""  # beginning of the option's name: the step's prefix and an underscore
    minimum: float = 0
    maximum: float = sys.float_info.max  # by default, every finite number is allowed
    positive: bool = False  # whether the number must be greater than 0
    pattern: str = ""  # regular expression that the whole text must match
    values: str = ""  # allowed values in words, if type, choices and limits do not describe them
    # name of another option -> its values with which this option has an effect; empty if it always has an effect
    needs: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Name in Python, such as ``learn_epochs``."""
        return f"{self.prefix}{self.field}"

    @property
    def flag(self) -> str:
        """Name on the command line, such as ``--learn-epochs``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def several(self) -> bool:
        """Whether its value is a tuple of any number of strings."""
        return get_origin(self.type) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values if the type is a ``Literal``; empty for other types."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        if self.values or self.choices:
            return self.values or f"one of {', '.join(self.choices)}"
        if self.type is bool:
            return "true or false"
        number, a = ("integer", "an") if self.type is int else ("finite number", "a")
        if self.positive:
            return f"a positive {number}"
        if self.maximum < sys.float_info.max:
            return f"{a} {number} from {self.minimum} to {self.maximum}"
        return f"{a} {number} of at least {self.minimum}" if self.minimum else f"a non-negative {number}"

    def convert(self, value: Any) -> Any:
        """Returns a user's value in the option's type; values that `check` refuses may be returned unchanged.

        Raises:
            ConfigError: the text of a number, truth value or pattern cannot be read.
        """
        if self.type is NMPattern and not isinstance(value, NMPattern):
            return NMPattern.parse(value if isinstance(value, str) else shown(value))
        if self.several:
            return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
        if isinstance(value, str) and self.type in (int, float, bool):
            try:
                return TRUTH[value.lower()] if self.type is bool else self.type(value)
            except (KeyError, ValueError):
                raise self._wrong(value) from None
        exact = type(value) is int and abs(value) <= sys.float_info.max
        return float(value) if self.type is float and exact else value

    def check(self, value: Any) -> None:
        if self.several:
            allowed = isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)
        elif self.choices:
            allowed = value in self.choices
        else:
            types = (int, float) if self.type is float else self.type
            if not isinstance(value, types) or (isinstance(value, bool) and self.type is not bool):
                got = type(value).__name__
                raise self._wrong(value, f"{self.type.__name__}, got {got}")
            if isinstance(value, int | float):  # NaN is in no range
                allowed = self.minimum <= value <= self.maximum and (value > 0 or not self.positive)
            else:
                allowed = not self.pattern or re.fullmatch(self.pattern, value) is not None
        if not allowed:
            raise self._wrong(value)

    def _wrong(self, value: Any, expected: str = "") -> ConfigError:
        return ConfigError(f"`{self.name}=` is {shown(value)}: expected {expected or self.expected}")


def option(default: Any, help: str, **facts: Any) -> Any:
    """Returns the dataclass field of an option; ``facts`` are further attributes of `Option`."""
    return dataclasses.field(default=default, metadata={"help": help, **facts})


def options_of(config: Any) -> list[Option]:
    """Returns the options among the fields of a dataclass of options, or of an instance of one.

    A dataclass with a ``name`` and a ``prefix`` is a step of a recipe: the names of its options begin with this prefix,
    and the step has its own heading in lists of options.
    """
    step = getattr(config, "name", "")
    of_step = {"step": step, "prefix": f"{config.prefix}_", "panel": f"Step {step}"} if step else {}
    return [Option(f.name, f.type, f.default, **{**of_step, **f.metadata}) for f in fields(config) if f.metadata]


def fields_of(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns field -> value for the options of the dataclass ``kind`` whose names are among the keys of ``values``."""
    return {option.field: values[option.name] for option in options_of(kind) if option.name in values}


def check_options(config: Any) -> None:
    for option in options_of(config):
        option.check(getattr(config, option.field))
