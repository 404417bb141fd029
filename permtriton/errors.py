"""The errors that a user can meet. Each message says what is wrong, what was expected and what to do.

A message names options as Python does, in backticks: "lower `samples=`", "give `samples=64`". The command line prints
it on one line with flags in their place (`as_flags`), and exits with code 2.
"""

import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

LONGEST = 300  # characters of another library's message that are kept
_SHORT = reprlib.Repr()
_ARGUMENT = re.compile(r"`(\w+)=([^`]*)`")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class PermTritonError(Exception):
    """Base class of every error that permtriton raises on purpose; its message is for the user."""


class ConfigError(PermTritonError):
    """An option, or a combination of options, that makes no sense."""


class MemoryTooSmallError(PermTritonError):
    """Work that does not fit into memory even in its smallest pieces."""


class ModelError(PermTritonError):
    """A model or checkpoint that cannot be loaded, traced, pruned or exported."""


class CalibrationError(PermTritonError):
    """Text or token ids that cannot be used for calibration or evaluation, or activations that are not finite."""


class TaskError(PermTritonError):
    """A task of an evaluation that is unknown, whose data cannot be read, or that the model cannot run."""


class MissingExtraError(PermTritonError):
    """A package that is not installed; the message says which extra installs it."""


class OutputError(PermTritonError):
    """An output that cannot be written, or that must not be replaced."""


class VerificationError(PermTritonError):
    """A failed check of the result; nothing was saved."""


@contextmanager
def reading(what: str, kind: type[PermTritonError]) -> Iterator[None]:
    """Turns exceptions of other libraries, which read a user's input inside the ``with`` block, into our own error.

    A damaged or hostile file may cause any exception; a panic of Rust code is not even an ``Exception``. Our own errors
    and interruptions pass through unchanged.

    Args:
        what: start of the message, which names the file and says what cannot be done with it.
        kind: error to raise; the first line of the cause follows ``what``.
    """
    try:
        yield
    except (PermTritonError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise kind(f"{what}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, up to `LONGEST` characters, and the second if a colon announces it.

    An empty message, or one of a ``LookupError``, follows the name of the error's class. Backticks in the message of
    another library become quotes, because ours mark options (`as_flags`).
    """
    message = str(error) if isinstance(error, PermTritonError) else str(error).replace("`", "'")
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    line = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    if not line or isinstance(error, LookupError):
        line = f"{type(error).__name__} {line}".strip()
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


def shown(value: Any) -> str:
    """Returns a short form of any value for a message."""
    return _SHORT.repr(value)


def near(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: similar known names, or the command that lists all."""
    close = get_close_matches(name, list(known))
    return f": did you mean {', '.join(close)}?" if close else ": permtriton compile --help-all lists all options"


def as_flags(message: str) -> str:
    """Returns a message in which options are written as on the command line: ``--samples 64``."""

    def flag(match: re.Match[str]) -> str:
        name = match[1].replace("_", "-")
        return {"True": f"--{name}", "False": f"--no-{name}"}.get(match[2]) or f"--{name} {match[2]}".rstrip()

    return _ARGUMENT.sub(flag, message)


def listed(names: Iterable[str]) -> str:
    """Returns the names of modules or parameters for a message; names that differ in numbers become one with ranges.

    ``layers.0.mlp.up_proj`` to ``layers.9.mlp.up_proj`` become ``layers.0-9.mlp.up_proj``.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    listing = []
    for alike in groups.values():
        columns = zip(*(map(int, _NUMBER.findall(name)) for name in alike), strict=True)
        ranges = [sorted(set(column)) for column in columns]
        if math.prod(map(len, ranges)) == len(alike):
            texts = map(_ranges, ranges)
            alike = [_NUMBER.sub(lambda _, texts=texts: next(texts), alike[0])]  # type: ignore[misc]
        listing += alike  # one name with ranges, or every name where some combination of numbers is missing
    return ", ".join(listing)


def reasons_of(problems: Mapping[str, str]) -> list[str]:
    """Returns ``NAMES: reason`` for every reason in a mapping of names to reasons; `listed` writes the names."""
    names: dict[str, list[str]] = {}
    for name, reason in problems.items():
        names.setdefault(reason, []).append(name)
    return [f"{listed(alike)}: {reason}" for reason, alike in names.items()]


def _ranges(numbers: list[int]) -> str:
    """Returns ascending numbers as ``0-3+7``."""
    ends = [n for n in numbers if n + 1 not in numbers]
    starts = [n for n in numbers if n - 1 not in numbers]
    return "+".join(f"{first}-{last}" if first < last else str(first) for first, last in zip(starts, ends, strict=True))
