"""Flags and their help: for arguments of public functions, for config options, and flags that commands share."""

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from permtriton.arguments import CompareArgs, CompileArgs, EvaluateArgs, HeldOutArgs, LoadArgs, MeasureArgs
from permtriton.checkpoint.format import HELP as FORMATS
from permtriton.config import CALIBRATION, METHOD, RUNNING
from permtriton.errors import OutputError
from permtriton.evaluation.compare_methods import FUSED, METHODS
from permtriton.recipe import RECIPES, all_options, defaults
from permtriton.util.option import Option

Flags = dict[str, Any]
HUB = "Where the model comes from, and publishing"


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


_method, _calibration, running_flag, _hub = (
    functools.partial(flag, panel=panel) for panel in (METHOD, CALIBRATION, RUNNING, HUB)
)
_methods = f"{', '.join(name for name in METHODS if not name.endswith(FUSED))}, and those that order channels"
output_flag = functools.partial(flag, kind=Path, parser=output_path, metavar="PATH")
Config = running_flag("TOML file of options, with a table per step; flags win.", kind=Path, metavar="FILE")
Json = running_flag("Print the report as JSON on standard output.", "--json", kind=bool)
Overwrite = flag("Replace an earlier file, whoever wrote it.", "--overwrite", kind=bool)
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A model folder, a hub name, a .gguf file, or demo (a small model inside permtriton)."
    ),
]
# Arguments of a public function -> the flags of those arguments that the command line takes.
FLAGS: dict[type, dict[str, Any]] = {
    CompileArgs: {
        "recipe": _method(
            f"One of {', '.join(RECIPES)}, or steps separated by commas, such as heuristic,sparsegpt or, with a step "
            "of yours, heuristic,my_steps.py:Mine; permtriton recipes describes them."
        ),
        "output": output_flag("Folder to write; MODEL-NofM here by default.", panel=RUNNING),
        "save_format": running_flag(f"{FORMATS} By default dense."),
        "overwrite": running_flag("Replace an earlier output.", "--overwrite", kind=bool),
        "restart": running_flag("Start from scratch instead of resuming.", "--restart", kind=bool),
        "shard": running_flag(
            "Under torchrun, spread the weights of layers over the GPUs by FSDP2; by default if one cannot hold them.",
            kind=bool,
            hidden=True,
        ),
        "onload": running_flag(
            "Keep the model in host memory and bring its layers to the GPU one by one; by default if the GPU cannot "
            "hold the model. Not for steps that need all weights at once.",
            kind=bool,
            hidden=True,
        ),
        "config": Config,
        "push_to_hub": _hub(
            "Repository on the hub to publish the output in, such as me/my-model-2of4; made before the work, so that a "
            "wrong name or token is found then.",
            metavar="REPOSITORY",
        ),
        "private": _hub(
            "Make the repository of --push-to-hub a private one; by default the hub decides.", "--private", kind=bool
        ),
    },
    CompareArgs: {
        "sparsity": _method("Sparsity pattern, or several, separated by commas, such as 2:4,4:8. [default: 2:4]"),
        "methods": _method(
            f"Methods ({_methods} with{FUSED} after them), recipes, or steps joined by ' + ', such as 'heuristic + "
            "refit + distill' or, with a step of yours, 'heuristic + my_steps.py:Mine', separated by commas; by "
            "default all methods, and the default recipe with --ablate."
        ),
        "ablate": _method(
            "Run each method with several --values of one option, such as refit-exchanges.", metavar="OPTION"
        ),
        "values": _method("With --ablate: the values, separated by commas, such as 0,2,4,8."),
        "seeds": running_flag("Seeds, separated by commas."),
        "config": Config,
        "output": output_flag(
            "JSON file to write the report to. Finished results are kept beside it: the same command, also with more "
            "methods, continues from them.",
            panel=RUNNING,
        ),
        "overwrite": running_flag(
            "Measure everything again, whatever is kept, and replace any earlier file.", "--overwrite", kind=bool
        ),
    },
    EvaluateArgs: {
        "against": flag(
            "The dense model, as MODEL is given: adds its perplexity, the KL and the cosine to it.", metavar="MODEL"
        ),
        "special_tokens": _calibration(all_options()["special_tokens"].help, metavar="auto|none"),
        "batch_size": flag(
            "Windows or requests per forward pass; by default 2048 tokens, and 8 requests of tasks.", kind=int
        ),
    },
    HeldOutArgs: {
        "protocol": _calibration(
            "wanda: calibrate on 128 x 2048 tokens of C4, each drawn from one document, measure WikiText-2 in windows "
            "of 2048, both without special tokens around them, and, except in compile, run the seven tasks of Wanda's "
            "table; permllm: the same on 128 x 1024 tokens, with PermLLM's five tasks. Other flags win."
        ),
        "eval_data": _calibration(
            "Held-out data, to measure on: demo, wikitext2, c4, a file, or none. By default demo for the demo model, "
            "else wikitext2. For a model of images or sound: a .safetensors file with its inputs, on which hidden "
            "states are compared."
        ),
        "eval_windows": _calibration(
            "Measure only so many windows of the held-out data, the first ones; all by default.", kind=int
        ),
    },
    MeasureArgs: {
        "window": _calibration(
            "Tokens per window of held-out text; by default 2048, or as many as the model takes.", kind=int
        ),
        "tasks": _calibration("Tasks of lm-eval, separated by commas, such as arc_easy,hellaswag."),
        "limit": _calibration("Documents per task; all by default.", kind=int),
        "tasks_dir": _calibration(
            "Folder with more tasks: lm-eval's YAML files. A task may run code: trust the folder.", kind=Path
        ),
    },
    LoadArgs: {
        "device": running_flag("auto, cpu or cuda."),
        "dtype": running_flag("auto (the checkpoint's), float32, float16 or bfloat16."),
        "gguf_file": _hub(
            "Read this GGUF file of MODEL, a folder or hub name; its weights are dequantized. Not needed where MODEL "
            "itself is a .gguf file."
        ),
        "revision": _hub("Branch, tag or commit of a hub name; its main branch by default."),
        "token": _hub(
            "Token of the hub for models, never printed or saved; by default that of hf auth login, or HF_TOKEN."
        ),
        "trust_remote_code": _hub("Run code that comes with the model.", "--trust-remote-code", kind=bool),
    },
}
GgufFile, Revision, Token, TrustRemoteCode = (
    FLAGS[LoadArgs][name] for name in ("gguf_file", "revision", "token", "trust_remote_code")
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
        known = all_options().values() if "flags" in parameters else ()
        options = [option for option in known if names is None or option.name in names]
        kind = parameters["args"].annotation if "args" in parameters else None
        made = {
            "args": _arguments(kind) if kind else [],
            "flags": [_option(o, hidden="help_all" in parameters and o.name not in COMMON) for o in options],
        }

        @functools.wraps(command)
        def run(**values: Any) -> None:
            if options:
                flags = {option.name: values.pop(option.name) for option in options}
                values["flags"] = {name: value for name, value in flags.items() if value is not None}
            if kind:
                values["args"] = kind(**{flag.name: values.pop(flag.name) for flag in made["args"]})
            command(**values)

        signature = [flag for parameter in parameters.values() for flag in made.get(parameter.name, [parameter])]
        run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
        return run

    return decorate


def _arguments(kind: Any) -> list[inspect.Parameter]:
    defaults = {field.name: field.default for field in fields(kind)}
    defaults["eval_data"] = None  # until a protocol chooses it
    entries = [entry for base in kind.__mro__ for entry in FLAGS.get(base, {}).items()]
    return [_parameter(name, flag, defaults[name]) for name, flag in entries]


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
