"""Turns a loaded model into an exported `torch.fx` graph that also shows its last hidden state."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import PreTrainedModel

from permtriton.errors import ModelError
from permtriton.forward import without_cache

TRACE_TOKENS = 4  # few, so that provenance is cheap; more than one, so that token mixing shows


@dataclass(frozen=True)
class Traced:
    """An exported model.

    Attributes:
        exported: the program; parameters share their storage with the model.
        parameters: placeholder -> name in ``model.named_parameters()``; tied parameters share the first name.
        outputs: positions in the output tuple that a caller of the model sees.
        hidden: position of the last hidden state.
    """

    exported: ExportedProgram
    parameters: dict[str, str]
    outputs: tuple[int, ...]
    hidden: int


class _Probed(nn.Module):
    """Returns every tensor that the model returns, and the last hidden state after them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        seen: list[Tensor] = []
        # Some heads call their backbone's decoder directly, so every backbone is watched; the outermost ends last.
        backbones = [m for m in self.model.modules() if isinstance(m, PreTrainedModel) and m is not self.model]
        handles = [
            module.register_forward_hook(lambda _m, _a, output: seen.append(output[0]))
            for module in backbones or [self.model]
        ]
        try:
            output = self.model(input_ids=input_ids)
        finally:
            for handle in handles:
                handle.remove()
        return (*(value for value in output.to_tuple() if isinstance(value, Tensor)), seen[-1])


def trace(model: PreTrainedModel) -> Traced:
    """Exports ``model`` on one short sequence; nothing is copied, and a model on the meta device needs no weights.

    Raises:
        ModelError: the model does not run on token ids alone, or ``torch.export`` cannot follow it.
    """
    ids = torch.zeros((1, TRACE_TOKENS), dtype=torch.int64, device=model.device)
    probed = _Probed(model)
    try:
        with torch.no_grad(), without_cache(model):
            exported = torch.export.export(probed, (ids,), strict=False)
    except Exception as error:  # torch.export raises many kinds; any of them means the same to the user
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        raise ModelError(
            f"{type(model).__name__} cannot be traced: {type(error).__name__}: {first_line}. permtriton needs a model "
            "that runs on input_ids alone (no decoder inputs, images or sound) and that torch.export can follow"
        ) from error
    first_name: dict[int, str] = {}
    canonical = {
        name: first_name.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    names: Any = exported.graph_signature.inputs_to_parameters
    parameters = {placeholder: canonical[name.removeprefix("model.")] for placeholder, name in names.items()}
    count = len(exported.graph_signature.user_outputs)
    return Traced(exported, parameters, tuple(range(count - 1)), count - 1)
