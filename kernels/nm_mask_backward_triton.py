# mypy: allow-untyped-defs
"""The Triton kernel of the backward pass of `permtriton.kernels.nm_mask`, and its launcher.

A program accumulates one block's dP over ``rows / splits`` rows of W, in float32, in a tile of ``TILE_C x TILE_C``.
``A`` and ``S`` are in permuted order, as are ``M_soft`` and ``dS_hat``, which are made from them, so that W and
dL/dW_eff are read once; the rows of dP are brought to base order when they are stored. Each split of the rows writes
its own partial sums, which are added in a fixed order: the same input gives the same bits. Partial sums take
``4 splits B`` bytes per channel of a block of B; no temporary of W's size is made, unless rows are not adjacent in
memory. `takes` says which sizes the kernel supports.

What keeps the instructions per weight few:

- The channels of a tile are in slot-major order: slot 0 of every group, then slot 1, and so on. The width of loads is
  limited, so that one thread holds all slots of its groups (of up to 4) and the softmax needs no data of other threads.
- Both terms of dP are one product, whose inner dimension alternates between them, ``[M_soft dS_hat] [A S]^T``: each
  operand's halves are written to shared memory once.
- 1 / x is the square of a reciprocal square root: two instructions in place of the eight of a division.

Precision: M_soft may be nearly flat, so each operand is split into two bfloat16 halves, and three of the four products
of halves are added: the relative error is at most 2^-16 per product; TF32's is 2^-10.
Floor: 4 bytes per weight at 16 bits; 12 TILE_C floating-point operations per weight.
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
LEAST_ROWS = 512  # at most one split of the rows of W per this many of them
ROWS_STEP = 64  # the rows of a split are a multiple of it: the largest TILE_O
ALIGN = 16  # wide loads need rows, strides and block sizes that are multiples of it

# For tiles of 64 channels; smaller ones get half the warps.
CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 32, "PROGRAMS": 792}, num_warps=4, num_stages=3),
    Config({"TILE_O": 32, "PROGRAMS": 396}, num_warps=4, num_stages=3),
    Config({"TILE_O": 32, "PROGRAMS": 1584}, num_warps=4, num_stages=3),
    Config({"TILE_O": 32, "PROGRAMS": 792}, num_warps=4, num_stages=4),
    Config({"TILE_O": 64, "PROGRAMS": 792}, num_warps=8, num_stages=3),
)


@jit
def _tile(
    grad_ptr, weight_ptr, row_ptr, channel, scale, column, valid, start, end, grad_channel_stride, channel_stride,
    POWER: tl.constexpr, STATISTICS: tl.constexpr, FULL: tl.constexpr, VECTOR: tl.constexpr, TILE_O: tl.constexpr,
):  # fmt: skip
    """(A, S) of a tile of channels and rows, float32 ``[channels, rows]``; zeros outside."""
    line, begin = tl.arange(0, TILE_O), tl.cast(start, tl.int64)
    mask = None if FULL else valid[:, None] & (start + line < end)[None, :]
    other = None if FULL else 0.0
    # The contiguous part is understated: wider loads would spread the slots of a group over threads.
    places = tl.max_contiguous(channel[:, None] * channel_stride + line[None, :], [1, VECTOR])
    w = tl.load(weight_ptr + begin + places, mask=mask, other=other).to(tl.float32)
    places = tl.max_contiguous(channel[:, None] * grad_channel_stride + line[None, :], [1, VECTOR])
    g = tl.load(grad_ptr + begin + places, mask=mask, other=other).to(tl.float32)
    factor = scale[:, None]
    if STATISTICS:
        row = tl.load(row_ptr + start + line, mask=None if FULL else start + line < end, other=other)[None, :]
        factor = row * factor + column[:, None]
    scores = tl.abs(w) * factor
    if POWER == 2:
        scores *= tl.abs(w)
    return g * w, scores


@jit
def _inverse(x):
    """1 / x of positive numbers that are not subnormal."""
    root = tl.rsqrt(x)
    return root * root


@jit
def _softmax_of_groups(agreement, scores, GROUP: tl.constexpr, TILE_C: tl.constexpr, TILE_O: tl.constexpr):
    """(M_soft, dS_hat) of a tile in permuted order, slot-major, both ``[TILE_C, TILE_O]``."""
    LOG2E: tl.constexpr = 1.4426950408889634
    grouped = tl.reshape(scores, [GROUP, TILE_C // GROUP, TILE_O])
    grads = tl.reshape(agreement, [GROUP, TILE_C // GROUP, TILE_O])
    weights = tl.exp2((grouped - tl.max(grouped, 0)[None, :, :]) * LOG2E)
    soft = weights * _inverse(tl.sum(weights, 0))[None, :, :]
    common = tl.sum(grads * soft, 0)
    grad_scores = soft * (grads - common[None, :, :])
    return tl.reshape(soft, [TILE_C, TILE_O]), tl.reshape(grad_scores, [TILE_C, TILE_O])


@builtin
def _opaque(x, _semantic=None):
    """The bfloat16 x, passed through empty inline assembly that counts as a side effect.

    Without the assembly Triton computes the operands of a product again, from the loads on, in the layout of the
    product: twice the instructions on sm_80 and sm_100. The assembly is left out on sm_100 before Triton 3.9, where
    loops cannot hold such assembly.
    """
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if int(_semantic.builder.options.arch.strip("sm_af")) >= 100 and version < (3, 9):
        return x
    return tl.inline_asm_elementwise("", "=r,0", [x], tl.bfloat16, False, 2, _semantic=_semantic)


@jit
def _rounded(x, INTERPRETED: tl.constexpr):
    """x in bfloat16, as an operand of a product."""
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as integers
        return x.to(tl.bfloat16).to(tl.float32)
    return _opaque(x.to(tl.bfloat16))


@jit
def _add_product(product, left, right, INTERPRETED: tl.constexpr, TILE_C: tl.constexpr, INNER: tl.constexpr):
    """product + left right^T, of float32 tiles that are flattened to ``[TILE_C, INNER]``."""
    left, right = tl.reshape(left, [TILE_C, INNER]), tl.reshape(right, [TILE_C, INNER])
    left_high, right_high = _rounded(left, INTERPRETED), _rounded(right, INTERPRETED)
    left_low = _rounded(left - left_high.to(tl.float32), INTERPRETED)
    right_low = _rounded(right - right_high.to(tl.float32), INTERPRETED)
    product = tl.dot(left_low, tl.trans(right_high), product)
    product = tl.dot(left_high, tl.trans(right_low), product)
    return tl.dot(left_high, tl.trans(right_high), product)


@jit
def _nm_mask_bwd_kernel(
    grad_ptr, weight_ptr, scale_ptr, row_ptr, column_ptr, index_ptr, partial_ptr,
    first, size, rows, steps, offset, total, grad_channel_stride, channel_stride,
    GROUP: tl.constexpr, POWER: tl.constexpr, STATISTICS: tl.constexpr, INTERPRETED: tl.constexpr, FULL: tl.constexpr,
    ALIGN: tl.constexpr, ROWS_STEP: tl.constexpr, VECTOR: tl.constexpr, TILE_C: tl.constexpr, TILE_O: tl.constexpr,
):  # fmt: skip
    # The launcher divided these by ALIGN: so the compiler knows the products to be multiples of it, and loads are wide.
    first, size, rows, offset, total = first * ALIGN, size * ALIGN, rows * ALIGN, offset * ALIGN, total * ALIGN
    grad_channel_stride, channel_stride = grad_channel_stride * ALIGN, channel_stride * ALIGN
    block, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    start = first + block * size
    # Slot-major: the slots of a group are far apart, so that one thread holds all of them.
    place = tl.arange(0, TILE_C)
    position = place % (TILE_C // GROUP) * GROUP + place // (TILE_C // GROUP)
    valid = position < size
    channel = tl.load(index_ptr + start + position, mask=valid, other=0)
    c = (channel - start).to(tl.int32)
    channel = channel.to(tl.int32)
    scale = tl.load(scale_ptr + channel, mask=valid, other=0.0)
    column = scale
    if STATISTICS:  # S = |W|^power (row * scale + column * scale)
        column *= tl.load(column_ptr + channel, mask=valid, other=0.0)
    begin = tl.program_id(1) * steps * ROWS_STEP
    end = tl.minimum(begin + steps * ROWS_STEP, rows)
    product = tl.zeros([TILE_C, TILE_C], tl.float32)
    for o_start in range(begin, end, TILE_O):
        agreement, scores = _tile(
            grad_ptr, weight_ptr, row_ptr, channel, scale, column, valid, o_start, end, grad_channel_stride,
            channel_stride, POWER, STATISTICS, FULL, VECTOR, TILE_O,
        )  # fmt: skip
        soft, grad_scores = _softmax_of_groups(agreement, scores, GROUP, TILE_C, TILE_O)
        # One product for both terms: its inner dimension alternates between them.
        left, right = tl.join(soft, grad_scores), tl.join(agreement, scores)
        product = _add_product(product, left, right, INTERPRETED, TILE_C, 2 * TILE_O)
    # The product is [position, c], slot-major; dP is [c, position], with c in base order.
    product = tl.permute(tl.reshape(product, [GROUP, TILE_C // GROUP, TILE_C]), (2, 1, 0))
    block_ptr = partial_ptr + split * total + offset + block * size * size
    inside = None if FULL else valid[:, None] & (place < size)[None, :]
    tl.store(block_ptr + (c[:, None] * size + place[None, :]), tl.reshape(product, [TILE_C, TILE_C]), mask=inside)


def takes(weight: Tensor, blocks: Sequence[int], group: int) -> bool:
    """Whether the kernel supports sizes: rows and blocks of multiples of 16, blocks up to 64, groups a power of two."""
    whole = not any(size % ALIGN for size in (weight.shape[0], *blocks))
    return whole and max(blocks) <= TILE and group == triton.next_power_of_2(group)


def nm_mask_backward_triton(
    grad: Tensor,
    weight: Tensor,
    factors: ImportanceFactors,
    index: Tensor,
    blocks: Sequence[int],
    group: int,
) -> Tensor:
    """Computes `nm_mask_backward_reference` of a float32 ``importance.scale`` and sizes that `takes` accepts."""
    grad, weight = _input_major(grad), _input_major(weight)
    total, rows = sum(size * size for size in blocks), weight.shape[0]
    config = config_for("nm_mask_backward", CONFIGS, (rows, weight.shape[1], max(blocks)), weight.dtype)
    splits = max(min(config.constants["PROGRAMS"] // len(blocks), triton.cdiv(rows, LEAST_ROWS)), 1)
    steps = triton.cdiv(triton.cdiv(rows, splits), ROWS_STEP)
    splits = triton.cdiv(rows, steps * ROWS_STEP)
    partial = torch.empty((splits, total), dtype=torch.float32, device=weight.device)
    tensors = (grad, weight, *factors.contiguous(), index.contiguous(), partial)
    options = {
        "GROUP": group, "POWER": factors.power, "STATISTICS": factors.row is not None,
        "INTERPRETED": triton.knobs.runtime.interpret, "ALIGN": ALIGN, "ROWS_STEP": ROWS_STEP,
        "num_stages": config.num_stages,
    }  # fmt: skip
    for first, size, count, offset in equal_blocks(blocks, sum(blocks)):
        tile_c, tile_o = triton.next_power_of_2(size), config.constants["TILE_O"]
        warps = config.num_warps if tile_c == TILE else config.num_warps // 2  # a small product leaves others idle
        # The widest loads that leave all slots of a group to one thread; loads of less than two rows would spill.
        vector = max(tile_c // group * tile_o // (32 * warps), 2)
        _nm_mask_bwd_kernel[(count, splits)](
            *tensors, first // ALIGN, size // ALIGN, rows // ALIGN, steps, offset // ALIGN, total // ALIGN,
            grad.stride(1) // ALIGN, weight.stride(1) // ALIGN, FULL=size == tile_c and rows % ROWS_STEP == 0,
            VECTOR=vector, TILE_C=tile_c, TILE_O=tile_o, num_warps=warps, **options,
        )  # fmt: skip
    return partial.sum(0) if splits > 1 else partial[0]


def _input_major(matrix: Tensor) -> Tensor:
    """Returns a matrix whose rows are adjacent in memory, as wide loads need them; copies it if they are not."""
    fits = matrix.stride(0) == 1 and matrix.stride(1) % ALIGN == 0
    return matrix if fits else matrix.t().contiguous().t()


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
