"""Gather of channels: ``y[..., j] = x[..., index[j]]``.

Shapes: ``x`` ``[..., C]`` of any dtype, ``index`` int64 ``[C]`` -> ``y`` ``[..., C]``.
Bytes moved: x read once, y written once: a copy.
"""

import torch
from torch import Tensor


def permute(x: Tensor, index: Tensor) -> Tensor:
    """Returns ``x`` with its last dimension in the order of ``index``; differentiable in ``x``.

    Args:
        x: ``[..., C]``.
        index: int64 ``[C]``, a permutation.
    """
    return torch.ops.permtriton.permute(x, index)


def permute_reference(x: Tensor, index: Tensor) -> Tensor:
    """The gather in plain torch."""
    return x.index_select(-1, index)


@torch.library.custom_op("permtriton::permute", mutates_args=())
def _permute(x: Tensor, index: Tensor) -> Tensor:
    return permute_reference(x, index)


@_permute.register_fake
def _(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[1])


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    (index,) = ctx.saved_tensors
    return torch.ops.permtriton.permute(grad, torch.argsort(index)), None


_permute.register_autograd(_backward, setup_context=_setup_context)
