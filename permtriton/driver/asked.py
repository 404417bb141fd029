"""What may be asked of a compilation beside its model and its options; each stands once, with the words of its flag."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from permtriton.checkpoint.format import HELP as FORMATS
from permtriton.config import CALIBRATION, METHOD, RUNNING
from permtriton.driver.step import Step
from permtriton.recipe import RECIPES

if TYPE_CHECKING:  # they import torch, which `permtriton --help` must not
    from permtriton.data.in_memory import Data
    from permtriton.data.media import Processor

HUB = "Where the model comes from, and publishing"


def _flag(default: Any, panel: str, help: str, **facts: Any) -> Any:
    """Returns the field of what is a flag, too.

    Args:
        facts: what else the flag is, as `permtriton.cli.options.flag` reads it: ``kind`` (its type; text), ``unset``
            (its default, where that is another), ``metavar``, ``hidden``, ``no`` (whether it has a --no- form).
    """
    return field(default=default, metadata={"panel": panel, "help": help, **facts}, repr=facts.pop("repr", True))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What `permtriton.compile` takes, which describes it; what has words is a flag of ``permtriton compile``, too.

    Attributes:
        dry_run: of the command alone: `permtriton.dry_run` is a function.
        devices: of the command alone, with ``dry_run``.
    """

    recipe: "str | Sequence[Step] | None" = _flag(
        None,
        METHOD,
        f"One of {', '.join(RECIPES)}, or steps separated by commas, such as heuristic,sparsegpt; permtriton recipes "
        "describes them.",
    )
    protocol: str | None = _flag(
        None,
        CALIBRATION,
        "paper: calibrate on 128 x 2048 tokens of C4, each drawn from one document, measure WikiText-2 in windows of "
        "2048, and, except in compile, run the seven tasks of Wanda's table. Other flags win.",
    )
    data: "Data | None" = None
    text_column: str | None = None
    split: str | None = None
    tokenizer: "Processor | None" = None
    eval_data: "Data | None" = _flag(
        "none",
        CALIBRATION,
        "Held-out data, to measure on: demo, wikitext2, c4, a file, or none. By default demo for the demo model, else "
        "wikitext2. For a model of images or sound: a folder of files or a .safetensors file, on which hidden states "
        "are compared.",
        unset=None,
    )
    device: str = _flag("auto", RUNNING, "auto, cpu or cuda.")
    dtype: str = _flag("auto", RUNNING, "auto (the checkpoint's), float32, float16 or bfloat16.")
    output: str | Path | None = _flag(
        None, RUNNING, "Folder to write; MODEL-NofM here by default.", kind=Path, metavar="PATH"
    )
    save_format: str | None = _flag(None, RUNNING, f"{FORMATS} By default dense.")
    push_to_hub: str | None = _flag(
        None,
        HUB,
        "Repository on the hub to publish the output in, such as me/my-model-2of4; made before the work, so that a "
        "wrong name or token is found then.",
        metavar="REPOSITORY",
    )
    private: bool | None = _flag(
        None,
        HUB,
        "Make the repository of --push-to-hub private, to look at it before others do; else as the hub does.",
        kind=bool,
    )
    overwrite: bool = _flag(False, RUNNING, "Replace an earlier output.", kind=bool)
    restart: bool = _flag(False, RUNNING, "Start from scratch instead of resuming.", kind=bool)
    dry_run: bool = _flag(
        False,
        RUNNING,
        "Show the plan and an estimate of time, memory and disk, then stop; nothing is written.",
        kind=bool,
    )
    devices: str | None = _flag(
        None,
        RUNNING,
        "With --dry-run: plan for this many GPUs of torchrun with this many GiB each, such as 8x80.",
        metavar="COUNTxGIB",
        hidden=True,
    )
    shard: bool | None = _flag(
        None,
        RUNNING,
        "Under torchrun, spread the weights of layers over the GPUs by FSDP2; by default if one cannot hold them.",
        kind=bool,
        no=True,
        hidden=True,
    )
    onload: bool | None = _flag(
        None,
        RUNNING,
        "Keep the model in host memory and bring its layers to the GPU one by one; by default if the GPU cannot hold "
        "the model. Not for steps that need all weights at once.",
        kind=bool,
        no=True,
        hidden=True,
    )
    offload: str | Path | None = _flag(
        None,
        RUNNING,
        "For a model larger than memory, on a CPU: a folder on a fast disk, where weights and layers' inputs are kept "
        "while it runs. The result is the same. Not for steps that need all weights or their gradients in memory.",
        kind=Path,
        metavar="DIR",
        hidden=True,
    )
    config: str | Path | None = _flag(
        None, RUNNING, "TOML file of options, with a table per step; flags win.", kind=Path, metavar="FILE"
    )
    gguf_file: str | None = _flag(
        None,
        HUB,
        "Read this GGUF file of MODEL, a folder or hub name; its weights are dequantized. Not needed where MODEL "
        "itself is a .gguf file.",
    )
    revision: str | None = _flag(None, HUB, "Branch, tag or commit of a hub name; its main branch by default.")
    token: str | None = _flag(
        None,
        HUB,
        "Token of the hub for models, never printed or saved; by default that of hf auth login, or HF_TOKEN.",
        repr=False,
    )
    trust_remote_code: bool = _flag(False, HUB, "Run code that comes with the model.", kind=bool)

    @property
    def loading(self) -> dict[str, Any]:
        """How the model is read: the arguments of `permtriton.model.source.Source` but for the name."""
        names = ("dtype", "device", "trust_remote_code", "gguf_file", "revision", "token")
        return {name: getattr(self, name) for name in names}


OF_THE_COMMAND = ("dry_run", "devices")
ARGUMENTS = tuple(each for each in fields(Asked) if each.name not in OF_THE_COMMAND)  # of `permtriton.compile`


def signature_of(result: Any) -> Signature:
    """Returns the signature of a function that takes a model and everything that may be asked, by its name."""
    named = [(each.name, each.default, each.type) for each in ARGUMENTS] + [("progress", False, "Shown")]
    parameters = [
        Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, annotation="Model"),
        *(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind) for name, default, kind in named),
        Parameter("options", Parameter.VAR_KEYWORD, annotation=Any),
    ]
    return Signature(parameters, return_annotation=result)
