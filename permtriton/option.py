"""What an option is. Its help, choices and limits stand beside its default; flags and docs are made from them."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from textwrap import fill
from typing import Any, Literal, TypeVar, get_args, get_origin

from permtriton.errors import ConfigError, shown
from permtriton.sparsity import NMPattern

Config = TypeVar("Config")


@dataclass(frozen=True)
class Option:
    """One option, as its field in a config dataclass describes it.

    Attributes:
        name: Name of the field and key in TOML; the flag has dashes in place of underscores.
        type: Type of the value; a ``Literal`` lists the choices.
        default: Value in the ``default`` recipe.
        help: What it sets, in a sentence or two.
        panel: Heading that it stands under in ``--help`` and docs/options.md.
        minimum: Smallest number allowed.
        maximum: Largest number allowed; by default every finite one.
        positive: Whether the number must be greater than 0.
        pattern: Regular expression that the whole text must match.
        values: Allowed values in words, where type, choices and limits do not say it all.
        needs: Other options and their values that give this option an effect: one of them must have one of its values.
            A value may be a part of a longer one, as ``sparsegpt`` is of ``sparsegpt+distill``. Empty if it always has
            an effect.
    """

    name: str
    type: Any
    default: Any
    help: str
    panel: str
    minimum: float = 0
    maximum: float = sys.float_info.max
    positive: bool = False
    pattern: str = ""
    values: str = ""
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)

    @property
    def flag(self) -> str:
        """Name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values allowed, or nothing where there are too many to list."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        if self.values or self.choices:
            return self.values or f"one of {', '.join(self.choices)}"
        if self.type is bool:
            return "true or false"
        number = "integer" if self.type is int else "finite number"
        if self.positive:
            return f"a positive {number}"
        if self.maximum < sys.float_info.max:
            return f"an {number} from {self.minimum} to {self.maximum}"
        return f"an {number} of at least {self.minimum}" if self.minimum else f"a non-negative {number}"

    def convert(self, value: Any) -> Any:
        """Returns the value that a user's text or number stands for; what does not fit stays as it is.

        Raises:
            ConfigError: a sparsity pattern that cannot be read.
        """
        if self.type is NMPattern and not isinstance(value, NMPattern):
            return NMPattern.parse(value if isinstance(value, str) else shown(value))
        exact = type(value) is int and abs(value) <= sys.float_info.max
        return float(value) if self.type is float and exact else value

    def check(self, value: Any) -> None:
        """Checks type, choices and limits.

        Raises:
            ConfigError: the value is not allowed.
        """
        if self.choices:
            allowed = value in self.choices
        else:
            types = (int, float) if self.type is float else self.type
            if not isinstance(value, types) or (isinstance(value, bool) and self.type is not bool):
                got = type(value).__name__
                raise ConfigError(f"{self.name} is {shown(value)}: expected {self.type.__name__}, got {got}")
            if isinstance(value, int | float):  # NaN is in no range
                allowed = self.minimum <= value <= self.maximum and (value > 0 or not self.positive)
            else:
                allowed = not self.pattern or re.fullmatch(self.pattern, value) is not None
        if not allowed:
            raise ConfigError(f"{self.name} is {shown(value)}: expected {self.expected}")


def option(default: Any, help: str, **facts: Any) -> Any:
    """Returns the dataclass field of an option; ``facts`` are further attributes of `Option`."""
    return field(default=default, metadata={"help": help, **facts})


def options_of(config: Any) -> list[Option]:
    """Returns the options among the fields of a config dataclass, or of an instance of one."""
    return [Option(f.name, f.type, f.default, **f.metadata) for f in fields(config) if f.metadata]


def check_options(config: Any) -> None:
    """Checks every option of an instance.

    Raises:
        ConfigError: a value is not allowed.
    """
    for each in options_of(config):
        each.check(getattr(config, each.name))


def documented(cls: type[Config]) -> type[Config]:
    """Class decorator: adds to the docstring of a config dataclass what its options say."""
    lines = [f"{each.name}: {each.help} Expects {each.expected}." for each in options_of(cls)]
    wrapped = [fill(line, 120, initial_indent=" " * 8, subsequent_indent=" " * 12) for line in lines]
    cls.__doc__ = "\n".join([f"{cls.__doc__}\n\n    Attributes:", *wrapped])
    return cls
