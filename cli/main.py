"""The command line. Each command is in the module of its name, which is imported when the command is called."""

import atexit
import gc
import os
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib import import_module, metadata
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from permtriton.cli import torchrun
from permtriton.cli.console import clear_errors
from permtriton.errors import ConfigError
from permtriton.util.bars import err

COMMANDS = {
    "compile": "Prune MODEL to N:M sparsity and write a Hugging Face checkpoint. All options: --help-all.",
    "recipes": "Show the recipes, and the steps that they are made of, with one line each.",
    "inspect": "Show what would be pruned, where each permutation would go and what it costs. Reads only MODEL's "
    "config.",
    "compare": "Prune MODEL with every method on the same text and show how much each one hurts. Saves no model. All "
    "options: --help-all.",
    "evaluate": "Measure MODEL, dense or written by permtriton in any format: perplexity, zero-shot tasks of lm-eval, "
    "KL and cosine to the dense model.",
    "export": "Rewrite a compiled checkpoint packed or dense, bit for bit the same weights, or in 8 bits.",
    "report": "Write one HTML page about compiled folders: results, masks, how they were found. It needs no network.",
    "doctor": "Show what this machine is, and test the kernels on its GPU; the thing to paste into a bug report.\n\n"
    "Exit code 2 if the self-test fails.",
    "autotune": "Find the fastest configuration of each GPU kernel, for the shapes of a model, on the present GPU.",
}
FIRST_LINES = {"inspect": "reading the sizes of the model, not its weights"}  # printed before torch is imported
CONTINUED = ("compile", "compare", "autotune")  # commands that keep what they have finished
SETTINGS = {"help_option_names": ["-h", "--help"]}


def command_named(name: str) -> TyperCommand:
    """Imports a command's module, which takes seconds if it imports torch, and returns the command."""
    single = typer.Typer(add_completion=False, context_settings=SETTINGS)
    single.command(name, help=COMMANDS[name])(getattr(_module(name), name))
    return typer.main.get_command(single)  # type: ignore[return-value]


@cache
def _module(name: str) -> ModuleType:
    """Imports a command's module without garbage collection, because all of the million objects that it makes stay."""
    gc.disable()
    try:
        return import_module(f"permtriton.cli.{name}")
    finally:
        gc.freeze()  # later collections skip these objects, too, which saves a fifth of the time of tracing a model
        atexit.register(gc.unfreeze)  # else extension modules report what was never collected
        gc.enable()


class Commands(TyperGroup):
    """The group of all commands; lists them without importing their modules, and prints their errors in one line."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=help) for name, help in COMMANDS.items()}

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with clear_errors():
            return super().make_context(*arguments, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in FIRST_LINES and rest and not {"-h", "--help"} & {*rest}:
            err.print(FIRST_LINES[name])
        return name, command and command_named(args[0]), rest

    def invoke(self, ctx: Any) -> Any:
        with clear_errors(lambda: ctx.invoked_subcommand in CONTINUED):
            return super().invoke(ctx)


app = typer.Typer(cls=Commands, pretty_exceptions_enable=False, context_settings=SETTINGS)


def _print_version(chosen: bool) -> None:
    if chosen:
        typer.echo(f"permtriton {metadata.version('permtriton')}")
        raise typer.Exit


@app.callback()
def _permtriton(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Prune language models to N:M sparsity, such as 2:4. Start with: permtriton compile demo"""
    if torchrun.launched() and ctx.invoked_subcommand != "compile":
        raise ConfigError(f"permtriton {ctx.invoked_subcommand} is one process: start it without torchrun")


def main() -> None:
    """Runs the command line and ends the process at once, because freeing its million objects would take seconds."""
    try:
        app()
    except SystemExit as end:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter would
        atexit._run_exitfuncs()
        with suppress(BrokenPipeError):  # the reader of a pipe, such as head, has ended
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


if __name__ == "__main__":
    main()
