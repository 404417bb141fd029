"""Flags: those of config options, made from `permtriton.config`, and those that several commands share."""

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from permtriton.checkpoint.format import HELP as FORMATS
from permtriton.comparison.methods import ABLATIONS
from permtriton.config import CALIBRATION, METHOD, RUNNING
from permtriton.errors import OutputError
from permtriton.recipe import RECIPES, all_options, defaults
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


HUB = "Where the model comes from, and publishing"
method_option, text_option, running_option, hub_option = (
    functools.partial(typer.Option, rich_help_panel=panel) for panel in (METHOD, CALIBRATION, RUNNING, HUB)
)
output_option = functools.partial(typer.Option, parser=output_path, metavar="PATH")

Model = Annotated[
    str, typer.Argument(help="A model folder, a hub name, a .gguf file, or demo (a small model inside permtriton).")
]
Recipe = Annotated[
    str | None,
    method_option(
        help=f"One of {', '.join(RECIPES)}, or steps separated by commas, such as heuristic,sparsegpt; permtriton "
        "recipes describes them."
    ),
]
EvalData = Annotated[
    str | None,
    text_option(
        "--eval-data",
        help="Held-out data, to measure on: demo, wikitext2, c4, a file, or none. By default demo for the demo model, "
        "else wikitext2. For a model of images or sound: a folder of files or a .safetensors file, on which hidden "
        "states are compared.",
    ),
]
Sparsities = Annotated[
    str | None,
    method_option(
        metavar="N:M,...",
        help="Sparsity pattern, or several, separated by commas, such as 2:4,4:8: each method runs with each of them. "
        "[default: 2:4]",
    ),
]
Ablate = Annotated[
    str | None,
    method_option(
        help="Run each method with several values of one option: "
        + ", ".join(f"{name} ({', '.join(each.values)})" for name, each in ABLATIONS.items())
        + "."
    ),
]
AblateValues = Annotated[
    str | None,
    method_option(help="With --ablate: other values, separated by commas, such as demo,my-text.txt for calibration."),
]
TaskNames = Annotated[
    str | None, text_option("--tasks", help="Tasks of lm-eval, separated by commas, such as arc_easy,hellaswag.")
]
TaskLimit = Annotated[int | None, text_option("--limit", help="Documents per task; all by default.")]
ProtocolName = Annotated[
    str | None,
    text_option(
        "--protocol",
        help="paper: calibrate on 128 x 2048 tokens of C4, each drawn from one document, measure WikiText-2 in windows "
        "of 2048, and, except in compile, run the seven tasks of Wanda's table. Other flags win.",
    ),
]
Window = Annotated[
    int | None,
    text_option("--window", help="Tokens per window of held-out text; by default 2048, or as many as the model takes."),
]
TasksDir = Annotated[
    Path | None,
    text_option(
        "--tasks-dir", help="Folder with more tasks: lm-eval's YAML files. A task may run code: trust the folder."
    ),
]
Device = Annotated[str, running_option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, running_option(help="auto (the checkpoint's), float32, float16 or bfloat16.")]
ConfigFile = Annotated[
    Path | None,
    running_option("--config", metavar="FILE", help="TOML file of options, with a table per step; flags win."),
]
Json = Annotated[bool, running_option("--json", help="Print the report as JSON on standard output.")]
DryRun = Annotated[
    bool,
    running_option(
        "--dry-run", help="Show the plan and an estimate of time, memory and disk, then stop; nothing is written."
    ),
]
Gpus = Annotated[
    str | None,
    running_option(
        "--devices",
        metavar="COUNTxGIB",
        help="With --dry-run: plan for this many GPUs of torchrun with this many GiB each, such as 8x80.",
        hidden=True,
    ),
]
Shard = Annotated[
    bool | None,
    running_option(
        "--shard/--no-shard",
        help="Under torchrun, spread the weights of layers over the GPUs by FSDP2; by default if one cannot hold them.",
        hidden=True,
    ),
]
OffloadFolder = Annotated[
    Path | None,
    running_option(
        metavar="DIR",
        help="For a model larger than memory, on a CPU: a folder on a fast disk, where weights and layers' inputs are "
        "kept while it runs. The result is the same. Not for steps that need all weights or their gradients in "
        "memory.",
        hidden=True,
    ),
]
GgufName = Annotated[
    str | None,
    hub_option(
        "--gguf-file",
        help="Read this GGUF file of MODEL, a folder or hub name; its weights are dequantized. Not needed where MODEL "
        "itself is a .gguf file.",
    ),
]
Revision = Annotated[str | None, hub_option(help="Branch, tag or commit of a hub name; its main branch by default.")]
Token = Annotated[
    str | None,
    hub_option(
        help="Token of the hub for models, never printed or saved; by default that of hf auth login, or HF_TOKEN."
    ),
]
SaveFormat = Annotated[str | None, running_option(help=f"{FORMATS} By default dense.")]
PushToHub = Annotated[
    str | None,
    hub_option(
        metavar="REPOSITORY",
        help="Repository on the hub to publish the output in, such as me/my-model-2of4; made before the work, so that "
        "a wrong name or token is found then.",
    ),
]
Private = Annotated[
    bool | None,
    hub_option(
        "--private",
        help="Make the repository of --push-to-hub private, to look at it before others do; else as the hub does.",
    ),
]
TrustRemoteCode = Annotated[bool, hub_option("--trust-remote-code", help="Run code that comes with the model.")]


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

    They stand where the command has its parameter ``flags``, which receives the values of those that the user set.

    Args:
        names: names of options of the compilation; none means all, and those of the steps.
        without: names of options to leave out of all.
    """
    taken = [option for name, option in all_options().items() if name in (names or set(all_options()) - {*without})]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            given = {option.name: arguments.pop(option.name) for option in taken}
            command(flags={name: value for name, value in given.items() if value is not None}, **arguments)

        signature = inspect.signature(command)
        made = [_flag(option, hidden=not names and option.name not in COMMON) for option in taken]
        parameters = [p for own in signature.parameters.values() for p in (made if own.name == "flags" else [own])]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _flag(option: Option, *, hidden: bool) -> inspect.Parameter:
    """Returns the parameter that typer makes an option's flag of: None unless the user sets it."""
    kind = list[str] if option.several else option.type if option.type in (int, float, bool) else str
    values = option.values or "|".join(option.choices)
    info = typer.Option(
        *([option.flag] if option.default is False else []),  # without a --no- form
        metavar=_metavar(option),
        help=f"{option.help} [{values}{values and '; '}default: {defaults(option)}]",
        rich_help_panel=option.panel,
        hidden=hidden,
    )
    annotation = Annotated[kind | None, info]  # type: ignore[valid-type]
    return inspect.Parameter(option.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


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
