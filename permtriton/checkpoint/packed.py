"""Packed weights: which stay packed, how they are checked, cast and unpacked."""

from collections.abc import Sequence

import torch
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels.launch import has_kernels
from permtriton.kernels.packing import pack, supports, unpack
from permtriton.util.sparsity import NMPattern


def unpacked(values: Tensor, positions: Tensor, shape: Sequence[int], dim: int, pattern: NMPattern) -> Tensor:
    """Returns a packed parameter as a dense one of ``shape``.

    Args:
        values, positions: as `permtriton.kernels.packing.pack` returns them.
        dim: input dimension of the parameter.
    """
    outer = [size for position, size in enumerate(shape) if position != dim]
    weight = unpack(values, positions, shape[dim], pattern)
    return weight.view(*outer, shape[dim]).movedim(-1, dim).contiguous()


def check_packed_fp8(name: str, values: Tensor, scale: Tensor) -> None:
    """Refuses a weight in FP8 that holds what is never written: NaN, -0.0, a scale that is not positive and finite."""
    stored = values.view(torch.uint8)
    if bool((stored & 127 == 127).any()) or not bool(((scale > 0) & scale.isfinite()).all()):
        raise ModelError(f"{name}: a value or a scale in FP8 is not finite: the checkpoint is damaged")
    if bool((stored == 128).any()):
        raise ModelError(f"{name}: a value in FP8 is -0.0: the checkpoint is damaged")


def runs_packed(in_features: int, dtype: torch.dtype, pattern: NMPattern, device: torch.device) -> bool:
    """Whether the weight of a linear stays packed: 2:4, in 16 bits, on a GPU with kernels.

    Args:
        in_features: number of input channels, on this rank if several ranks divide them.
    """
    return dtype.itemsize == 2 and supports(dtype, in_features, pattern) and has_kernels(device)


def cast_packed(
    values: Tensor, positions: Tensor, in_features: int, pattern: NMPattern, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Casts a packed weight to ``dtype`` and packs it again, because small weights may have become zeros."""
    weight = unpack(values, positions, in_features, pattern)
    return pack(weight.to(dtype) + 0.0, pattern)  # never -0.0
