"""The world around the library, as some tests need it: little memory, models that must not be read or run."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaModel, PreTrainedModel


def free_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Leaves this many bytes of memory free."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))


def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test fails where a model is made, with or without its weights."""
    for name in ("from_pretrained", "_from_config"):
        monkeypatch.setattr(PreTrainedModel, name, lambda *_, **__: pytest.fail("the model was loaded"))


def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test fails where a LLaMA runs on data; it may be traced."""
    running_raises(monkeypatch, pytest.fail.Exception("the model was run"))


def running_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Raises an error where a LLaMA runs on data; it may be traced."""
    forward = LlamaModel.forward

    def traced(*arguments: object, **named: object) -> object:
        if not torch.compiler.is_exporting():
            raise error
        return forward(*arguments, **named)

    monkeypatch.setattr(LlamaModel, "forward", traced)
