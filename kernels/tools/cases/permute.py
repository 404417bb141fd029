from collections.abc import Sequence

import torch

from permtriton.kernels.permute import CONFIGS, permute, permute_reference
from permtriton.kernels.tools.case import Arguments, Case, Random, Shapes, unequal


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    return [permute_case(t, c, dtype, device) for t in tokens for _, c in shapes]


def permute_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device, in_blocks: bool = True) -> Case:
    """A gather of channels inside blocks of 64, or anywhere."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        return random.normal(rows, channels, dtype=dtype), random.stored_order(channels, in_blocks)

    where = "in blocks" if in_blocks else "global"
    moved = 2 * rows * channels * dtype.itemsize
    return Case(
        "permute", f"{rows}x{channels} {where}", dtype, make, permute, permute_reference, 0, moved,
        {"permute": CONFIGS}, error=unequal,
    )  # fmt: skip
