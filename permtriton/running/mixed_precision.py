"""Mixed precision: float32 factors are rounded to fewer bits where products are then faster; all else is float32.

Linears multiply in bfloat16 when they are trained, generate text, or compute the target outputs of training. Fits of
weights, and Hessians for fits, let torch round the factors of products: to bfloat16 on a processor with AMX, to TF32 on
a GPU. Values that are compared or saved, and the order of channels, are computed with exact products.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from permtriton.config import CommonConfig
from permtriton.model.forward import replaced_forwards
from permtriton.model.modules import LINEAR_MODULES
from permtriton.passes.plan import weight_in_out
from permtriton.util.machine import processor

NARROW, FEW = 256, 64  # channels of a weight, and rows of inputs, below which converting costs as much as it saves
AMX = "amx_bf16"
UNITS = ("avx512_bf16", AMX)  # features of processors that multiply bfloat16


@contextmanager
def mixed_precision(model: nn.Module, enabled: bool = True, *, fixed: bool = False) -> Iterator[None]:
    """Inside the context, wide linears of float32 round inputs, weights, outputs and gradients to bfloat16.

    Rounded outputs are returned as float32, so that no other operation of the model sees bfloat16. Backward passes must
    also run inside the context, because they may recompute activations. Nothing is rounded where that is not faster on
    the device of the first parameter, which is outside the layers that may come to a GPU one by one; nor are products
    of fewer than `FEW` rows rounded, unless the weight is rounded once.

    Args:
        enabled: False changes nothing.
        fixed: whether no weight changes and no gradient is taken. Weights are then rounded once; the rounded copies
            take half of the weights' memory. The weight of a head that is not trained is always rounded once: a head
            multiplies few tokens at a time, so that rounding it each time would take as long as the products.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None

    def replacement(module: nn.Module) -> Callable[[Tensor], Tensor]:
        once = fixed or (module is head and not module.get_parameter("weight").requires_grad)
        return (_rounded_once if once else _rounding)(module)

    def rounds(module: nn.Module) -> bool:
        wide_in_float32 = _is_wide(module) and module.get_parameter("weight").dtype == torch.float32
        return wide_in_float32 and "forward" not in vars(module)  # a replaced forward stays

    wide = [module for module in model.modules() if rounds(module)] if enabled else []
    faster = wide and multiplies_bfloat16(next(model.parameters()).device)
    with replaced_forwards(wide if faster else [], replacement):
        yield


def _is_wide(module: nn.Module) -> bool:
    return type(module) in LINEAR_MODULES and min(weight_in_out(module).shape) >= NARROW


def _rounding(module: nn.Module) -> Callable[[Tensor], Tensor]:
    exact = module.forward

    def forward(inputs: Tensor) -> Tensor:
        if inputs.numel() < FEW * inputs.shape[-1]:
            return exact(inputs)
        weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
        product: Tensor = _Product.apply(inputs, weight if isinstance(module, nn.Linear) else weight.t())
        return product if bias is None else product + bias

    return forward


def _rounded_once(module: nn.Module) -> Callable[[Tensor], Tensor]:
    weight, bias = weight_in_out(module).t().bfloat16().contiguous(), module._parameters.get("bias")

    def forward(inputs: Tensor) -> Tensor:
        product = linear(inputs.bfloat16(), weight).float()
        return product if bias is None else product + bias

    return forward


class _Product(torch.autograd.Function):
    """A linear without bias, in bfloat16. To save memory, the backward pass rounds the weight again."""

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
    return any(map(processor().get, UNITS))


def rounded_products(model: nn.Module, config: CommonConfig) -> AbstractContextManager[None]:
    """Inside the context, float32 products may round factors, if the model has wide linears and rounding is faster.

    Their sums stay float32. Hessians and fits use float32 products for models of any dtype. Results that are compared
    with others need `exact_products`.
    """
    wide = config.mixed_precision and any(map(_is_wide, model.modules()))
    return _precision("medium") if wide and _rounds(next(model.parameters()).device) else nullcontext()


def exact_products() -> AbstractContextManager[None]:
    """Inside the context, no float32 product rounds its factors."""
    return _precision("highest")


def products_of(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """Inside the context, float32 products round their factors, if that is faster and values of ``dtype`` lose no bit.

    They lose none if they have no more bits than bfloat16 (on a processor with AMX) or TF32 (on a GPU).
    """
    gpu = device.type == "cuda"
    fits = dtype == torch.bfloat16 or (gpu and dtype == torch.float16)
    return _precision("high" if gpu else "medium") if fits and _rounds(device) else nullcontext()


def _rounds(device: torch.device) -> bool:
    """Returns whether float32 products are faster on a device with factors rounded to bfloat16 (by AMX) or to TF32."""
    return bool(processor().get(AMX)) if device.type == "cpu" else multiplies_bfloat16(device)


@contextmanager
def _precision(name: str) -> Iterator[None]:
    old_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(old_precision)
