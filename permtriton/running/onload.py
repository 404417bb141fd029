"""Runs a model on a GPU that cannot hold all of it: each layer's weights come to the GPU when the layer runs.

The model stays in host memory, where it is permuted, masked and saved. Inside `onloaded`, what is outside of its layers
is on the device. So are copies of the weights of the layer that ran last, so that a layer that runs on many batches in
succession is copied once. A layer's parameters refer to these copies only while the layer runs or, where gradients are
enabled, until another layer runs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.model.forward import replaced_forwards
from permtriton.passes.plan import Plan, layer_modules


@contextmanager
def onloaded(model: PreTrainedModel, plan: Plan, device: torch.device) -> Iterator[PreTrainedModel]:
    """Inside the context, a model in host memory runs on ``device``, which holds at most one of its layers at a time.

    In-place changes of a parameter on the device are written back to the model; changes of a buffer are lost.
    """
    layers = layer_modules(model, plan)
    inside = {module for layer in layers for module in layer.modules()}
    outside = {p for module in model.modules() if module not in inside for p in module.parameters(recurse=False)}
    copies = _Copies(device, outside)
    with _moved_buffers(model, device), copies.in_place(outside):
        try:
            with replaced_forwards(layers, copies.forward_of):
                yield model
        finally:
            copies.drop()


def onloading_refusal(model: PreTrainedModel, plan: Plan) -> str:
    """Returns why a model cannot run in `onloaded`; empty if it can."""
    if model.device.type == "cuda":
        return "it is on the GPU already: give its folder or hub name instead of the loaded model"
    layers = layer_modules(model, plan)
    first = next(model.parameters())
    if not layers or any(parameter is first for layer in layers for parameter in layer.parameters()):
        return "the model has no layers, or its first weights belong to a layer"
    return ""


@dataclass
class _Copy:
    """A parameter's values in host memory and on the device, equal when its ``_version`` was ``version``."""

    host: Tensor
    device: Tensor
    version: int


class _Copies:
    """Copies of parameters on a device: of all parameters outside of layers, and of one layer at a time.

    A layer may run with the values of two models in turn. Each model's values have a copy, under their host address.
    """

    def __init__(self, device: torch.device, outside: set[nn.Parameter]) -> None:
        self._device, self._outside = device, outside
        self._copies: dict[tuple[int, int], _Copy] = {}  # by parameter and address of its values in host memory
        self._layer: nn.Module | None = None  # the layer that ran last
        self._staying = ExitStack()
        self._stays = False  # whether this layer's parameters stay on the device until another layer runs

    def forward_of(self, layer: nn.Module) -> Callable[..., Any]:
        """Returns a ``forward`` that runs with the layer's parameters on the device."""
        compute = layer.forward

        def forward(*positional: Any, **named: Any) -> Any:
            parameters = [parameter for parameter in layer.parameters() if parameter not in self._outside]
            if layer is not self._layer:
                self.drop()
                self._layer = layer
            if torch.is_grad_enabled() and not self._stays:  # a backward pass reads the copies
                self._staying.enter_context(self.in_place(parameters))
                self._stays = True
            with nullcontext() if self._stays else self.in_place(parameters):
                return compute(*positional, **named)

        return forward

    @contextmanager
    def in_place(self, parameters: "set[nn.Parameter] | list[nn.Parameter]") -> Iterator[None]:
        """Inside the context, parameters are on the device; at its end, changes are written back to host memory."""
        used = [(parameter, self._of(parameter)) for parameter in parameters]
        for parameter, copy in used:
            parameter.data = copy.device
        try:
            yield
        finally:
            for parameter, copy in used:
                if parameter._version != copy.version:
                    copy.host.copy_(parameter.data)
                    copy.version = parameter._version
                parameter.data = copy.host

    def _of(self, parameter: nn.Parameter) -> _Copy:
        host = parameter.data
        copy = self._copies.get((id(parameter), host.data_ptr()))
        if copy is None or copy.version != parameter._version:
            copy = _Copy(host, host.to(self._device, copy=True, non_blocking=True), parameter._version)
            self._copies[id(parameter), host.data_ptr()] = copy
        return copy

    def drop(self) -> None:
        self._staying.close()
        self._copies.clear()
        self._layer, self._stays = None, False


@contextmanager
def _moved_buffers(model: nn.Module, device: torch.device) -> Iterator[None]:
    buffers_by_module = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    for module, buffers in buffers_by_module:
        module._buffers.update(
            {name: tensor if tensor is None else tensor.to(device) for name, tensor in buffers.items()}
        )
    try:
        yield
    finally:
        for module, buffers in buffers_by_module:
            module._buffers.update(buffers)
