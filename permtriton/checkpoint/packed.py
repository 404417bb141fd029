"""Weights that were loaded packed: which stay packed, and how they are cast and unpacked."""

from collections.abc import Sequence

import torch
from torch import Tensor

from permtriton.kernels.launch import has_kernels
from permtriton.kernels.packing import pack, supports, unpack
from permtriton.model.modules import SparseLinear
from permtriton.util.sparsity import NMPattern


def unpacked(values: Tensor, positions: Tensor, shape: Sequence[int], dim: int, pattern: NMPattern) -> Tensor:
    """Returns a parameter of ``shape`` that was packed along its dimension ``dim``."""
    outer = [size for position, size in enumerate(shape) if position != dim]
    weight = unpack(values, positions, shape[dim], pattern)
    return weight.view(*outer, shape[dim]).movedim(-1, dim).contiguous()


def runs_packed(in_features: int, dtype: torch.dtype, pattern: NMPattern, device: torch.device) -> bool:
    """Whether a linear stays packed: if it is 2:4, in 16 bits, with a multiple of 16 channels, on a GPU with kernels.

    Args:
        in_features: number of input channels; if several ranks divide them, those of this rank.
    """
    return dtype.itemsize == 2 and supports(dtype, in_features, pattern) and has_kernels(device)


def fill_packed(
    linear: SparseLinear, pattern: NMPattern, dtype: torch.dtype, values: Tensor, positions: Tensor, *scale: Tensor
) -> SparseLinear:
    """Changes a linear to the packed state with a stored weight, cast to ``dtype`` unless it has a scale (FP8)."""
    if not scale and values.dtype != dtype:
        values, positions = cast_packed(values, positions, linear.in_features, pattern, dtype)
    return linear.set_packed(pattern, values, positions, *scale).compress()


def cast_packed(
    values: Tensor, positions: Tensor, in_features: int, pattern: NMPattern, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Casts a packed weight to ``dtype`` and packs it again, because small weights may have become zeros."""
    weight = unpack(values, positions, in_features, pattern)
    return pack(weight.to(dtype) + 0.0, pattern)  # never -0.0
