"""Gather of channels: ``y[..., j, ...] = x[..., index[j], ...]`` along one dimension, the last one by default.

Shapes: ``x`` ``[..., C, ...]`` of any dtype, ``index`` ``[C]`` of any integer dtype -> ``y`` contiguous, same shape.
Bytes moved: x read once, y written once; no arithmetic. The floor is a copy of the same bytes. The backward pass
gathers the gradient by the inverse index, which is recomputed: C entries, against ``rows x C`` of the gradient.

Triton gathers along the last dimension, see `permtriton.kernels.permute_triton`; other dimensions run the reference.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels.launch import on_gpu
from permtriton.kernels.permute_triton import WORDS, gather_rows, loops
from permtriton.kernels.tools.cases import (
    META,
    Case,
    Floor,
    Inputs,
    as_stored,
    generator_of,
    normal,
    random_order,
    unequal,
)
from permtriton.permutation import inverse

INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def permute(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    """Returns ``x`` with dimension ``dim`` in the order of ``index``; differentiable in ``x``.

    Args:
        x: ``[..., C, ...]``.
        index: uint8, int8, int16, int32 or int64 ``[C]``, a permutation.
        dim: The dimension of the C channels; negative numbers count from the end.

    Raises:
        ModelError: ``x`` has no dimension ``dim``, or ``index`` has another shape or dtype.
    """
    return torch.ops.permtriton.permute(x, index, dim)


def permute_reference(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    """The gather in plain torch.

    Along the last dimension, rows are gathered as a matrix: with three dimensions index_select is up to sixteen times
    slower on a CPU, and it is fast on 32-bit values only.
    """
    index = index.long()
    if dim not in (-1, x.dim() - 1):
        return x.index_select(dim, index)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = rows.index_select(1, index) if x.element_size() == 4 else rows.gather(1, index.expand_as(rows))
    return y.view(x.shape)


def check_shapes(op: str, x: Tensor, index: Tensor, dim: int = -1) -> None:
    """Refuses an index whose shape or dtype does not fit dimension ``dim`` of ``x``; its values are not checked.

    Raises:
        ModelError: naming the operator, the shapes and what was expected.
    """
    if not -x.dim() <= dim < x.dim():
        raise ModelError(f"{op}: dimension {dim} of a tensor of shape {list(x.shape)}: expected one that it has")
    if index.dtype not in INDEX_DTYPES:
        raise ModelError(f"{op}: an index of {index.dtype}: expected integers of at most 64 bits, such as int64")
    if index.dim() != 1 or index.shape[0] != x.shape[dim]:
        raise ModelError(
            f"{op}: an index of shape {list(index.shape)} for dimension {dim} of a tensor of shape {list(x.shape)}: "
            f"expected [{x.shape[dim]}], one entry per channel"
        )


def permute_triton(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    """Gathers with Triton along the last dimension; other dimensions and 128-bit values run the reference.

    Reads ``x`` in place, whatever its strides, if the leading dimensions collapse to one row stride; else copies it.
    """
    check_shapes("permute", x, index, dim)
    if dim not in (-1, x.dim() - 1) or x.element_size() not in WORDS or not x.numel():
        return permute_reference(x, index, dim)
    return gather_rows(x.reshape(-1, x.shape[-1]), index).view(x.shape)


@torch.library.custom_op("permtriton::permute", mutates_args=())
def _permute(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    check_shapes("permute", x, index, dim)
    return permute_reference(x, index, dim)


@on_gpu(_permute)
def _permute_cuda(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    return permute_triton(x, index, dim)


@_permute.register_fake
def _(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    check_shapes("permute", x, index, dim)
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, index, ctx.dim = inputs
    ctx.save_for_backward(index)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    (index,) = ctx.saved_tensors
    return torch.ops.permtriton.permute(grad, inverse(index.long()), ctx.dim), None, None


_permute.register_autograd(_backward, setup_context=_setup_context)


def cases(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Case]:
    """Returns what is checked, tuned and measured for linears of these shapes (out, in)."""
    return [permute_case(t, c, dtype, device) for t in tokens for _, c in shapes]


def permute_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device, in_blocks: bool = True) -> Case:
    """A gather of channels inside blocks of 64, or anywhere."""

    def make(seed: int) -> Inputs:
        generator = generator_of(seed, device)
        return normal((rows, channels), dtype, generator), as_stored(random_order(channels, in_blocks, generator))

    where = "in blocks" if in_blocks else "global"
    moved = 2 * rows * channels * dtype.itemsize
    return Case("permute", f"{rows}x{channels} {where}", dtype, make, permute, permute_reference, unequal, 0, moved)


def floors() -> Iterator[Floor]:
    """Yields the named shape whose issue floor is counted."""
    rows, channels, dtype = 16384, 11008, torch.bfloat16

    def call() -> Tensor:
        return permute_triton(torch.empty(rows, channels, dtype=dtype), torch.empty(channels, dtype=torch.int16))

    yield Floor(permute_case(rows, channels, dtype, META), call, rows * channels, "element", loops)
