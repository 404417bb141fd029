"""What may be asked of an evaluation, and how a model is read; each stands once, with the words of its flag."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from permtriton.config import CALIBRATION, RUNNING, CalibrationConfig
from permtriton.errors import ConfigError, shown
from permtriton.evaluation.protocol import measured_by, protocol_of
from permtriton.util.asking import facts, flag
from permtriton.util.option import options_of

if TYPE_CHECKING:  # they import torch, which `permtriton --help` must not
    from torch import Tensor
    from transformers import PreTrainedModel

    from permtriton.data.in_memory import Data
    from permtriton.data.media import Processor
    from permtriton.evaluation.task_request import TaskRequest
    from permtriton.model.source import Source
    from permtriton.util.bars import Shown

SPECIAL = next(each for each in options_of(CalibrationConfig) if each.name == "special_tokens")
HUB = "Where the model comes from, and publishing"


@dataclass(frozen=True, kw_only=True)
class Loads:
    """What is asked of something that loads a model."""

    device: str = flag("auto", RUNNING, "auto, cpu or cuda.")
    dtype: str = flag("auto", RUNNING, "auto (the checkpoint's), float32, float16 or bfloat16.")
    gguf_file: str | None = flag(
        None,
        HUB,
        "Read this GGUF file of MODEL, a folder or hub name; its weights are dequantized. Not needed where MODEL "
        "itself is a .gguf file.",
    )
    revision: str | None = flag(None, HUB, "Branch, tag or commit of a hub name; its main branch by default.")
    token: str | None = flag(
        None,
        HUB,
        "Token of the hub for models, never printed or saved; by default that of hf auth login, or HF_TOKEN.",
        repr=False,
    )
    trust_remote_code: bool = flag(False, HUB, "Run code that comes with the model.", kind=bool)
    progress: "Shown" = False

    @property
    def loading(self) -> dict[str, Any]:
        """How the model is read: the arguments of `permtriton.model.source.Source` but for the name."""
        names = ("dtype", "device", "trust_remote_code", "gguf_file", "revision", "token")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What is asked of something that measures models on held-out data and tasks."""

    protocol: str | None = flag(
        None,
        CALIBRATION,
        "wanda: calibrate on 128 x 2048 tokens of C4, each drawn from one document, measure WikiText-2 in windows of "
        "2048, both without special tokens around them, and, except in compile, run the seven tasks of Wanda's table; "
        "permllm: the same on 128 x 1024 tokens, with PermLLM's five tasks. Other flags win.",
    )
    eval_data: "Data | None" = field(
        default=None,
        kw_only=False,
        metadata=facts(
            CALIBRATION,
            "Held-out data, to measure on: demo, wikitext2, c4, a file, or none. By default demo for the demo model, "
            "else wikitext2. For a model of images or sound: a .safetensors file with its inputs, on which hidden "
            "states are compared.",
        ),
    )
    window: int | None = flag(
        None,
        CALIBRATION,
        "Tokens per window of held-out text; by default 2048, or as many as the model takes.",
        kind=int,
    )
    eval_windows: int | None = flag(
        None,
        CALIBRATION,
        "Measure only so many windows of the held-out data, the first ones; all by default.",
        kind=int,
    )
    tasks: str | Sequence[str] | None = flag(
        None, CALIBRATION, "Tasks of lm-eval, separated by commas, such as arc_easy,hellaswag."
    )
    limit: int | None = flag(None, CALIBRATION, "Documents per task; all by default.", kind=int)
    tasks_dir: str | Path | None = flag(
        None,
        CALIBRATION,
        "Folder with more tasks: lm-eval's YAML files. A task may run code: trust the folder.",
        kind=Path,
    )

    @property
    def wanted_tasks(self) -> "TaskRequest":
        """The tasks to run."""
        from permtriton.evaluation.task_request import TaskRequest

        return TaskRequest(self.tasks, self.limit, None if self.tasks_dir is None else Path(self.tasks_dir))

    def settled(self, model: str = "") -> Self:
        """Returns the same with what its protocol says of a model where nothing was given.

        Raises:
            ConfigError: there is no such protocol, or a number is none.
        """
        for name in ("window", "limit", "batch_size"):
            if not isinstance(value := getattr(self, name, None), int | None):
                raise ConfigError(f"`{name}=` is {shown(value)}: expected a whole number")
        eval_data, window, tasks = measured_by(self.protocol, self.eval_data, self.window, self.tasks, model)
        return replace(self, protocol=None, eval_data=eval_data, window=window, tasks=tasks)


@dataclass(frozen=True, kw_only=True)
class AskedEvaluation(Loads, Measures):
    """What `permtriton.evaluate` takes, which describes it; what has words is a flag of its command, too."""

    against: "PreTrainedModel | Source | str | Path | None" = flag(
        None,
        None,
        "The dense model, as MODEL is given: adds its perplexity, the KL and the cosine to it.",
        metavar="MODEL",
    )
    special_tokens: str | None = flag(None, CALIBRATION, SPECIAL.help, metavar="|".join(SPECIAL.choices))
    tokenizer: "Processor | None" = None
    hidden_order: "Tensor | None" = None
    text_column: str | None = None
    split: str | None = None
    batch_size: int | None = flag(
        None, None, "Windows or requests per forward pass; by default 2048 tokens, and 8 requests of tasks.", kind=int
    )

    def settled(self, model: str = "") -> Self:
        protocol, special_tokens = protocol_of(self.protocol, model), self.special_tokens
        if special_tokens is None:
            special_tokens = (protocol.options if protocol else {}).get(SPECIAL.name, SPECIAL.default)
        SPECIAL.check(special_tokens)
        return replace(super().settled(model), special_tokens=special_tokens)
