from collections.abc import Sequence

import torch

from permtriton.kernels.packing import CONFIGS, pack, unpack, unpack_reference
from permtriton.kernels.tools.case import PATTERN, Arguments, Case, Random, Shapes, unequal


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    return [unpack_case(o, c, dtype, device) for o, c in shapes]


def unpack_case(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Unpacking a 2:4 weight."""

    def make(seed: int) -> Arguments:
        packed = pack(Random(seed, device).two_of_four(out_features, in_features, dtype), PATTERN)
        return *packed, in_features, PATTERN

    weights = out_features * in_features
    moved = weights * dtype.itemsize * 3 // 2 + weights // 8
    return Case(
        "packing", f"{out_features}x{in_features}", dtype, make, unpack, unpack_reference, 0, moved,
        {"packing": CONFIGS}, error=unequal,
    )  # fmt: skip
