"""Mixed precision: linears of float32 multiply in bfloat16, where the device does that faster; all else is float32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from permtriton.model.forward import replaced_forwards
from permtriton.passes.plan import LINEAR_MODULES, weight_in_out
from permtriton.util.machine import processor

NARROW, FEW = 256, 64  # channels and rows below which converting costs what a product spares
UNITS = ("avx512_bf16", "amx_bf16")  # of processors that multiply bfloat16


@contextmanager
def mixed_precision(model: nn.Module) -> Iterator[None]:
    """Inside the context, wide linears of float32 round inputs, weights, outputs and gradients to bfloat16.

    What they give is of float32, so that no other operation of the model sees bfloat16. Backward passes belong inside,
    too, because they may compute activations again. The device is that of the first parameter, which is outside of
    layers that come to a GPU one by one.
    """
    wide = [module for module in model.modules() if _is_wide(module)]
    with replaced_forwards(wide if wide and multiplies_bfloat16(next(model.parameters()).device) else [], _rounding):
        yield


def _is_wide(module: nn.Module) -> bool:
    """Returns whether a module is a wide linear of float32, whose forward nobody else has replaced."""
    if type(module) not in LINEAR_MODULES or "forward" in vars(module):
        return False
    weight = weight_in_out(module)
    return weight.dtype == torch.float32 and min(weight.shape) >= NARROW


def _rounding(module: nn.Module) -> Callable[[Tensor], Tensor]:
    exact = module.forward

    def forward(inputs: Tensor) -> Tensor:
        if inputs.numel() < FEW * inputs.shape[-1]:
            return exact(inputs)
        weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
        product: Tensor = _Product.apply(inputs, weight if isinstance(module, nn.Linear) else weight.t())
        return product if bias is None else product + bias

    return forward


class _Product(torch.autograd.Function):
    """A linear without its bias. The weight is rounded anew for the backward pass: all rounded ones take much memory.

    Its arguments are inputs, float32 ``[..., in_features]``, and a weight, ``[out_features, in_features]``.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        rounded = inputs.bfloat16()
        ctx.save_for_backward(weight, rounded if ctx.needs_input_grad[1] else None)
        return linear(rounded, weight.bfloat16()).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (weight, inputs), grad = ctx.saved_tensors, grad.bfloat16()
        of_inputs = (grad @ weight.bfloat16()).float() if ctx.needs_input_grad[0] else None
        of_weight = None if inputs is None else (grad.flatten(0, -2).t() @ inputs.flatten(0, -2)).float()
        return of_inputs, of_weight


def multiplies_bfloat16(device: torch.device) -> bool:
    """Returns whether a device multiplies bfloat16 faster than float32."""
    if device.type != "cpu":
        nvidia = device.type == "cuda" and torch.version.hip is None
        return nvidia and torch.cuda.get_device_properties(device).major >= 8
    has = processor()
    return any(has.get(unit) for unit in UNITS)
