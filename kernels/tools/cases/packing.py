"""Cases and builds of `permtriton.kernels.packing`."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from permtriton.kernels.packing import CONFIGS, pack, unpack, unpack_reference, unpack_triton
from permtriton.kernels.tools.builds import Build, builds_of, name_of
from permtriton.kernels.tools.case import PATTERN, Arguments, Case, Random, unequal


def cases(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Case]:
    """Returns the case of each linear."""
    return [unpack_case(o, c, dtype, device) for o, c in shapes]


def unpack_case(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Unpacking a 2:4 weight."""

    def make(seed: int) -> Arguments:
        packed = pack(Random(seed, device).two_of_four(out_features, in_features, dtype), PATTERN)
        return *packed, in_features, PATTERN

    weights = out_features * in_features
    moved = weights * dtype.itemsize * 3 // 2 + weights // 8
    shape = f"{out_features}x{in_features}"
    tables = {"packing": CONFIGS}
    return Case("packing", shape, dtype, make, unpack, unpack_reference, unequal, 0, moved, tables=tables)


def builds() -> Iterator[Build]:
    """Yields the kernel for bfloat16 and float32."""

    def unpacked(dtype: torch.dtype) -> object:
        return unpack_triton(torch.empty(4096, 2048, dtype=dtype), torch.empty(4096, 512, dtype=torch.uint8), 4096)

    for dtype in (torch.bfloat16, torch.float32):
        yield from builds_of(name_of(dtype), partial(unpacked, dtype), "packing", CONFIGS)
