"""The arguments of the public functions, which are flags of commands, too; `permtriton.cli.options` has their help."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from permtriton.config import CalibrationConfig
from permtriton.errors import ConfigError, shown
from permtriton.evaluation.protocol import measured_by, protocol_of
from permtriton.evaluation.task_request import TaskRequest
from permtriton.util.option import options_of

if TYPE_CHECKING:  # these import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from permtriton.data.in_memory import Data
    from permtriton.data.media import Processor
    from permtriton.methods.step import Step
    from permtriton.model.source import Source
    from permtriton.util.bars import Shown

Words = str | Sequence[Any] | None  # one word, several separated by commas, or a list


@dataclass(frozen=True, kw_only=True)
class LoadArgs:
    """How a model is loaded, and how progress is shown."""

    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    gguf_file: str | None = None
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    progress: "Shown" = False

    @property
    def loading(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(LoadArgs) if part.name != "progress"}


@dataclass(frozen=True, kw_only=True)
class HeldOutArgs:
    """The held-out data that models are measured on."""

    protocol: str | None = None
    eval_data: "Data | None" = None
    eval_windows: int | None = None


@dataclass(frozen=True, kw_only=True)
class MeasureArgs(HeldOutArgs):
    """The held-out data and the zero-shot tasks that models are measured on."""

    window: int | None = None
    tasks: str | Sequence[str] | None = None
    limit: int | None = None
    tasks_dir: str | Path | None = None

    @property
    def task_request(self) -> TaskRequest:
        return TaskRequest(self.tasks, self.limit, None if self.tasks_dir is None else Path(self.tasks_dir))

    def with_protocol(self, model: str = "") -> Self:
        """Returns these arguments with the protocol's values in place of None."""
        for name in ("window", "limit", "batch_size"):
            if not isinstance(value := getattr(self, name, None), int | None):
                raise ConfigError(f"`{name}=` is {shown(value)}: expected a whole number")
        eval_data, window, tasks = measured_by(self.protocol, self.eval_data, self.window, self.tasks, model)
        return replace(self, protocol=None, eval_data=eval_data, window=window, tasks=tasks)


@dataclass(frozen=True, kw_only=True)
class CompileArgs(LoadArgs, HeldOutArgs):
    """The arguments of `permtriton.compile` and `permtriton.dry_run` beside the model and the options."""

    recipe: "str | Sequence[Step] | None" = None
    data: "Data | None" = None
    text_column: str | None = None
    split: str | None = None
    tokenizer: "Processor | None" = None
    eval_data: "Data | None" = "none"
    config: str | Path | None = None
    output: str | Path | None = None
    save_format: str | None = None
    push_to_hub: str | None = None
    private: bool | None = None
    overwrite: bool = False
    restart: bool = False
    shard: bool | None = None
    onload: bool | None = None


@dataclass(frozen=True, kw_only=True)
class CompareArgs(LoadArgs, MeasureArgs):
    """The arguments of `permtriton.compare` beside the model and the options."""

    sparsity: Words = None
    seeds: int | str | Sequence[int] = 0
    methods: Words = None
    ablate: str | None = None
    values: Words = None
    config: str | Path | None = None
    output: str | Path | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs(LoadArgs, MeasureArgs):
    """The arguments of `permtriton.evaluate` beside the model."""

    against: "PreTrainedModel | Source | str | Path | None" = None
    special_tokens: str | None = None
    tokenizer: "Processor | None" = None
    hidden_order: "Tensor | None" = None
    text_column: str | None = None
    split: str | None = None
    batch_size: int | None = None

    def with_protocol(self, model: str = "") -> Self:
        option = next(o for o in options_of(CalibrationConfig) if o.name == "special_tokens")
        protocol, special_tokens = protocol_of(self.protocol, model), self.special_tokens
        if special_tokens is None:
            special_tokens = (protocol.options if protocol else {}).get(option.name, option.default)
        option.check(special_tokens)
        return replace(super().with_protocol(model), special_tokens=special_tokens)
