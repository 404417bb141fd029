# mypy: allow-untyped-defs
"""The Triton kernel of the backward pass of `permtriton.kernels.nm_mask`, and its launcher.

A program accumulates a ``TILE_C x TILE_C`` tile of one block's dP over ``rows / splits`` rows of W, in float32. For a
block of up to 64 padded channels, ``A`` and ``S`` are in permuted order, as are ``M_soft`` and ``dS_hat``, which are
made from them, so that W and dL/dW_eff are read once; the rows of dP are brought to base order when they are stored.
Larger blocks are cut into pairs of tiles, one in base order and one in permuted order, and read again for every pair.
Each split of the rows writes its own partial sums, which are added in a fixed order: the same input gives the same
bits. Partial sums take ``4 splits B`` bytes per channel of a block of B; no temporary of W's size is made.

What keeps the instructions per weight few:

- The channels of a tile are in slot-major order: slot 0 of every group, then slot 1, and so on. The width of loads is
  limited, so that one thread holds all slots of its groups (of up to 4) and the softmax needs no data of other threads.
- Both terms of dP are one product, whose inner dimension alternates between them, ``[M_soft dS_hat] [A S]^T``: each
  operand is rounded to bfloat16 and written to shared memory once.
- With ``group_scale`` the exponents are between 0 and ``GROUP``, so that their maximum need not be subtracted.
- 1 / x is the square of a reciprocal square root: two instructions in place of the eight of a division.

Precision: with ``group_scale`` and weights of 16 bits, operands of the product are rounded to bfloat16. A test checks
that this turns the direction of dP no further than the rounding of W and dL/dW_eff to bfloat16 did, also where most of
dP cancels. For float32, and without ``group_scale``, where M_soft may be nearly flat, each operand is split into two
bfloat16 halves, and three of the four products of halves are added: the relative error is at most 2^-16 per product;
TF32's is 2^-10.
Floor: 4 bytes per weight at 16 bits; 4 TILE_C floating-point operations per weight, 12 TILE_C if operands are split.

With ``group_scale``, a block whose mean score is below ten times the smallest normal float32 gets a smaller factor.
A group takes ``PADDED`` places of a tile, the next power of two of its size; the places beyond ``group`` hold zeros and
are left out of the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.launch import Config, builtin, jit, tl, triton

# Most padded channels of a tile: tiles of 128 would spill registers on sm_80 and overflow sm_100's tensor memory.
TILE = 64
FLOOR = 0.1  # a group's mean score counts as at least this share of its block's, or dead channels would dominate
LEAST_ROWS = 512  # at most one split of the rows of W per this many of them
ROWS_STEP = 64  # the rows of a split are a multiple of it: the largest TILE_O
ALIGN = 16  # wide loads need rows, strides and block sizes that are multiples of it

# For tiles of 64 channels; `_launch` adapts rows and warps to other tiles.
CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 32, "PROGRAMS": 792}, num_warps=4, num_stages=3),
    Config({"TILE_O": 32, "PROGRAMS": 396}, num_warps=4, num_stages=3),
    Config({"TILE_O": 32, "PROGRAMS": 1584}, num_warps=4, num_stages=3),
    Config({"TILE_O": 32, "PROGRAMS": 792}, num_warps=4, num_stages=4),
    Config({"TILE_O": 64, "PROGRAMS": 792}, num_warps=8, num_stages=3),
)


@jit
def _tile(
    grad_ptr, weight_ptr, row_ptr, channel, scale, column, valid, start, end,
    grad_row_stride, grad_channel_stride, row_stride, channel_stride,
    POWER: tl.constexpr, STATISTICS: tl.constexpr, FULL: tl.constexpr, VECTOR: tl.constexpr, TILE_O: tl.constexpr,
):  # fmt: skip
    """(A, S) of a tile of channels and rows, float32 ``[channels, rows]``; zeros outside."""
    line, begin = tl.arange(0, TILE_O), tl.cast(start, tl.int64)
    mask = None if FULL else valid[:, None] & (start + line < end)[None, :]
    other = None if FULL else 0.0
    # The contiguous part is understated: wider loads would spread the slots of a group over threads.
    places = tl.max_contiguous(channel[:, None] * channel_stride + line[None, :] * row_stride, [1, VECTOR])
    w = tl.load(weight_ptr + begin * row_stride + places, mask=mask, other=other).to(tl.float32)
    places = tl.max_contiguous(channel[:, None] * grad_channel_stride + line[None, :] * grad_row_stride, [1, VECTOR])
    g = tl.load(grad_ptr + begin * grad_row_stride + places, mask=mask, other=other).to(tl.float32)
    factor = scale[:, None]
    if STATISTICS:
        row = tl.load(row_ptr + start + line, mask=None if FULL else start + line < end, other=other)[None, :]
        factor = row * factor + column[:, None]
    scores = tl.abs(w) * factor
    if POWER == 2:
        scores *= tl.abs(w)
    return g * w, scores


@jit
def _factors(scale_ptr, column_ptr, channel, valid, STATISTICS: tl.constexpr):
    """(scale, column * scale) of channels: S = |W|^power (row * scale + column * scale)."""
    scale = tl.load(scale_ptr + channel, mask=valid, other=0.0)
    if STATISTICS:
        return scale, scale * tl.load(column_ptr + channel, mask=valid, other=0.0)
    return scale, scale


@jit
def _sum_of_block(
    grad_ptr, weight_ptr, scale_ptr, row_ptr, column_ptr, first, size, start, end,
    grad_row_stride, grad_channel_stride, row_stride, channel_stride,
    POWER: tl.constexpr, STATISTICS: tl.constexpr, VECTOR: tl.constexpr, TILE_C: tl.constexpr, TILE_O: tl.constexpr,
):  # fmt: skip
    """The sum of S over the channels of a block, ``[TILE_O]``."""
    total = tl.zeros([TILE_O], tl.float32)
    for tile in range(0, size, TILE_C):
        place = tile + tl.arange(0, TILE_C)
        scale, column = _factors(scale_ptr, column_ptr, first + place, place < size, STATISTICS)
        _, scores = _tile(
            grad_ptr, weight_ptr, row_ptr, first + place, scale, column, place < size, start, end,
            grad_row_stride, grad_channel_stride, row_stride, channel_stride, POWER, STATISTICS, False, VECTOR, TILE_O,
        )  # fmt: skip
        total += tl.sum(scores, 0)
    return total


@jit
def _inverse(x):
    """1 / x of positive numbers that are not subnormal."""
    root = tl.rsqrt(x)
    return root * root


@jit
def _softmax_of_groups(
    agreement, scores, block_mean, GROUP: tl.constexpr, PADDED: tl.constexpr, GROUP_SCALE: tl.constexpr,
    FLOOR: tl.constexpr, TILE_C: tl.constexpr, TILE_O: tl.constexpr,
):  # fmt: skip
    """(M_soft, dS_hat) of a tile in permuted order, slot-major, both ``[TILE_C, TILE_O]``."""
    LOG2E: tl.constexpr = 1.4426950408889634
    SMALLEST: tl.constexpr = 1.1754943508222875e-38  # the smallest normal float32
    grouped = tl.reshape(scores, [PADDED, TILE_C // PADDED, TILE_O])
    grads = tl.reshape(agreement, [PADDED, TILE_C // PADDED, TILE_O])
    if GROUP_SCALE:
        floor = block_mean * FLOOR
        alive = tl.minimum(floor, SMALLEST) * (1 / SMALLEST)  # 0 if all scores are; below 1 if floor is subnormal
        mean = tl.maximum(tl.sum(grouped, 0) * (1.0 / GROUP), tl.maximum(floor, SMALLEST)[None, :])
        sharpness = _inverse(mean) * alive[None, :]
        weights = tl.exp2(grouped * (sharpness * LOG2E)[None, :, :])
    else:
        weights = tl.exp2((grouped - tl.max(grouped, 0)[None, :, :]) * LOG2E)
    if PADDED != GROUP:
        weights = tl.where((tl.arange(0, PADDED) < GROUP)[:, None, None], weights, 0.0)
    soft = weights * _inverse(tl.sum(weights, 0))[None, :, :]
    common = tl.sum(grads * soft, 0)
    if GROUP_SCALE:
        grad_scores = soft * (grads * sharpness[None, :, :] - (common * sharpness)[None, :, :])
    else:
        grad_scores = soft * (grads - common[None, :, :])
    return tl.reshape(soft, [TILE_C, TILE_O]), tl.reshape(grad_scores, [TILE_C, TILE_O])


@builtin
def _opaque(x, _semantic=None):
    """The bfloat16 x, passed through empty inline assembly that counts as a side effect.

    Without the assembly Triton computes the operands of a product again, from the loads on, in the layout of the
    product: twice the instructions on sm_80 and sm_100. The assembly is left out on AMD GPUs, and on sm_100 before
    Triton 3.9, where loops cannot hold such assembly.
    """
    options = _semantic.builder.options
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if options.backend_name != "cuda" or (int(options.arch.strip("sm_af")) >= 100 and version < (3, 9)):
        return x
    return tl.inline_asm_elementwise("", "=r,0", [x], tl.bfloat16, False, 2, _semantic=_semantic)


@jit
def _rounded(x, INTERPRETED: tl.constexpr):
    """x in bfloat16, as an operand of a product."""
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as integers
        return x.to(tl.bfloat16).to(tl.float32)
    return _opaque(x.to(tl.bfloat16))


@jit
def _add_product(
    product, left, right, EXACT: tl.constexpr, INTERPRETED: tl.constexpr, TILE_C: tl.constexpr, INNER: tl.constexpr
):
    """product + left right^T, of float32 tiles that are flattened to ``[TILE_C, INNER]``."""
    left, right = tl.reshape(left, [TILE_C, INNER]), tl.reshape(right, [TILE_C, INNER])
    left_high, right_high = _rounded(left, INTERPRETED), _rounded(right, INTERPRETED)
    if EXACT:
        left_low = _rounded(left - left_high.to(tl.float32), INTERPRETED)
        right_low = _rounded(right - right_high.to(tl.float32), INTERPRETED)
        product = tl.dot(left_low, tl.trans(right_high), product)
        product = tl.dot(left_high, tl.trans(right_low), product)
    return tl.dot(left_high, tl.trans(right_high), product)


@jit
def _store(
    block_ptr, product, c, c_valid, tile, size,
    GROUP: tl.constexpr, PADDED: tl.constexpr, FULL: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Writes a tile ``[j, c]`` of dP with slot-major j as ``[c, j]``: c in base order, j in permuted order."""
    product = tl.permute(tl.reshape(product, [PADDED, TILE_C // PADDED, TILE_C]), (2, 1, 0))
    place = tile * TILE_C + tl.arange(0, TILE_C)
    j = place
    if PADDED != GROUP:
        j = place // PADDED * GROUP + place % PADDED
    inside = None if FULL else c_valid[:, None] & ((place % PADDED < GROUP) & (j < size))[None, :]
    tl.store(block_ptr + (c[:, None] * size + j[None, :]), tl.reshape(product, [TILE_C, TILE_C]), mask=inside)


@jit
def _nm_mask_bwd_kernel(
    grad_ptr, weight_ptr, scale_ptr, row_ptr, column_ptr, index_ptr, partial_ptr,
    first, size, rows, steps, offset, total, grad_row_stride, grad_channel_stride, row_stride, channel_stride,
    GROUP: tl.constexpr, PADDED: tl.constexpr, POWER: tl.constexpr, STATISTICS: tl.constexpr,
    GROUP_SCALE: tl.constexpr, FLOOR: tl.constexpr, EXACT: tl.constexpr, LONG: tl.constexpr, INTERPRETED: tl.constexpr,
    WHOLE: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr, ROWS_STEP: tl.constexpr, VECTOR: tl.constexpr,
    TILE_C: tl.constexpr, TILE_O: tl.constexpr,
):  # fmt: skip
    # The launcher divided these by ALIGN: so the compiler knows the products to be multiples of it, and loads are wide.
    first, size, rows, offset, total = first * ALIGN, size * ALIGN, rows * ALIGN, offset * ALIGN, total * ALIGN
    grad_channel_stride, channel_stride = grad_channel_stride * ALIGN, channel_stride * ALIGN
    block, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(size // GROUP * PADDED, TILE_C)
    start = first + block * size
    # Slot-major: the slots of a group are far apart, so that one thread holds all of them.
    place = tl.arange(0, TILE_C)
    slot, g = place // (TILE_C // PADDED), place % (TILE_C // PADDED) + (tl.program_id(2) % tiles) * (TILE_C // PADDED)
    j = g * GROUP + slot
    j_valid = (slot < GROUP) & (j < size)
    j_channel = tl.load(index_ptr + start + j, mask=j_valid, other=0)
    c = (j_channel - start).to(tl.int32)
    if not LONG:
        j_channel = j_channel.to(tl.int32)
    j_scale, j_column = _factors(scale_ptr, column_ptr, j_channel, j_valid, STATISTICS)
    c_channel, c_valid = j_channel, j_valid
    if not WHOLE:
        c = (tl.program_id(2) // tiles) * TILE_C + tl.arange(0, TILE_C)
        c_valid = c < size
        c_channel = start.to(j_channel.dtype) + c
        c_scale, c_column = _factors(scale_ptr, column_ptr, c_channel, c_valid, STATISTICS)
    begin = tl.program_id(1) * steps * ROWS_STEP
    end = tl.minimum(begin + steps * ROWS_STEP, rows)
    product = tl.zeros([TILE_C, TILE_C], tl.float32)
    for o_start in range(begin, end, TILE_O):
        agreement, scores = _tile(
            grad_ptr, weight_ptr, row_ptr, j_channel, j_scale, j_column, j_valid, o_start, end,
            grad_row_stride, grad_channel_stride, row_stride, channel_stride, POWER, STATISTICS, FULL, VECTOR, TILE_O,
        )  # fmt: skip
        block_sum = tl.sum(tl.sum(tl.reshape(scores, [PADDED, TILE_C // PADDED, TILE_O]), 0), 0)
        if GROUP_SCALE and not WHOLE:
            block_sum = _sum_of_block(
                grad_ptr, weight_ptr, scale_ptr, row_ptr, column_ptr, start.to(j_channel.dtype), size, o_start, end,
                grad_row_stride, grad_channel_stride, row_stride, channel_stride, POWER, STATISTICS, VECTOR, TILE_C,
                TILE_O,
            )  # fmt: skip
        soft, grad_scores = _softmax_of_groups(
            agreement, scores, block_sum * (1.0 / size), GROUP, PADDED, GROUP_SCALE, FLOOR, TILE_C, TILE_O
        )
        if not WHOLE:
            agreement, scores = _tile(
                grad_ptr, weight_ptr, row_ptr, c_channel, c_scale, c_column, c_valid, o_start, end,
                grad_row_stride, grad_channel_stride, row_stride, channel_stride, POWER, STATISTICS, False, VECTOR,
                TILE_O,
            )  # fmt: skip
        # One product for both terms: its inner dimension alternates between them.
        left, right = tl.join(soft, grad_scores), tl.join(agreement, scores)
        product = _add_product(product, left, right, EXACT, INTERPRETED, TILE_C, 2 * TILE_O)
    block_ptr = partial_ptr + split * total + offset + block * size * size
    _store(block_ptr, product, c, c_valid, tl.program_id(2) % tiles, size, GROUP, PADDED, FULL, TILE_C)


def nm_mask_backward_triton(
    grad: Tensor,
    weight: Tensor,
    factors: ImportanceFactors,
    index: Tensor,
    blocks: Sequence[int],
    group: int,
    group_scale: bool,
) -> Tensor:
    total, rows = sum(size * size for size in blocks), weight.shape[0]
    config = config_for("nm_mask_backward", CONFIGS, (rows, weight.shape[1], max(blocks)), weight.dtype)
    aligned = grad.stride(0) == weight.stride(0) == 1 and not any(
        number % ALIGN for number in (rows, grad.stride(1), weight.stride(1), *blocks)
    )
    launches = [(run, *_launch(config, run[1], group, aligned, weight)) for run in equal_blocks(blocks, sum(blocks))]
    options = {
        "POWER": factors.power, "STATISTICS": factors.row is not None, "GROUP_SCALE": group_scale, "FLOOR": FLOOR,
        "EXACT": weight.dtype == torch.float32 or not group_scale, "LONG": any(map(_is_long, (grad, weight))),
        "INTERPRETED": triton.knobs.runtime.interpret,
    }  # fmt: skip
    programs = sum(count * tiles for (_, _, count, _), _, tiles in launches)
    splits = max(min(config.constants["PROGRAMS"] // programs, triton.cdiv(rows, LEAST_ROWS)), 1)
    steps = triton.cdiv(triton.cdiv(rows, splits), ROWS_STEP)
    splits = triton.cdiv(rows, steps * ROWS_STEP)
    partial = torch.empty((splits, total), dtype=torch.float32, device=weight.device)
    tensors = (grad, weight, *factors.contiguous(), index.contiguous(), partial)
    for (first, size, count, offset), launch, tiles in launches:
        align = launch.constants["ALIGN"]
        _nm_mask_bwd_kernel[(count, splits, tiles)](
            *tensors, first // align, size // align, rows // align, steps, offset // align, total // align,
            grad.stride(0), grad.stride(1) // align, weight.stride(0), weight.stride(1) // align,
            **options, **launch.arguments(),
        )  # fmt: skip
    return partial.sum(0) if splits > 1 else partial[0]


def equal_blocks(blocks: Sequence[int], most: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (first channel, block size, number of blocks, first entry of their matrices) of runs of same-size blocks.

    A run has at most ``most`` channels; a block with more channels is a run of its own.
    """
    first = offset = 0
    for size, run in groupby(blocks):
        left = len(list(run))
        while left:
            count = min(left, max(most // size, 1))
            yield first, size, count, offset
            first, offset, left = first + size * count, offset + size * size * count, left - count


def _is_long(matrix: Tensor) -> bool:
    """Whether the last element of ``matrix`` lies 2^31 or more elements after the first: offsets then take 64 bits."""
    return sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True)) >= 2**31


def _launch(config: Config, size: int, group: int, aligned: bool, weight: Tensor) -> tuple[Config, int]:
    """Returns (the configuration for blocks of one size, the number of tiles of one block's dP).

    With aligned rows, small tiles get half the warps, since their products would leave the others idle. Unaligned rows
    are read in narrow loads, which take more registers: a tile then has half the rows, and nothing is prefetched.
    """
    padded_group = triton.next_power_of_2(group)
    padded = size // group * padded_group
    whole = padded <= TILE
    tile_c = max(triton.next_power_of_2(padded), 16) if whole else TILE
    rows, warps, stages, vector = config.constants["TILE_O"], config.num_warps, config.num_stages, 1
    if not aligned:
        rows, stages = rows // 2, 1
    else:
        warps //= 2 if tile_c < TILE else 1
        rows //= 2 if not whole and weight.element_size() == 4 else 1
        # The widest loads that leave all slots of a group to one thread; loads of less than two rows would spill.
        vector = max(tile_c // padded_group * rows // (32 * warps), 2)
    constants = {
        "GROUP": group, "PADDED": padded_group, "WHOLE": whole, "ALIGN": ALIGN if aligned else 1,
        "FULL": aligned and size == tile_c and group == padded_group and weight.shape[0] % ROWS_STEP == 0,
        "ROWS_STEP": ROWS_STEP, "VECTOR": vector, "TILE_C": tile_c, "TILE_O": rows,
    }  # fmt: skip
    return Config(constants, warps, stages), 1 if whole else triton.cdiv(padded, TILE) ** 2
