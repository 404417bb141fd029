"""Which linears does a user want to stay dense?"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from permtriton.errors import ConfigError, shown

REGEX = "re:"


def ignored(linears: Mapping[str, nn.Module], patterns: Iterable[str]) -> dict[str, str]:
    """Returns each linear that a pattern names -> why it stays dense.

    Args:
        linears: name -> module.
        patterns: names of linears or of modules that hold them, globs, regular expressions after ``re:`` (which match
            from the start of a name), or names of classes.

    Raises:
        ConfigError: a pattern names no linear, or is no regular expression.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        named = [name for name, module in linears.items() if _matches(pattern, name, module)]
        if not named:
            near = get_close_matches(pattern.removeprefix(REGEX), linears, cutoff=0.3) or list(linears)[:3]
            raise ConfigError(
                f"ignore: {shown(pattern)} names no linear of this model, whose linears are such as {', '.join(near)}"
            )
        found |= {name: f"named by --ignore {pattern}" for name in named if name not in found}
    return found


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    if pattern.startswith(REGEX):
        try:
            return re.match(pattern.removeprefix(REGEX), name) is not None
        except re.error as error:
            raise ConfigError(f"ignore: {shown(pattern)} is no regular expression: {error}") from error
    return pattern == type(module).__name__ or fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
