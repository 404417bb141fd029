# mypy: allow-untyped-defs
"""The Triton kernel of the backward pass of `permtriton.kernels.nm_mask`, and its launcher.

A program accumulates a ``TILE_C x TILE_C`` tile of one block's dP over ``rows / splits`` rows of W, in float32, with
both sides in permuted order. The rows of W and dL/dW_eff that give ``A`` and ``S`` also give ``M_soft`` and ``dS_hat``,
so a block of up to 64 padded channels reads each of them once; larger blocks are cut into pairs of tiles and read
again. The rows of the result are brought to base order when they are stored.
Each split of the rows writes its own partial sums, which are added in a fixed order: the same input gives the same
bits. Partial sums take ``4 splits block`` bytes per channel; no temporary of W's size is made.
Products avoid TF32: each float32 operand is split into two bfloat16 halves, and three of the four products of halves
run on the tensor cores with float32 accumulation. The relative error is at most 2^-16 per product; TF32's is 2^-10.
Floor: 4 bytes per weight at 16 bits; 4 TILE_C floating-point operations per weight, three times that on the tensor
cores.

A group takes ``PADDED`` places of a tile, the next power of two; those beyond ``group`` hold zeros and are left out of
the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, product

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.builds import Build, builds_of, name_of
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.launch import Config, Kernel, jit, tl, triton
from permtriton.kernels.nm_mask_triton import contiguous, importance, refuse

# Padded channels of a tile; larger blocks are cut: tiles of 128 spill on sm_80 and overflow sm_100's tensor memory.
TILE = 64
LEAST_ROWS = 512  # of W per split
ROWS_STEP = 64  # the rows of a split are a multiple of it: the largest TILE_O
ALIGN = 16  # the largest tiles need rows, strides and block sizes that are multiples of it

# For tiles of 64 channels; `_launch` adapts rows and warps to other tiles.
CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 32, "PROGRAMS": 1024}, num_warps=8, num_stages=2),
    Config({"TILE_O": 32, "PROGRAMS": 512}, num_warps=8, num_stages=2),
    Config({"TILE_O": 32, "PROGRAMS": 2048}, num_warps=8, num_stages=2),
    Config({"TILE_O": 32, "PROGRAMS": 1024}, num_warps=8, num_stages=3),
    Config({"TILE_O": 32, "PROGRAMS": 1024}, num_warps=4, num_stages=2),
    Config({"TILE_O": 64, "PROGRAMS": 1024}, num_warps=8, num_stages=2),
)


@jit
def _tile(
    grad_ptr, weight_ptr, scale_ptr, row_ptr, column_ptr, channel, valid, o, end,
    grad_row_stride, grad_channel_stride, row_stride, channel_stride,
    POWER: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """(A, S) of a tile of channels and rows, float32 ``[channels, rows]``; zeros outside."""
    mask = valid[:, None] & (o < end)[None, :]
    places, lines = channel[:, None], o.to(tl.int64)[None, :]
    w = tl.load(weight_ptr + places * channel_stride + lines * row_stride, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad_ptr + places * grad_channel_stride + lines * grad_row_stride, mask=mask, other=0.0).to(tl.float32)
    row_factor, column_factor = 0.0, 0.0
    if STATISTICS:
        row_factor = tl.load(row_ptr + o, mask=o < end, other=0.0)[None, :]
        column_factor = tl.load(column_ptr + channel, mask=valid, other=0.0)[:, None]
    factor = tl.load(scale_ptr + channel, mask=valid, other=0.0)[:, None]
    return g * w, importance(w, factor, row_factor, column_factor, POWER, STATISTICS)


@jit
def _softmax_of_groups(
    agreement, scores, block_mean, GROUP: tl.constexpr, PADDED: tl.constexpr, GROUP_SCALE: tl.constexpr,
    FLOOR: tl.constexpr, TILE_C: tl.constexpr, TILE_O: tl.constexpr,
):  # fmt: skip
    """(M_soft, dS_hat) of a tile in permuted order, both ``[TILE_C, TILE_O]``."""
    grouped = tl.reshape(scores, [TILE_C // PADDED, PADDED, TILE_O])
    if GROUP_SCALE:
        floor = (block_mean * FLOOR)[None, :]
        mean = tl.maximum(tl.sum(grouped, 1) / GROUP, floor)
        sharpness = tl.where(floor > 0, 1.0 / tl.where(floor > 0, mean, 1.0), 0.0)[:, None, :]
        grouped = grouped * sharpness
    if PADDED != GROUP:
        real = (tl.arange(0, PADDED) < GROUP)[None, :, None]
        grouped = tl.where(real, grouped, float("-inf"))
    weights = tl.exp(grouped - tl.max(grouped, 1)[:, None, :])
    soft = weights / tl.sum(weights, 1)[:, None, :]
    grad_scores = tl.reshape(agreement, [TILE_C // PADDED, PADDED, TILE_O]) * soft
    grad_scores -= soft * tl.sum(grad_scores, 1)[:, None, :]
    if GROUP_SCALE:
        grad_scores *= sharpness
    return tl.reshape(soft, [TILE_C, TILE_O]), tl.reshape(grad_scores, [TILE_C, TILE_O])


@jit
def _add_product(product, left, right, INTERPRETED: tl.constexpr):
    """product + left right^T, of float32 tiles."""
    left_high, right_high = left.to(tl.bfloat16), right.to(tl.bfloat16)
    left_low = (left - left_high.to(tl.float32)).to(tl.bfloat16)
    right_low = (right - right_high.to(tl.float32)).to(tl.bfloat16)
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as integers
        left_high, left_low = left_high.to(tl.float32), left_low.to(tl.float32)
        right_high, right_low = right_high.to(tl.float32), right_low.to(tl.float32)
    product = tl.dot(left_low, tl.trans(right_high), product)
    product = tl.dot(left_high, tl.trans(right_low), product)
    return tl.dot(left_high, tl.trans(right_high), product)


@Kernel
def _nm_mask_bwd_kernel(
    grad_ptr, weight_ptr, scale_ptr, row_ptr, column_ptr, index_ptr, partial_ptr,
    first, size, rows, steps, offset, total,
    grad_row_stride, grad_channel_stride, row_stride, channel_stride,
    GROUP: tl.constexpr, PADDED: tl.constexpr, POWER: tl.constexpr, STATISTICS: tl.constexpr,
    GROUP_SCALE: tl.constexpr, FLOOR: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
    ALIGN: tl.constexpr, ROWS_STEP: tl.constexpr, TILE_C: tl.constexpr, TILE_O: tl.constexpr,
):  # fmt: skip
    # Known to be multiples of ALIGN, so that loads and stores are wide.
    first, size, rows, offset, total = first * ALIGN, size * ALIGN, rows * ALIGN, offset * ALIGN, total * ALIGN
    grad_channel_stride, channel_stride = grad_channel_stride * ALIGN, channel_stride * ALIGN
    block, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(size // GROUP * PADDED, TILE_C)
    start = first + block * size
    place = (tl.program_id(2) % tiles) * TILE_C + tl.arange(0, TILE_C)
    j = place // PADDED * GROUP + place % PADDED
    j_valid = (place % PADDED < GROUP) & (j < size)
    j_channel = tl.load(index_ptr + start + j, mask=j_valid, other=0).to(tl.int64)
    c, c_channel, c_valid = (j_channel - start).to(tl.int32), j_channel, j_valid
    if not WHOLE:
        c = (tl.program_id(2) // tiles) * TILE_C + tl.arange(0, TILE_C)
        c_valid = c < size
        c_channel = start + c
    begin = tl.program_id(1) * steps * ROWS_STEP
    end = tl.minimum(begin + steps * ROWS_STEP, rows)
    product = tl.zeros([TILE_C, TILE_C], tl.float32)
    for o_start in range(begin, end, TILE_O):
        o = o_start + tl.arange(0, TILE_O)
        agreement, scores = _tile(
            grad_ptr, weight_ptr, scale_ptr, row_ptr, column_ptr, j_channel, j_valid, o, end,
            grad_row_stride, grad_channel_stride, row_stride, channel_stride, POWER, STATISTICS,
        )  # fmt: skip
        block_mean = tl.sum(scores, 0)
        if GROUP_SCALE and not WHOLE:
            block_mean = tl.zeros([TILE_O], tl.float32)
            for other in range(0, size, TILE_C):
                others = start + other + tl.arange(0, TILE_C)
                _, more = _tile(
                    grad_ptr, weight_ptr, scale_ptr, row_ptr, column_ptr, others, others < start + size, o, end,
                    grad_row_stride, grad_channel_stride, row_stride, channel_stride, POWER, STATISTICS,
                )  # fmt: skip
                block_mean += tl.sum(more, 0)
        soft, grad_scores = _softmax_of_groups(
            agreement, scores, block_mean / size, GROUP, PADDED, GROUP_SCALE, FLOOR, TILE_C, TILE_O
        )
        if not WHOLE:
            agreement, scores = _tile(
                grad_ptr, weight_ptr, scale_ptr, row_ptr, column_ptr, c_channel, c_valid, o, end,
                grad_row_stride, grad_channel_stride, row_stride, channel_stride, POWER, STATISTICS,
            )  # fmt: skip
        product = _add_product(product, agreement, soft, INTERPRETED)
        product = _add_product(product, scores, grad_scores, INTERPRETED)
    block_ptr = partial_ptr + split * total + offset + block * size * size
    places = c[:, None] * size + j[None, :]
    tl.store(block_ptr + places, product, mask=c_valid[:, None] & j_valid[None, :])


def nm_mask_backward_triton(
    grad: Tensor,
    weight: Tensor,
    factors: ImportanceFactors,
    index: Tensor,
    blocks: Sequence[int],
    group: int,
    group_scale: bool,
    floor: float,
) -> Tensor:
    """Computes `nm_mask_backward_reference` with a Triton kernel: float32 ``[sum of sizes^2]``.

    Args:
        floor: Lower bound of a group's mean, as a fraction of its block's mean: FLOOR of the reference.

    Raises:
        ModelError: a dtype that `supports` refuses.
    """
    refuse(weight, factors.scale)
    total, rows = sum(size * size for size in blocks), weight.shape[0]
    if not total or not rows:
        return torch.zeros(total, device=weight.device)
    config = config_for("nm_mask_backward", CONFIGS, (rows, weight.shape[1], max(blocks)), weight.dtype)
    aligned = grad.stride(0) == weight.stride(0) == 1 and not any(
        number % ALIGN for number in (rows, grad.stride(1), weight.stride(1), *blocks)
    )
    runs = [(size, len(list(run)), *_launch(config, size, group, aligned)) for size, run in groupby(blocks)]
    programs = sum(count * tiles for _, count, _, tiles in runs)
    splits = max(min(config.constants["PROGRAMS"] // programs, triton.cdiv(rows, LEAST_ROWS)), 1)
    steps = triton.cdiv(triton.cdiv(rows, splits), ROWS_STEP)
    splits = triton.cdiv(rows, steps * ROWS_STEP)
    partial = torch.empty((splits, total), device=weight.device)
    tensors, first, offset = (grad, weight, *contiguous(factors), index.contiguous(), partial), 0, 0
    for size, count, launch, tiles in runs:
        align = launch.constants["ALIGN"]
        _nm_mask_bwd_kernel[(count, splits, tiles)](
            *tensors, first // align, size // align, rows // align, steps, offset // align, total // align,
            grad.stride(0), grad.stride(1) // align, weight.stride(0), weight.stride(1) // align,
            POWER=factors.power, STATISTICS=factors.row is not None, GROUP_SCALE=group_scale, FLOOR=floor,
            INTERPRETED=triton.knobs.runtime.interpret, **launch.arguments(),
        )  # fmt: skip
        first, offset = first + size * count, offset + size * size * count
    return partial.sum(0) if splits > 1 else partial[0]


def _launch(config: Config, size: int, group: int, aligned: bool) -> tuple[Config, int]:
    """Returns (the configuration for blocks of one size, the number of tiles of one block's dP).

    With aligned rows, small tiles get fewer warps, since the products would leave the others idle. Unaligned rows are
    read in narrow loads, which take more registers and are not prefetched.
    """
    padded_group = triton.next_power_of_2(group)
    padded = size // group * padded_group
    whole = padded <= TILE
    tile_c = max(triton.next_power_of_2(padded), 16) if whole else TILE
    rows, warps, stages = config.constants["TILE_O"], config.num_warps, config.num_stages
    if not aligned:
        rows, stages = rows // 2, 1
    elif tile_c < TILE:
        warps //= 2
    constants = {
        "GROUP": group, "PADDED": padded_group, "WHOLE": whole, "ALIGN": ALIGN if aligned else 1,
        "ROWS_STEP": ROWS_STEP, "TILE_C": tile_c, "TILE_O": rows,
    }  # fmt: skip
    return Config(constants, warps, stages), 1 if whole else triton.cdiv(padded, TILE) ** 2


def builds() -> Iterator[Build]:
    """Yields the kernel in every configuration and tile at 2:4; at 8:16 too where registers are short."""

    def backward(dtype: torch.dtype, size: int, group: int, layout: str) -> object:
        channels, rows = 4 * size, 4097 if layout == "any length" else 4096
        weight = torch.empty(channels, rows, dtype=dtype).t()
        if layout == "any strides":
            weight = torch.empty(2 * rows, 3 * channels, dtype=dtype)[::2, ::3]
        factors = ImportanceFactors(1, torch.empty(channels), torch.empty(rows), torch.empty(channels))
        index = torch.empty(channels, dtype=torch.int64)
        return nm_mask_backward_triton(weight, weight, factors, index, [size] * 4, group, True, 0.1)

    shapes = [(size, 4, "aligned") for size in (16, 32, 64, 128)] + [(size, 16, "aligned") for size in (64, 128)]
    shapes += [(size, 4, layout) for size in (16, 32, 64, 128) for layout in ("any length", "any strides")]
    for dtype, (size, group, layout) in product((torch.bfloat16, torch.float32), shapes):
        about = f"{name_of(dtype)} blocks of {size} in groups of {group}, {layout}"
        yield from builds_of(about, partial(backward, dtype, size, group, layout), "nm_mask_backward", CONFIGS)
