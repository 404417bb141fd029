"""The Triton kernels of `permtriton.kernels.permute`, and what launches them.

A program takes rows of up to `STAGED` channels through shared memory: 16-byte loads, staging, a gather of one word a
channel, 16-byte stores. A gather straight from global memory would touch up to 32 lines a warp for 64 bytes of 16-bit
values, by count a fifth of the copy's speed where the index reaches across the row; banks of shared memory answer 32
random words in about 3.5 turns. Rows of 8 and 16-bit values are staged four and two to a 32-bit word, so that a turn
moves as many bytes as for 32-bit ones. A program keeps its index in registers and walks over rows. The staged tile is
one-dimensional on purpose: Triton turns a gather of more dimensions into shuffles, thousands of them here. Longer rows,
up to any C, are gathered from global memory through the cache. An entry outside of 0 to C-1, which no permutation has,
reads channel 0, never foreign memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Build, Config, jit, tl, triton

# TILE: staged words of a program, and the row length that num_warps is meant for. PACK_BITS: rows share words of this
# size, or have their own at 8.
CONFIGS = (
    Config({"TILE": 4096, "PACK_BITS": 32}, num_warps=8),
    Config({"TILE": 4096, "PACK_BITS": 32}, num_warps=4),
    Config({"TILE": 2048, "PACK_BITS": 32}, num_warps=4),
    Config({"TILE": 8192, "PACK_BITS": 32}, num_warps=8),
    Config({"TILE": 4096, "PACK_BITS": 8}, num_warps=8),
    Config({"TILE": 4096, "PACK_BITS": 8}, num_warps=4),
)
STAGED = 16384  # channels of up to 32 bits that a program can hold, or 64-bit halves; half as many where C % 16
DIRECT_TILE = 1024
MAX_WARPS = 16
PROGRAMS_PER_SM = 8
PACKED_ROWS = 1024  # fewer rows rather spread over the processors than share words
WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@jit
def _permute_fwd_kernel(
    x,
    index,
    y,
    rows,
    C,
    stride_row,
    stride_channel,
    BLOCK_C: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    PACK: tl.constexpr,
):
    at = tl.arange(0, ROWS * BLOCK_C)
    channel = at % BLOCK_C
    row_in_tile = at // BLOCK_C
    inside = channel < C
    source = tl.load(index + channel, mask=inside, other=0).to(tl.int32)
    source = tl.where((source >= 0) & (source < C), source, 0) + row_in_tile * BLOCK_C
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(rows, ROWS * PACK), tl.num_programs(0)):
        first = tile * (ROWS * PACK) + row_in_tile
        if PACK == 1:
            there = inside & (first < rows)
            words = tl.load(x + first * stride_row + channel.to(tl.int64) * stride_channel, mask=there, other=0)
        else:
            words = tl.zeros([ROWS * BLOCK_C], dtype=tl.uint32)
            for part in tl.static_range(PACK):
                row = first + part * ROWS
                there = inside & (row < rows)
                value = tl.load(x + row * stride_row + channel.to(tl.int64) * stride_channel, mask=there, other=0)
                words |= value.to(tl.uint32) << (part * BITS)
        words = tl.gather(words, source, 0)
        for part in tl.static_range(PACK):
            row = first + part * ROWS
            value = words if PACK == 1 else words >> (part * BITS)
            tl.store(y + row * C + channel, value.to(y.dtype.element_ty), mask=inside & (row < rows))


@jit
def _permute_direct_kernel(x, index, y, rows, C, stride_row, stride_channel, BLOCK_C: tl.constexpr):
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    source = tl.load(index + channel, mask=inside, other=0).to(tl.int64)
    source = tl.where((source >= 0) & (source < C), source, 0)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        value = tl.load(x + row * stride_row + source * stride_channel, mask=inside)
        tl.store(y + row * C + channel, value, mask=inside)


def warps_for(config: Config, block: int) -> int:
    """Returns the warps for a row of ``block`` channels (a power of two), where the configuration speaks of 4096."""
    return max(min(config.num_warps * block // 4096, MAX_WARPS), 1)


def programs_for(x: Tensor, tiles: int, per_processor: int) -> int:
    """Returns how many programs walk over ``tiles``; under the interpreter two, so that each walks."""
    if x.device.type != "cuda":
        return min(tiles, 2)
    return min(tiles, torch.cuda.get_device_properties(x.device).multi_processor_count * per_processor)


def gather_rows(x: Tensor, index: Tensor, config: Config | None = None) -> Tensor:
    """Returns ``x[:, index]``, contiguous.

    Args:
        x: ``[rows, C]``, not empty, any strides, values of 8, 16, 32 or 64 bits.
        index: ``[C]``, any integer dtype.
        config: in place of the tuned one.
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
    """Returns the last arguments of the kernel for padded rows of ``block`` values of ``size`` bytes."""
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
    """Yields the kernels in every configuration, for the values of each size and rows of each kind."""
    for config in CONFIGS:
        for size, block in ((1, 4096), (2, 64), (2, 4096), (2, STAGED), (4, 4096), (4, STAGED), (8, STAGED // 2)):
            launch = _launch(config, block, size, PACKED_ROWS)
            tuned = Config({name: launch[name] for name in ("ROWS", "PACK")}, launch["num_warps"], config.num_stages)
            pointer = f"*u{8 * size}"
            signature = {"x": pointer, "index": "*i16", "y": pointer, "rows": "i32", "C": "i32", "stride_row": "i32"}
            constants = {"stride_channel": 1, "BLOCK_C": block, "BITS": 8 * size, **tuned.constants}
            name = f"permute {8 * size}-bit x {block}, {dict(config.constants)}, {tuned.num_warps} warps"
            signature |= dict.fromkeys(constants, "constexpr")
            # The longest are launched with multiples of 16 only, as those that are no default are compiled.
            default = config == CONFIGS[0] and block * max(size, 4) < STAGED * 4
            yield Build(name, _permute_fwd_kernel, signature, constants, tuned, default)
    signature = {"x": "*u16", "index": "*i32", "y": "*u16", "rows": "i32", "C": "i32", "stride_row": "i32"}
    constants = {"stride_channel": 1, "BLOCK_C": DIRECT_TILE}
    signature |= dict.fromkeys(constants, "constexpr")
    yield Build("permute direct 16-bit", _permute_direct_kernel, signature, constants, Config(), True)
