"""The arguments of the public functions. An argument that is also a flag of a command has the flag's help beside it.

`permtriton.cli.options` makes the flags: it replaces names in braces in a help by its own words. Settings after a help
are arguments of `typer.Option`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from permtriton.config import CALIBRATION, METHOD, RUNNING, CalibrationConfig
from permtriton.errors import ConfigError, shown
from permtriton.evaluation.protocol import protocol_of
from permtriton.util.option import option

if TYPE_CHECKING:  # these import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from permtriton.data.in_memory import Data
    from permtriton.data.media import Processor
    from permtriton.methods.step import Step
    from permtriton.model.source import Source
    from permtriton.util.bars import Shown

Words = str | Sequence[Any] | None  # one word, several separated by commas, or a list
HUB = "Where the model comes from"
TOKEN = "Token of the hub for models, never printed or saved; by default that of hf auth login, or HF_TOKEN."
_method, _calibration, _running, _hub = (partial(option, panel=panel) for panel in (METHOD, CALIBRATION, RUNNING, HUB))
_config = partial(
    _running, None, "TOML file of options, such as learn_epochs = 5, a line each; flags win.", metavar="FILE"
)


@dataclass(frozen=True, kw_only=True)
class LoadArgs:
    """How a model is loaded, and how progress is shown."""

    device: str = _running("auto", "auto, cpu or cuda.")
    dtype: str = _running("auto", "auto (the checkpoint's), float32, float16 or bfloat16.")
    gguf_file: str | None = _hub(
        None,
        "Read this GGUF file of MODEL, a folder or hub name; its weights are dequantized. Not needed where MODEL "
        "itself is a .gguf file.",
    )
    revision: str | None = _hub(None, "Branch, tag or commit of a hub name; its main branch by default.")
    token: str | None = field(default=None, repr=False, metadata=_hub(None, TOKEN).metadata)
    trust_remote_code: bool = _hub(False, "Run code that comes with the model.")
    progress: "Shown" = False

    @property
    def loading(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(LoadArgs) if part.name != "progress"}


@dataclass(frozen=True, kw_only=True)
class HeldOutArgs:
    """The held-out data that models are measured on."""

    protocol: str | None = _calibration(
        None,
        "wanda: calibrate on 128 x 2048 tokens of C4, each drawn from one document, measure WikiText-2 in windows "
        "of 2048, both without special tokens around them, and, except in compile, run the seven tasks of Wanda's "
        "table; permllm: the same on 128 x 1024 tokens, with PermLLM's five tasks. Other flags win.",
    )
    eval_data: "Data | None" = _calibration(
        None,
        "Held-out data, to measure on: demo, wikitext2, c4, a file, or none. By default demo for the demo model, "
        "else wikitext2. For a model of images or sound: a .safetensors file with its inputs, on which hidden "
        "states are compared.",
    )
    eval_windows: int | None = _calibration(
        None, "Measure only so many windows of the held-out data, the first ones; all by default."
    )

    def with_protocol(self, model: str) -> Self:
        """Returns these arguments with the protocol's values in place of None.

        The protocol's window applies only to text that is named, not to data in memory.
        """
        protocol = protocol_of(self.protocol, model)
        named = isinstance(self.eval_data, str | None) and self.eval_data != "none"
        values: dict[str, Any] = {
            "eval_data": protocol.eval_data,
            "window": protocol.window if named else None,
            "tasks": protocol.tasks,
            "special_tokens": protocol.options.get("special_tokens"),
        }
        unset = [field.name for field in fields(self) if getattr(self, field.name) is None]
        return replace(self, protocol=None, **{name: values[name] for name in values if name in unset})


@dataclass(frozen=True, kw_only=True)
class MeasureArgs(HeldOutArgs):
    """The held-out data and the zero-shot tasks that models are measured on."""

    window: int | None = _calibration(
        None, "Tokens per window of held-out text; by default 2048, or as many as the model takes."
    )
    tasks: str | Sequence[str] | None = _calibration(
        None, "Tasks of lm-eval, separated by commas, such as arc_easy,hellaswag."
    )
    limit: int | None = _calibration(None, "Documents per task; all by default.")
    tasks_dir: str | Path | None = _calibration(
        None, "Folder with more tasks: lm-eval's YAML files. A task may run code: trust the folder."
    )

    def __post_init__(self) -> None:
        for name in ("window", "limit", "batch_size"):
            if not isinstance(value := getattr(self, name, None), int | None):
                raise ConfigError(f"`{name}=` is {shown(value)}: expected a whole number")

    @property
    def task_names(self) -> list[str]:
        """Names of the tasks; empty without tasks."""
        names = self.tasks.split(",") if isinstance(self.tasks, str) else self.tasks or []
        return [] if self.tasks == "none" else [name.strip() for name in names]


@dataclass(frozen=True, kw_only=True)
class CompileArgs(LoadArgs, HeldOutArgs):
    """The arguments of `permtriton.compile` and `permtriton.dry_run` beside the model and the options."""

    recipe: "str | Sequence[Step] | None" = _method(
        None,
        "One of {recipes}, or steps separated by commas, such as heuristic,sparsegpt. permtriton recipes describes "
        "them.",
    )
    output: str | Path | None = _running(None, "Folder to write; MODEL-NofM here by default.")
    save_format: str | None = _running(None, "{formats} By default dense.")
    overwrite: bool = _running(False, "Replace an earlier output.")
    restart: bool = _running(False, "Start from scratch instead of resuming.")
    shard: bool | None = _running(
        None,
        "Under torchrun, spread the weights of layers over the GPUs by FSDP2; by default if one cannot hold them.",
        hidden=True,
    )
    onload: bool | None = _running(
        None,
        "Keep the model in host memory and bring its layers to the GPU one by one; by default if the GPU cannot "
        "hold the model. Not for steps that need all weights at once.",
        hidden=True,
    )
    config: str | Path | None = _config()
    eval_data: "Data | None" = "none"  # `permtriton compile` measures by default
    data: "Data | None" = None
    text_column: str | None = None
    split: str | None = None
    tokenizer: "Processor | None" = None


@dataclass(frozen=True, kw_only=True)
class CompareArgs(LoadArgs, MeasureArgs):
    """The arguments of `permtriton.compare` beside the model and the options."""

    sparsity: Words = _method(
        None, "Sparsity pattern, or several, separated by commas, such as 2:4,4:8. [default: 2:4]"
    )
    methods: Words = _method(
        None,
        "Methods ({methods}), recipes, or steps joined by ' + ', such as 'heuristic + refit + distill', separated by "
        "commas; by default all methods, and the default recipe with --ablate.",
    )
    ablate: str | None = _method(
        None, "Run each method with several --values of one option, such as refit-exchanges.", metavar="OPTION"
    )
    values: Words = _method(None, "With --ablate: the values, separated by commas, such as 0,2,4,8.")
    seeds: int | Words = _running(0, "Seeds, separated by commas.")
    config: str | Path | None = _config()
    output: str | Path | None = _running(
        None,
        "JSON file to write the report to. Finished results are kept beside it: the same command, also with more "
        "methods, continues from them.",
    )
    overwrite: bool = _running(False, "Measure everything again, whatever is kept, and replace any earlier file.")


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs(LoadArgs, MeasureArgs):
    """The arguments of `permtriton.evaluate` beside the model."""

    against: "PreTrainedModel | Source | str | Path | None" = option(
        None, "The dense model, as MODEL is given: adds its perplexity, the KL and the cosine to it.", metavar="MODEL"
    )
    special_tokens: str | None = _calibration(None, "{special_tokens}", metavar="auto|none")
    batch_size: int | None = option(
        None, "Windows or requests per forward pass; by default 2048 tokens, and 8 requests of tasks."
    )
    tokenizer: "Processor | None" = None
    hidden_order: "Tensor | None" = None
    text_column: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.special_tokens is not None:
            CalibrationConfig(special_tokens=self.special_tokens)  # type: ignore[arg-type]  # it refuses other words
