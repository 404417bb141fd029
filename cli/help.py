"""What ``--help`` prints: every flag on a line of its own, whole at any width, and its words beside or below it."""

import shutil
from collections.abc import Iterator
from textwrap import TextWrapper
from typing import Any

MOST_USED = "Most used"
FIRST = ("recipe", "methods", "against", "calibration", "output")  # where a command has more than one of them
WORDS_AT = 26  # column at which the words of an option begin
WIDEST = 100


def text_of(command: Any, context: Any) -> str:
    """Returns the help of a command, or of the program with its list of commands."""
    width = max(min(shutil.get_terminal_size().columns, WIDEST) - 1, 1)
    shown = [each for each in command.get_params(context) if not getattr(each, "hidden", False)]
    arguments = _arguments(command, context)
    commands = getattr(command, "commands", {})
    paragraphs = (command.help or "").partition("\f")[0].split("\n\n")
    blocks = [usage_of(command, context), *("\n".join(_wrapped(each, width)) for each in paragraphs)]
    blocks += _section("Commands", [(name, commands[name].help.split("\n\n")[0]) for name in commands], width)
    blocks += _section("Arguments", [(_argument(each), each.help) for each in arguments], width)
    for title, options in _panels([each for each in shown if each not in arguments]).items():
        blocks += _section(title, [(_flags(each), _words(each)) for each in options], width)
    return "\n\n".join(blocks)


def usage_of(command: Any, context: Any) -> str:
    """Returns how a command is called, in one line."""
    named = map(_argument, _arguments(command, context))
    return " ".join(["Usage:", context.command_path, *["COMMAND"] * hasattr(command, "commands"), *named, "[OPTIONS]"])


def _arguments(command: Any, context: Any) -> list[Any]:
    return [each for each in command.get_params(context) if each.param_type_name == "argument"]


def _panels(options: list[Any]) -> dict[str, list[Any]]:
    """Returns the options under their headings: first what most commands need, last what belongs to no heading."""
    first = [each for name in FIRST for each in options if each.name == name]
    panels: dict[str, list[Any]] = {MOST_USED: first} if len(first) > 1 else {}
    for option in options:
        if option not in panels.get(MOST_USED, ()):
            panels.setdefault(option.rich_help_panel or "Options", []).append(option)
    return panels | {"Options": panels.pop("Options")}  # a panel of --help at least


def _section(title: str, rows: list[tuple[str, str]], width: int) -> Iterator[str]:
    if rows:
        yield "\n".join([f"{title}:", *(line for row in rows for line in _lines(*row, width))])


def _lines(name: str, words: str, width: int) -> Iterator[str]:
    """Yields a name and its words beside it; below it, where the name is too long for that."""
    lines = _wrapped(words, width, " " * WORDS_AT)
    if lines and len(name) + 4 <= WORDS_AT:
        lines[0] = f"  {name}".ljust(WORDS_AT) + lines[0][WORDS_AT:]
    else:
        yield f"  {name}"
    yield from lines


def _wrapped(words: str, width: int, margin: str = "") -> list[str]:
    fold = TextWrapper(width, margin, margin, break_long_words=False, break_on_hyphens=False)
    return fold.wrap(" ".join(words.split()))


def _argument(argument: Any) -> str:
    return f"{argument.name.rstrip('s').upper()}{'...' if argument.nargs != 1 else ''}"


def _flags(option: Any) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        return f"{names}, {', '.join(option.secondary_opts)}"
    return names if option.is_flag else f"{names} {option.metavar or option.opts[-1].split('-')[-1].upper()}"


def _words(option: Any) -> str:
    default = option.default if isinstance(option.default, str) else None
    return f"{option.help} [default: {default}]" if default else option.help
