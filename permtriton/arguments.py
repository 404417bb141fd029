"""The arguments of the public functions, which are flags of commands, too; `permtriton.cli.options` has their help."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from permtriton.config import CalibrationConfig
from permtriton.errors import ConfigError, shown
from permtriton.evaluation.protocol import protocol_of

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

    def with_protocol(self, model: str) -> Self:
        """Returns these arguments with the protocol's values in place of None.

        Its window applies to text that is named; samples in memory have a length of their own.
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

    window: int | None = None
    tasks: str | Sequence[str] | None = None
    limit: int | None = None
    tasks_dir: str | Path | None = None

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.special_tokens is not None:
            CalibrationConfig(special_tokens=self.special_tokens)  # type: ignore[arg-type]  # it refuses other words
