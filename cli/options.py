"""Flags: those of config options, made from `permtriton.config`, and those that several commands share."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from permtriton.config import RUNNING
from permtriton.driver.asked import Asked
from permtriton.errors import OutputError
from permtriton.recipe import all_options, defaults
from permtriton.util.option import Option
from permtriton.util.sparsity import NMPattern

Flags = dict[str, Any]


def output_path(name: str) -> Path:
    """Returns the path of an output; as a path, an empty name would be the present folder.

    Raises:
        OutputError: the name is empty, as that of a variable that is not set.
    """
    if not name:
        raise OutputError("the name of an output is empty: name a file or a folder, or leave the option out")
    return Path(name)


running_option = functools.partial(typer.Option, rich_help_panel=RUNNING)
output_option = functools.partial(typer.Option, parser=output_path, metavar="PATH")


def asked_flag(asked: Field[Any]) -> Any:
    """Returns the annotated type that typer makes the flag of something asked of."""
    flag, facts = f"--{asked.name.replace('_', '-')}", asked.metadata
    info = typer.Option(
        f"{flag}/--no-{flag[2:]}" if facts.get("no") else flag,
        help=facts["help"],
        rich_help_panel=facts["panel"],
        metavar=facts.get("metavar"),
        hidden=facts.get("hidden", False),
        parser=output_path if asked.name == "output" else None,
    )
    kind: Any = facts.get("kind", str)
    kind = kind if isinstance(asked.default, bool) else kind | None
    return Annotated[kind, info]


# Flags that other commands have, too.
GgufName, Revision, Token, TrustRemoteCode = (
    asked_flag(each) for each in fields(Asked) if each.name in ("gguf_file", "revision", "token", "trust_remote_code")
)
Model = Annotated[
    str, typer.Argument(help="A model folder, a hub name, a .gguf file, or demo (a small model inside permtriton).")
]
Json = Annotated[bool, running_option("--json", help="Print the report as JSON on standard output.")]


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        for parameter in ctx.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", is_eager=True, callback=_show_all, help="Show every option, those of all steps included."
    ),
]
# Those of an ordinary compilation, which --help shows; --help-all shows all.
COMMON = (
    "sparsity",
    "pattern",
    "importance",
    "layout",
    "targets",
    "ignore",
    "calibration",
    "samples",
    "sequence_length",
)

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier file, whoever wrote it.")]


def takes(*names: str, without: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that gives a command a flag for each of these options, and for those of all steps.

    They stand where the command has its parameter ``flags``, which receives the values of those that the user set. A
    parameter ``asked`` stands for a flag of everything that may be asked: of each field of its type that has words.

    Args:
        names: names of options of the compilation; none means all, and those of the steps.
        without: names of options to leave out of all.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(command).parameters
        wanted = (names or set(all_options()) - {*without}) if "flags" in parameters else ()
        taken = [option for name, option in all_options().items() if name in wanted]
        kind = parameters["asked"].annotation if "asked" in parameters else None
        asked = [each for each in fields(kind) if each.metadata] if kind else []
        made = {
            "flags": [_flag(option, hidden=not names and option.name not in COMMON) for option in taken],
            "asked": [
                _parameter(each.name, asked_flag(each), each.metadata.get("unset", each.default)) for each in asked
            ],
        }

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            given = {option.name: arguments.pop(option.name) for option in taken}
            if taken:
                arguments["flags"] = {name: value for name, value in given.items() if value is not None}
            if kind:
                arguments["asked"] = kind(**{each.name: arguments.pop(each.name) for each in asked})
            command(**arguments)

        signature = inspect.Signature([p for own in parameters.values() for p in made.get(own.name, [own])])
        run.__signature__ = signature  # type: ignore[attr-defined]
        return run

    return decorate


def _flag(option: Option, *, hidden: bool) -> inspect.Parameter:
    """Returns the parameter that typer makes an option's flag of: None unless the user sets it."""
    kind = list[str] if option.several else option.type if option.type in (int, float, bool) else str
    values = option.values or "|".join(option.choices)
    info = typer.Option(
        metavar=_metavar(option),
        help=f"{option.help} [{values}{values and '; '}default: {defaults(option)}]",
        rich_help_panel=option.panel,
        hidden=hidden,
    )
    annotation = Annotated[kind | None, info]  # type: ignore[valid-type]
    return _parameter(option.name, annotation, None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _metavar(option: Option) -> str | None:
    """Returns what stands for an option's value beside its flag; None for its last word."""
    if option.type is NMPattern:
        return "N:M"
    if len(choices := "|".join(option.choices)) in range(1, 20):
        return choices
    if option.several:
        return "LINEARS=N:M" if option.name == "pattern" else "LINEARS"
    return {int: "N", float: "X"}.get(option.type)


SET_BY_ROWS = ("sparsity", "importance", "layout", "seed")  # of a comparison, which has --sparsity and --seeds for all
