"""Is a packed weight possible, when does it stay packed, and how does it become dense?"""

from collections.abc import Sequence

import torch
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels.launch import has_kernels
from permtriton.kernels.packing import check_packed, pack, supports, unpack
from permtriton.util.sparsity import NMPattern


def unpacked(
    name: str, values: Tensor, positions: Tensor, shape: Sequence[int], dim: int, pattern: NMPattern
) -> Tensor:
    """Checks a packed parameter and returns it unpacked, in its own shape.

    Args:
        name: its name, for errors.
        values, positions: as `permtriton.kernels.packing.pack` returns them.
        dim: its input dimension.

    Raises:
        ModelError: as `check_content`.
    """
    outer = [size for position, size in enumerate(shape) if position != dim]
    check_content(name, values, positions, shape, dim, pattern)
    weight = unpack(values, positions, shape[dim], pattern)
    return weight.view(*outer, shape[dim]).movedim(-1, dim).contiguous()


def check_content(
    name: str, values: Tensor, positions: Tensor, shape: Sequence[int], dim: int, pattern: NMPattern
) -> None:
    """Refuses values and positions that `permtriton.kernels.packing.pack` cannot have made; see `unpacked`.

    Raises:
        ModelError: they are damaged; the message says which parameter and how.
    """
    rows = torch.Size(shape).numel() // shape[dim]
    try:
        check_packed(values, positions, rows, shape[dim], pattern)
    except ModelError as error:
        raise ModelError(f"{name}: {error}; the checkpoint is damaged") from error


def runs_packed(in_features: int, dtype: torch.dtype, pattern: NMPattern, device: torch.device) -> bool:
    """Whether the weight of a linear stays packed: 2:4, in 16 bits, on a GPU with kernels.

    Args:
        in_features: number of input channels, on this rank if several ranks divide them.
    """
    return dtype.itemsize == 2 and supports(dtype, in_features, pattern) and has_kernels(device)


def cast_packed(
    values: Tensor, positions: Tensor, in_features: int, pattern: NMPattern, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Casts a packed weight to ``dtype`` and packs it again, because small weights may have become zeros.

    Raises:
        ModelError: a weight is not finite in ``dtype``.
    """
    weight = unpack(values, positions, in_features, pattern)
    return pack(weight.to(dtype) + 0.0, pattern)  # never -0.0
