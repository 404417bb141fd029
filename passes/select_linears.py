"""The linears that a user's options prune, leave dense, or give another pattern."""

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from permtriton.errors import ConfigError, reading
from permtriton.util.sparsity import NMPattern

REGEX = "re:"
NOT_NAMED = "not named by targets"
IGNORED = "named by ignore: "


def left_out(linears: Mapping[str, nn.Module], targets: Iterable[str], ignore: Iterable[str]) -> dict[str, str]:
    """Returns each linear that the user's options leave dense -> the reason.

    Args:
        targets: patterns of the linears to prune; empty to prune all. A pattern is the name of a linear or of a module
            that holds linears, a glob, a regular expression after ``re:`` (which matches from the start of a name), or
            the name of a linear's class.
        ignore: patterns of linears that stay dense, whether ``targets`` names them or not.
    """
    ignored = {name: f"{IGNORED}{pattern}" for name, pattern in _named(linears, "ignore", ignore).items()}
    targeted = _named(linears, "targets", targets) or linears
    return ignored | {name: NOT_NAMED for name in linears if name not in targeted and name not in ignored}


def own_patterns(linears: Mapping[str, nn.Module], chosen: Iterable[str]) -> dict[str, str]:
    """Returns each linear to which the user gives a sparsity pattern -> the text that gives the pattern.

    Args:
        chosen: texts such as ``*.down_proj=4:8``, which name linears by a pattern as in `left_out`. Where two texts
            name the same linear, the first one counts.
    """
    return _named(linears, "pattern", chosen, lambda text: NMPattern.of_some(text)[0])


def check_own_patterns(patterns: Mapping[str, str], chosen: Iterable[str], skipped: Mapping[str, str]) -> None:
    """Refuses a text that gives no pruned linear a pattern, unless one of its linears is left dense by ``ignore``."""
    for text in chosen:
        reasons = [skipped.get(name, "") for name in patterns if patterns[name] == text]
        if not reasons:
            raise ConfigError(f"`pattern={text}` names no linear that an earlier one does not name: leave it out")
        if all(reasons) and not any(reason.startswith(IGNORED) for reason in reasons):
            raise ConfigError(
                f"`pattern={text}` names no linear that is pruned, but one that stays dense: {reasons[0]}"
            )


def _named(
    linears: Mapping[str, nn.Module], option: str, texts: Iterable[str], pattern_in: Callable[[str], str] = str
) -> dict[str, str]:
    """Returns each linear that an option names -> the first of its ``texts`` with a pattern that names the linear."""
    first_texts: dict[str, str] = {}
    for text in texts:
        pattern = pattern_in(text)
        named = [name for name, module in linears.items() if _matches(option, pattern, name, module)]
        if not named:
            several = "; repeat the option for several" if "," in pattern else ""
            raise ConfigError(
                f"`{option}={pattern}` names no linear of this model, whose linears are such as "
                f"{', '.join(_near(pattern.removeprefix(REGEX).strip('*.'), linears)[:3])}{several}"
            )
        first_texts |= {name: text for name in named if name not in first_texts}
    return first_texts


def _near(text: str, linears: Mapping[str, nn.Module]) -> list[str]:
    """Returns the names that resemble ``text``, or all names if none does.

    Embeddings, which are among ``linears`` where an output head shares their weight, are left out.
    """
    names = [name for name, module in linears.items() if not isinstance(module, nn.Embedding)]
    if containing := [name for name in names if text in name]:
        return containing
    last = {name.rpartition(".")[2] for name in names}
    alike = get_close_matches(text.rpartition(".")[2], last, n=1)
    return [name for name in names if name.rpartition(".")[2] in alike] or get_close_matches(text, names) or names


def _matches(option: str, pattern: str, name: str, module: nn.Module) -> bool:
    if pattern.startswith(REGEX):
        with reading(f"`{option}={pattern}` is no regular expression", ConfigError):
            return re.match(pattern.removeprefix(REGEX), name) is not None
    return pattern == type(module).__name__ or fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
