"""Flags and their help: for arguments of public functions, for config options, and flags that commands share."""

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.markup import escape

from permtriton.arguments import LoadArgs
from permtriton.checkpoint.formats import HELP as FORMATS
from permtriton.config import RUNNING
from permtriton.errors import OutputError
from permtriton.evaluation.compare_methods import FUSED, METHODS
from permtriton.recipe import RECIPES, all_options, defaults
from permtriton.util.option import Option

Flags = dict[str, Any]
# What stands in braces in the help of an argument.
WORDS = {
    "recipes": ", ".join(RECIPES),
    "methods": f"{', '.join(name for name in METHODS if not name.endswith(FUSED))}, and those that order channels with"
    f"{FUSED} after them",
    "formats": FORMATS,
    "special_tokens": all_options()["special_tokens"].help,
}


def output_path(name: str) -> Path:
    """Returns the path of an output; refuses an empty name, which as a path would be the current folder."""
    if not name:
        raise OutputError("the name of an output is empty: name a file or a folder, or leave the option out")
    return Path(name)


def flag(help: str, *names: str, panel: str | None = None, kind: Any = str, **settings: Any) -> Any:
    """Returns the type of a parameter that is a flag; ``settings`` are further arguments of `typer.Option`."""
    if kind is bool:
        settings["metavar"] = ""  # else typer writes <bool>, as if the flag took a value
    return Annotated[kind | None, typer.Option(*names, help=escape(help), rich_help_panel=panel, **settings)]


def argument_flag(field: Field[Any]) -> Any:
    """Returns the type of the flag of an argument in `permtriton.arguments`.

    What may be text is read as text, and a bool without None has no flag that turns it off.
    """
    types = get_args(field.type) or (field.type,)
    kind = next((kind for kind in (bool, Path, str, int) if kind in types), str)
    settings = {**field.metadata, "help": field.metadata["help"].format(**WORDS)}
    if field.name == "output":
        settings |= {"parser": output_path, "metavar": "PATH"}
    names = [f"--{field.name.replace('_', '-')}"] if field.type is bool else []
    return flag(settings.pop("help"), *names, kind=kind, **settings)


running_flag = functools.partial(flag, panel=RUNNING)
output_flag = functools.partial(flag, kind=Path, parser=output_path, metavar="PATH")
Json = running_flag("Print the report as JSON on standard output.", "--json", kind=bool)
Overwrite = flag("Replace an earlier file, whoever wrote it.", "--overwrite", kind=bool)
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A model folder, a hub name, a .gguf file, or demo (a small model inside permtriton)."
    ),
]
GgufFile, Revision, Token, TrustRemoteCode = (
    argument_flag(LoadArgs.__dataclass_fields__[name])
    for name in ("gguf_file", "revision", "token", "trust_remote_code")
)
# The options of an ordinary compilation, which --help shows; --help-all shows all.
COMMON = (
    *("sparsity", "pattern", "importance", "layout", "targets", "ignore"),
    *("calibration", "samples", "sequence_length"),
)


def _show_all(ctx: typer.Context, chosen: bool) -> None:
    if chosen:
        for parameter in ctx.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = flag(
    "Show every option, those of all steps included.", "--help-all", kind=bool, is_eager=True, callback=_show_all
)


def takes(names: Collection[str] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that gives a command flags whose values it receives in its parameters ``args`` and ``flags``.

    ``args`` receives the arguments of a public function, ``flags`` the values of those options that the user set.

    Args:
        names: Names of the options; by default all options of a compilation and of its steps.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(command).parameters
        made: dict[str, list[inspect.Parameter]] = {}
        if "args" in parameters:
            made["args"] = _arguments(parameters["args"].annotation)
        if "flags" in parameters:
            options = [option for option in all_options().values() if names is None or option.name in names]
            made["flags"] = [_option(o, hidden="help_all" in parameters and o.name not in COMMON) for o in options]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            taken = {name: {flag.name: values.pop(flag.name) for flag in flags} for name, flags in made.items()}
            if "args" in taken:
                values["args"] = parameters["args"].annotation(**taken["args"])
            if "flags" in taken:
                values["flags"] = {name: value for name, value in taken["flags"].items() if value is not None}
            command(**values)

        signature = [flag for parameter in parameters.values() for flag in made.get(parameter.name, [parameter])]
        run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
        return run

    return decorate


def _arguments(kind: Any) -> list[inspect.Parameter]:
    """Returns the flags of a class of `permtriton.arguments`, its own before those of the classes that it extends."""
    defaults = {field.name: field.default for field in fields(kind)}
    defaults["eval_data"] = None  # until a protocol chooses it
    bases: list[Any] = [base for base in kind.__mro__ if is_dataclass(base)]
    known = [base.__dataclass_fields__[name] for base in bases for name in inspect.get_annotations(base)]
    return [_parameter(field.name, argument_flag(field), defaults[field.name]) for field in known if field.metadata]


def _option(option: Option, *, hidden: bool) -> inspect.Parameter:
    kind = list[str] if option.several else option.type if option.type in (int, float, bool) else str
    choices = "|".join(option.choices)
    values = option.values or choices
    help = f"{option.help} [{values}{values and '; '}default: {defaults(option)}]"
    short = "LINEARS" if option.several else choices if len(choices) < 20 else ""
    metavar = {"sparsity": "N:M", "pattern": "LINEARS=N:M"}.get(option.name, short) or None  # None for typer's own
    return _parameter(option.name, flag(help, panel=option.panel, kind=kind, hidden=hidden, metavar=metavar), None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
