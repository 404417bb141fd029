"""The command line: what each command takes. What it does stands in the module of its name, which is imported when the
command runs: torch and transformers take seconds, and neither help nor a wrong option needs them.
"""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from permtriton.checkpoint.format import HELP as FORMATS
from permtriton.checkpoint.format import Format
from permtriton.cli import help, torchrun
from permtriton.cli.console import clear_errors
from permtriton.cli.options import (
    SET_BY_ROWS,
    Flags,
    GgufName,
    HelpAll,
    Json,
    Model,
    Overwrite,
    Revision,
    Token,
    TrustRemoteCode,
    output_option,
    takes,
)
from permtriton.comparison.asked import AskedComparison
from permtriton.driver.asked import Asked
from permtriton.errors import ConfigError
from permtriton.evaluation.asked import AskedEvaluation
from permtriton.evaluation.protocol import measured_by
from permtriton.recipe import build_config, given_by
from permtriton.util.bars import err

CONTINUED = ("compile", "compare", "autotune")  # commands that keep what they have finished
SAVE_MEMORY = ("--sequence-length", "--samples", "--micro-batch-size", "--activation-checkpointing", "--dtype")


class _Helped:
    """A command, or all of them, whose help may be printed anywhere, and is whole at any width."""

    def get_help(self, ctx: Any) -> str:
        return help.text_of(self, ctx)

    def get_usage(self, ctx: Any) -> str:
        return help.usage_of(self, ctx)


class Command(_Helped, TyperCommand):
    """A command."""


class Commands(_Helped, TyperGroup):
    """Commands whose errors are one line."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with clear_errors(lambda: ""):
            return super().make_context(*arguments, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def invoke(self, ctx: Any) -> Any:
        with clear_errors(lambda: self._to_lower(ctx), lambda: ctx.invoked_subcommand in CONTINUED):
            return super().invoke(ctx)

    def _to_lower(self, ctx: Any) -> str:
        """Returns which options of the command save memory, as the end of a line."""
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        given = {name for parameter in (command.params if command else ()) for name in parameter.opts}
        # A batch of learning is split into micro-batches; elsewhere it goes through the model at once.
        options = SAVE_MEMORY if "--micro-batch-size" in given else ("--batch-size", *SAVE_MEMORY)
        offered = ", ".join(name for name in options if name in given)
        return f"; options: {offered}" if offered else ""


app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
command = functools.partial(app.command, cls=Command)


@contextmanager
def importing() -> Iterator[None]:
    """Looks for no garbage inside the ``with`` block: of a million objects that all stay, that takes a fifth of it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _print_version(wanted: bool) -> None:
    if wanted:
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


@command()
@takes()
def compile(
    model: Model,
    flags: Flags,
    asked: Asked,
    json: Json = False,
    help_all: HelpAll = False,
) -> None:
    """Prune MODEL to N:M sparsity and write a Hugging Face checkpoint. All options: --help-all."""
    given = given_by(asked.config, flags, asked.protocol, model)
    chosen = build_config(model, asked.recipe, given, flags)
    if asked.devices is not None and not asked.dry_run:
        raise ConfigError("--devices needs --dry-run: add it, or leave --devices out to run on the devices at hand")
    if asked.dry_run and torchrun.launched():
        raise ConfigError("--dry-run is for one process: start it without torchrun, and name the GPUs by --devices")
    if asked.shard and asked.devices is None and not torchrun.launched():
        raise ConfigError("--shard spreads weights over several processes: start permtriton with torchrun")
    with importing():
        from permtriton.cli.compile import default_output, run
        from permtriton.driver.job import Job
        from permtriton.model.source import Source

    eval_data, *_ = measured_by(asked.protocol, asked.eval_data, None, None, model)
    source = Source(model, **asked.loading)
    output = asked.output or default_output(source, chosen)
    job = Job(source, chosen, given, replace(asked, eval_data=eval_data, output=output))
    if asked.dry_run:
        from permtriton.cli.dry_run import run as show

        show(job, asked.devices, json=json)
    else:
        run(job, json=json)


@command()
def recipes(json: Json = False) -> None:
    """Show the recipes, and the steps that they are made of, with one line each."""
    from permtriton.cli.recipes import run

    run(json=json)


@command()
@takes("sparsity", "pattern", "layout", "o_proj", "skip_indivisible", "targets", "ignore")
def inspect(
    model: Model,
    flags: Flags,
    graph: Annotated[
        bool, typer.Option("--graph", help="Print the graph after each compiler pass, with random permutations.")
    ] = False,
    only: Annotated[
        str | None, typer.Option("--pass", help="The graph after this pass only; --graph shows their names.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="The graph of this layer only.")] = None,
    json: Json = False,
    gguf_file: GgufName = None,
    revision: Revision = None,
    token: Token = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show what would be pruned, where each permutation would go and what it costs. Reads only MODEL's config."""
    config = build_config(model, None, flags, flags)
    err.print(f"reading the sizes of {model}, not its weights", highlight=False, soft_wrap=True)
    with importing():
        from permtriton.cli.inspect import run
        from permtriton.model.source import Source

    run(
        Source(model, "auto", "auto", trust_remote_code, gguf_file, revision, token),
        config,
        graph,
        only,
        layer,
        json=json,
    )


@command()
@takes(without=SET_BY_ROWS)
def compare(model: Model, flags: Flags, asked: AskedComparison, help_all: HelpAll = False) -> None:
    """Prune MODEL with every method on the same text and show how much each one hurts. Saves no model."""
    with importing():
        from permtriton.cli.compare import run
        from permtriton.evaluation.compare import Comparison

    run(Comparison.of(model, asked, flags), json=asked.json)


@command()
@takes()
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="A model folder, a hub name, a .gguf file, or demo; dense, or written by permtriton in any format."
        ),
    ],
    asked: AskedEvaluation,
    json: Json = False,
    output: Annotated[Path | None, output_option(help="JSON file to write the results to as well.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure MODEL: perplexity, zero-shot tasks of lm-eval, KL and cosine to the dense model."""
    with importing():
        from permtriton.cli.evaluate import run

    run(model, asked.settled(model), output, overwrite=overwrite, json=json)


@command()
def export(
    folder: Annotated[Path, typer.Argument(help="A folder that permtriton compile or export wrote.")],
    format: Annotated[str, typer.Option(help=FORMATS)] = Format.PACKED,
    output: Annotated[Path | None, output_option(help="Folder to write; FOLDER-FORMAT here by default.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output.")] = False,
    json: Json = False,
) -> None:
    """Rewrite a compiled checkpoint packed or dense, bit for bit the same weights, or in 8 bits (fp8)."""
    with importing():
        from permtriton.cli.export import run

    run(folder, format, output, overwrite=overwrite, json=json)


@command()
def adapt(
    adapter: Annotated[Path, typer.Argument(help="An adapter of PEFT that was trained on the dense model.")],
    to: Annotated[Path, typer.Option(help="The folder that was compiled from that model, of layout portable.")],
    output: Annotated[Path | None, output_option(help="Folder to write; ADAPTER-for-FOLDER here by default.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Bring an adapter of the dense model into the channel order of a compiled folder; its effect stays the same."""
    from permtriton.cli.adapt import run

    run(adapter, to, output, trust_remote_code=trust_remote_code, json=json)


@command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders that permtriton compile or export wrote; several are shown side by side."),
    ],
    comparison: Annotated[
        Path | None, typer.Option(help="JSON report of permtriton compare, whose table is shown, too.")
    ] = None,
    masks: Annotated[
        str | None,
        typer.Option(
            metavar="LINEAR",
            help="Draw the masks of this linear, such as model.layers.3.mlp.down_proj, in place of the last one of the "
            "first layer.",
        ),
    ] = None,
    output: Annotated[
        Path | None, output_option(help="HTML file to write; FOLDER-report.html here by default.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write one HTML page about compiled folders: results, masks, permutations, costs. It needs no network."""
    from permtriton.cli.report import run

    run(folders, output, comparison, masks, overwrite=overwrite)


@command()
def doctor(
    no_self_test: Annotated[
        bool, typer.Option("--no-self-test", help="Only describe the machine; the self-test takes about ten seconds.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what this machine is, and test what runs on it; the thing to paste into a bug report.

    Exit code 2 if the self-test fails.
    """
    with importing():
        from permtriton.cli.doctor import run

    run(test=not no_self_test, json=json)


@command()
def autotune(
    model: Annotated[
        Path | None, typer.Option(help="A model, compiled or not: the shapes and dtype of its pruned linears.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="OUTxIN of a linear, such as 11008x4096; repeat.")] = None,
    tokens: Annotated[str, typer.Option(help="Token counts, separated by commas.")] = "1,16,64,2048",
    kernel: Annotated[str | None, typer.Option(help="Only this kernel, such as sparse_linear.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of weights and activations: bfloat16, float16 or float32; the model's, or bfloat16, by default."
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Stop after this time; the same command goes on from there.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be tried; needs no GPU.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Keep the winners beside the model, too.")] = False,
    json: Json = False,
) -> None:
    """Find the fastest configuration of each GPU kernel, for the shapes of a model, on the present GPU."""
    from permtriton.cli.autotune import run

    run(model, shape or [], tokens, kernel, dtype, seconds=seconds, dry_run=dry_run, save=save, json=json)


def main() -> None:
    """Runs the command line."""
    app()


if __name__ == "__main__":
    main()
