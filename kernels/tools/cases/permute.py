"""Cases and builds of `permtriton.kernels.permute`."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from permtriton.kernels.permute import (
    CONFIGS,
    PACKED_ROWS,
    STAGED,
    WORDS,
    gather_rows,
    permute,
    permute_reference,
)
from permtriton.kernels.tools.builds import Build, builds_of
from permtriton.kernels.tools.case import Arguments, Case, Random, unequal
from permtriton.util.permutation import index_dtype


def cases(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Case]:
    """Returns the cases of each linear's input."""
    return [permute_case(t, c, dtype, device) for t in tokens for _, c in shapes]


def permute_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device, in_blocks: bool = True) -> Case:
    """A gather of channels inside blocks of 64, or anywhere."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        return random.normal(rows, channels, dtype=dtype), random.stored_order(channels, in_blocks)

    where = "in blocks" if in_blocks else "global"
    moved = 2 * rows * channels * dtype.itemsize
    shape, tables = f"{rows}x{channels} {where}", {"permute": CONFIGS}
    return Case("permute", shape, dtype, make, permute, permute_reference, unequal, 0, moved, tables=tables)


def builds() -> Iterator[Build]:
    """Yields the kernels for values of each size and rows of each kind."""

    def gather(size: int, channels: int) -> object:
        x = torch.empty(PACKED_ROWS, channels, dtype=WORDS[size])
        return gather_rows(x, torch.empty(channels, dtype=index_dtype(channels)))

    for size, channels in (
        (1, 4096), (2, 64), (2, 4096), (2, STAGED), (4, STAGED), (8, STAGED // 2), (2, STAGED // 2 - 1), (4, 4095),
    ):  # fmt: skip
        call = partial(gather, size, channels)
        yield from builds_of(f"{8 * size}-bit x {channels}", call, "permute", CONFIGS, aligned=channels % 16 == 0)
    yield from builds_of("16-bit", partial(gather, 2, 2 * STAGED))
