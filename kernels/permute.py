"""Gather of channels: ``y[..., j, ...] = x[..., index[j], ...]`` along one dimension, the last one by default.

Shapes: ``x`` ``[..., C, ...]`` of any dtype, ``index`` ``[C]`` of any integer dtype -> ``y`` contiguous, same shape.
Bytes moved: x read once, y written once; no arithmetic. The floor is a copy of the same bytes. The backward pass
gathers the gradient by the inverse index, which is recomputed: C entries, against ``rows x C`` of the gradient.

Triton gathers along the last dimension, see `permtriton.kernels.permute_triton`; other dimensions run the reference.
"""

import math
from functools import partial

import torch
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels.operator import operator
from permtriton.kernels.permute_triton import WORDS, gather_rows
from permtriton.util.permutation import inverse

INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


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
    Shapes are not checked.
    """
    if dim not in (-1, x.dim() - 1) or x.element_size() not in WORDS or not x.numel():
        return permute_reference(x, index, dim)
    return gather_rows(x.reshape(-1, x.shape[-1]), index).view(x.shape)


def _gradient(grad: Tensor, index: Tensor, dim: int) -> dict[str, Tensor]:
    return {"x": permute(grad, inverse(index.long()), dim)}


@operator(
    "permute",
    lambda x, index, dim: x.new_empty(x.shape),
    check=partial(check_shapes, "permute"),
    launcher=permute_triton,
    gradient=_gradient,
    keeps=("index", "dim"),
)
def permute(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    """Returns ``x`` with dimension ``dim`` in the order of ``index``; differentiable in ``x``.

    Args:
        x: ``[..., C, ...]``.
        index: uint8, int8, int16, int32 or int64 ``[C]``, a permutation.
        dim: The dimension of the C channels; negative numbers count from the end.

    Raises:
        ModelError: ``x`` has no dimension ``dim``, or ``index`` has another shape or dtype.
    """
    return permute_reference(x, index, dim)
