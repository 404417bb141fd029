# mypy: allow-untyped-defs
"""The Triton kernels of `permtriton.kernels.permute`, and their launcher.

A program moves rows of up to `STAGED` channels through shared memory: 16-byte loads, staging, a gather of one word per
channel, 16-byte stores. A gather straight from global memory would touch up to 32 lines per warp for 64 bytes of 16-bit
values, about a fifth of a copy's speed if the index reaches across the row; shared memory serves 32 random words in
about 3.5 cycles. Rows of 8-bit and 16-bit values are staged four and two per 32-bit word, so that a cycle moves as many
bytes as for 32-bit values. A program keeps its index in registers and walks over rows.
The staged tile is one-dimensional on purpose: Triton turns a gather of more dimensions into shuffles, thousands of them
here. Longer rows, of any C, are gathered from global memory through the cache. An entry outside 0 to C-1, which no
permutation has, reads channel 0, never foreign memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.builds import Build, builds_of
from permtriton.kernels.launch import Config, Kernel, tl, triton

# TILE: words staged per program, and the row length that num_warps is meant for. PACK_BITS: the size of the words that
# rows share; at 8 each row has its own.
CONFIGS = (
    Config({"TILE": 4096, "PACK_BITS": 32}, num_warps=8),
    Config({"TILE": 4096, "PACK_BITS": 32}, num_warps=4),
    Config({"TILE": 2048, "PACK_BITS": 32}, num_warps=4),
    Config({"TILE": 8192, "PACK_BITS": 32}, num_warps=8),
    Config({"TILE": 4096, "PACK_BITS": 8}, num_warps=8),
    Config({"TILE": 4096, "PACK_BITS": 8}, num_warps=4),
)
STAGED = 16384  # channels of up to 32 bits that a program can hold; half as many at 64 bits, or if C % 16
DIRECT_TILE = 1024
MAX_WARPS = 16
PROGRAMS_PER_SM = 8
PACKED_ROWS = 1024  # fewer rows do not share words: they are spread over more programs instead
WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@Kernel
def _permute_fwd_kernel(
    x_ptr, index_ptr, y_ptr, rows, C, row_stride, channel_stride,
    BLOCK_C: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, ROWS * BLOCK_C)
    channel = at % BLOCK_C
    row_in_tile = at // BLOCK_C
    inside = channel < C
    source = tl.load(index_ptr + channel, mask=inside, other=0).to(tl.int32)
    source = tl.where((source >= 0) & (source < C), source, 0) + row_in_tile * BLOCK_C
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(rows, ROWS * PACK), tl.num_programs(0)):
        first = tile * (ROWS * PACK) + row_in_tile
        if PACK == 1:
            there = inside & (first < rows)
            words = tl.load(x_ptr + first * row_stride + channel.to(tl.int64) * channel_stride, mask=there, other=0)
        else:
            words = tl.zeros([ROWS * BLOCK_C], dtype=tl.uint32)
            for part in tl.static_range(PACK):
                row = first + part * ROWS
                there = inside & (row < rows)
                value = tl.load(x_ptr + row * row_stride + channel.to(tl.int64) * channel_stride, mask=there, other=0)
                words |= value.to(tl.uint32) << (part * BITS)
        words = tl.gather(words, source, 0)
        for part in tl.static_range(PACK):
            row = first + part * ROWS
            value = words if PACK == 1 else words >> (part * BITS)
            tl.store(y_ptr + row * C + channel, value.to(y_ptr.dtype.element_ty), mask=inside & (row < rows))


@Kernel
def _permute_direct_kernel(x_ptr, index_ptr, y_ptr, rows, C, row_stride, channel_stride, BLOCK_C: tl.constexpr):
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    source = tl.load(index_ptr + channel, mask=inside, other=0).to(tl.int64)
    source = tl.where((source >= 0) & (source < C), source, 0)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        value = tl.load(x_ptr + row * row_stride + source * channel_stride, mask=inside)
        tl.store(y_ptr + row * C + channel, value, mask=inside)


def warps_for(config: Config, block: int) -> int:
    """Returns the warps for a row of ``block`` channels (a power of two); configurations give those for 4096."""
    return max(min(config.num_warps * block // 4096, MAX_WARPS), 1)


def programs_for(x: Tensor, tiles: int, per_processor: int) -> int:
    """Returns how many programs walk over ``tiles``; two under the interpreter, so that each of them walks."""
    if x.device.type != "cuda":
        return min(tiles, 2)
    return min(tiles, torch.cuda.get_device_properties(x.device).multi_processor_count * per_processor)


def gather_rows(x: Tensor, index: Tensor, config: Config | None = None) -> Tensor:
    """Returns ``x[:, index]``, contiguous.

    Args:
        x: ``[rows, C]``, not empty, any strides, values of 8, 16, 32 or 64 bits.
        index: ``[C]``, any integer dtype.
        config: Used instead of the tuned one.
    """
    (rows, channels), size = x.shape, x.element_size()
    y = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    word, block = WORDS[size], triton.next_power_of_2(channels)
    arguments = (x.view(word), index.contiguous(), y.view(word), rows, channels, *x.stride())
    if block * max(size, 4) > (STAGED if channels % 16 == 0 else STAGED // 2) * 4:
        tiles = (programs_for(x, rows, PROGRAMS_PER_SM), triton.cdiv(channels, DIRECT_TILE))
        _permute_direct_kernel[tiles](*arguments, BLOCK_C=DIRECT_TILE, num_warps=4)
        return y
    config = config or config_for("permute", CONFIGS, (rows, channels), x.dtype)
    launch = _launch(config, block, size, rows)
    grid = (programs_for(x, triton.cdiv(rows, launch["ROWS"] * launch["PACK"]), PROGRAMS_PER_SM),)
    _permute_fwd_kernel[grid](*arguments, BLOCK_C=block, BITS=8 * size, **launch)
    return y


def _launch(config: Config, block: int, size: int, rows: int) -> dict[str, int]:
    """Returns the constants and options of the kernel for padded rows of ``block`` values of ``size`` bytes."""
    tile, pack_bits = config.constants["TILE"], config.constants["PACK_BITS"] if rows >= PACKED_ROWS else 8
    warps = warps_for(config, max(block, tile))
    if size == 8 or (size == 4 and block > 4096):
        warps = min(2 * warps, MAX_WARPS)
    return {
        "ROWS": max(tile // block, 1),
        "PACK": max(pack_bits // (8 * size), 1),
        "num_warps": warps,
        "num_stages": config.num_stages,
    }


def builds() -> Iterator[Build]:
    """Yields the kernels in every configuration, for values of each size and rows of each kind."""

    def gather(size: int, channels: int, index_dtype: torch.dtype) -> object:
        x = torch.empty(PACKED_ROWS, channels, dtype=WORDS[size])
        return gather_rows(x, torch.empty(channels, dtype=index_dtype))

    for size, block in ((1, 4096), (2, 64), (2, 4096), (2, STAGED), (4, 4096), (4, STAGED), (8, STAGED // 2)):
        # Rows as long as a program can hold are launched only where C and the stride are multiples of 16.
        default = block * max(size, 4) < STAGED * 4
        call = partial(gather, size, block, torch.int16)
        yield from builds_of(f"{8 * size}-bit x {block}", call, "permute", CONFIGS, default)
    yield from builds_of("16-bit", partial(gather, 2, 2 * STAGED, torch.int32))
