# mypy: allow-untyped-defs
"""Gather of channels: ``y[..., j, ...] = x[..., index[j], ...]`` along one dimension, the last one by default.

Shapes: ``x`` ``[..., C, ...]`` of any dtype, ``index`` ``[C]`` of any integer dtype -> ``y`` contiguous, same shape.
Bytes moved: x read once, y written once; no arithmetic. The floor is a copy of the same bytes. The backward pass
gathers the gradient by the inverse index, which it recomputes, since C entries are few beside ``rows x C``.

Triton gathers values of up to 32 bits along the last dimension; everything else runs the reference.

A program moves rows of up to `STAGED` channels through shared memory: 16-byte loads, staging, a gather of one word per
channel, 16-byte stores. A gather straight from global memory would touch up to 32 lines per warp for 64 bytes of 16-bit
values: about a fifth of a copy's speed if the index reaches across the row; shared memory serves 32 random words in
about 3.5 cycles, because on average the fullest of its 32 banks holds 3.5 of them. Rows of 8-bit and 16-bit values are
staged four and two per 32-bit word, so that a cycle moves as many bytes as for 32-bit values. At 11008 channels, shared
memory is busy for 0.48 of a copy's time that way; with one 16-bit row per word it would be busy for 0.74 of it.
A program keeps its index in registers and walks over tiles of rows. It loads the next tile into registers before it
gathers the present one: Triton's own pipelining (``num_stages``) would issue the next loads only after the gather and
the stores, and move each value through shared memory once more. A thread has 8 channels of two rows, or 16 channels of
rows longer than 8192: with fewer warps, 40 to 64 registers would not hold both tiles and the index. With 32 warps, or
tiles of at most 4096 channels, LLVM also merges the staging stores into stores of 16 bytes; otherwise up to half of
them stay 2 or 4 bytes wide, and take four or eight times the cycles.
The staged tile is one-dimensional, because Triton turns a gather of more dimensions into shuffles, thousands of them
here. Rows longer than `STAGED` are gathered from global memory through the cache. An index entry outside 0 to C-1,
which no permutation has, reads channel 0, never memory outside of x.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Config, jit, multiprocessors, tl, triton
from permtriton.kernels.operator import operator
from permtriton.util.permutation import inverse

INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# num_warps: for tiles of 4096 channels. TILE: least channels of a tile, which several short rows fill. PACK_BITS: size
# of the words into which values of several rows are packed; with 8, each row has words of its own.
CONFIGS = (Config({"TILE": 2048, "PACK_BITS": 32}, num_warps=16), Config({"TILE": 2048, "PACK_BITS": 8}, num_warps=16))
STAGED = 16384  # channels that a program can hold; half as many if rows are not aligned
DIRECT_TILE = 1024
MAX_WARPS = 32  # 1024 threads per program
RESIDENT_WARPS = 48  # per multiprocessor, at 40 registers per thread
RESIDENT_WARPS_MORE = 32  # at up to 64 registers: several rows per tile, rows that are not aligned
DIRECT_PROGRAMS = 8  # per multiprocessor
PACKED_ROWS = 1024  # fewer rows do not share words: they are spread over more programs instead
WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def permute_reference(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    """The gather in plain torch.

    Along the last dimension, ``x`` is gathered as a matrix of rows, because ``index_select`` of three dimensions is up
    to sixteen times slower on a CPU. Of a matrix it is fast for 32-bit values only, so that others take ``gather``.
    """
    index = index.long()
    if dim not in (-1, x.dim() - 1):
        return x.index_select(dim, index)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = rows.index_select(1, index) if x.element_size() == 4 else rows.gather(1, index.expand_as(rows))
    return y.view(x.shape)


def check_shapes(x: Tensor, index: Tensor, dim: int = -1) -> None:
    """Asserts that dtype and length of ``index`` fit ``x``, or kernels would read past its end; trusts its entries."""
    fits = index.dtype in INDEX_DTYPES and index.shape == (x.shape[dim],)
    assert fits, f"an index {index.dtype} {list(index.shape)} for dimension {dim} of {list(x.shape)}"


@jit
def load_index(index_ptr, channel, inside, C):
    """Loads index entries as int32; 0 for values not in 0 to C-1."""
    source = tl.load(index_ptr + channel, mask=inside, other=0).to(tl.int32)
    return tl.where((source >= 0) & (source < C), source, 0)


@jit
def _words(
    x_ptr, first, rows, inside, row_stride, BITS: tl.constexpr, ROWS: tl.constexpr, PACK: tl.constexpr
):  # fmt: skip
    """Returns a tile, ``PACK`` rows per word, from row ``first`` on; zeros outside. ``x_ptr`` points to row 0."""
    words = tl.load(x_ptr + first * row_stride, mask=inside & (first < rows), other=0)
    if PACK > 1:
        words = words.to(tl.uint32)
        for part in tl.static_range(1, PACK):
            row = first + part * ROWS
            value = tl.load(x_ptr + row * row_stride, mask=inside & (row < rows), other=0)
            words |= value.to(tl.uint32) << (part * BITS)
    return words


@jit
def _permute_fwd_kernel(
    x_ptr, index_ptr, y_ptr, rows, C, row_stride, channel_stride,
    BLOCK_C: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, ROWS * BLOCK_C)
    channel = at % BLOCK_C
    row_in_tile = at // BLOCK_C
    inside = channel < C
    source = load_index(index_ptr, channel, inside, C) + row_in_tile * BLOCK_C
    x_ptr += channel.to(tl.int64) * channel_stride
    start = tl.program_id(0).to(tl.int64) * (ROWS * PACK)
    step = tl.num_programs(0) * (ROWS * PACK)
    following = _words(x_ptr, start + row_in_tile, rows, inside, row_stride, BITS, ROWS, PACK)
    for tile in range(start, rows, step):
        words = following
        first = tile + row_in_tile
        following = _words(x_ptr, first + step, rows, inside, row_stride, BITS, ROWS, PACK)
        words = tl.gather(words, source, 0)
        for part in tl.static_range(PACK):
            row = first + part * ROWS
            value = words if PACK == 1 else words >> (part * BITS)
            tl.store(y_ptr + row * C + channel, value.to(y_ptr.dtype.element_ty), mask=inside & (row < rows))


@jit
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
    """Returns how many programs share ``tiles``; two under the interpreter, so that a program handles several tiles."""
    processors = multiprocessors(x.device)
    return min(tiles, 2 if processors is None else processors * per_processor)


def permute_triton(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    """Gathers with Triton what the kernels support, and else runs the reference.

    Reads ``x`` in place, whatever its strides, if the leading dimensions collapse to one row stride; else copies it.
    Shapes are not checked.
    """
    size = x.element_size()
    if dim not in (-1, x.dim() - 1) or size not in WORDS:
        return permute_reference(x, index, dim)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    values = x.reshape(-1, x.shape[-1]).view(WORDS[size])
    (rows, channels), block = values.shape, triton.next_power_of_2(x.shape[-1])
    arguments = (values, index.contiguous(), y.view(WORDS[size]), rows, channels, *values.stride())
    aligned = channels % 16 == 0 and values.stride(0) % 16 == 0 and values.stride(1) == 1
    if block > (STAGED if aligned else STAGED // 2):
        tiles = (programs_for(x, rows, DIRECT_PROGRAMS), triton.cdiv(channels, DIRECT_TILE))
        _permute_direct_kernel[tiles](*arguments, BLOCK_C=DIRECT_TILE, num_warps=4)
        return y
    config = config_for("permute", CONFIGS, (rows, channels), x.dtype)
    tile = max(config.constants["TILE"], block)
    pack_bits = config.constants["PACK_BITS"] if rows >= PACKED_ROWS and aligned else 8
    shared = {"ROWS": tile // block, "PACK": max(pack_bits // (8 * size), 1)}
    warps = warps_for(config, tile)
    resident = (RESIDENT_WARPS if aligned and tile == block else RESIDENT_WARPS_MORE) // warps
    grid = (programs_for(x, triton.cdiv(rows, shared["ROWS"] * shared["PACK"]), max(resident, 1)),)
    _permute_fwd_kernel[grid](*arguments, BLOCK_C=block, BITS=8 * size, num_warps=warps, **shared)
    return y


def _gradient(grad: Tensor, index: Tensor, dim: int) -> dict[str, Tensor]:
    return {"x": permute(grad, inverse(index.long()), dim)}


@operator(
    lambda x, index, dim: x.new_empty(x.shape),
    check=check_shapes,
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
    """
    return permute_reference(x, index, dim)
