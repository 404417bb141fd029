# mypy: allow-untyped-defs
"""N:M masked weight under a permutation inside blocks, and the gradient of the permutation (eq. 8-10 of the paper).

With weight ``W [O, C]`` in base order, importance ``S = |W|^power * scale_C * (row_O + column_C)`` (the last factor
only if given), a permutation ``P`` that moves channels inside blocks, and its ``index [C]``:

    M     = top ``kept`` of every ``group`` consecutive channels of S P,   of equal scores the first
    W_eff = W * (M P^T)                                                    the mask brought back to base order

so that activations never move while learning. The backward pass is straight-through in the mask and the assignment.
With ``A = dL/dW_eff * W`` and ``M_soft`` the softmax of ``S P`` over each group, for each block of channels:

    dP = A^T M_soft + S^T dS_hat,      dS_hat = softmax_backward(A P)

These are ``[B, O] x [O, B]`` products: no ``C x C`` matrix exists, and ``W`` itself receives no gradient. ``blocks``
are the sizes of the blocks in channel order; ``dP`` holds the blocks' matrices one after another, flat
``[sum of sizes^2]``. The fast case is a weight whose input dimension has the larger stride (``W.t()`` contiguous):
whole rows of ``W.t()`` are gathered.
Bytes moved: forward W read, W_eff written; backward dW_eff and W read. On a GPU a Triton kernel masks weights of 16 and
32 bits in groups of up to four. Masks of other weights and the gradient are computed in plain torch, one tile of blocks
at a time: by default the step ``learned`` takes the gradient of `permtriton.kernels.placement_gradient`, which has a
kernel of its own.

A program of the forward pass holds ``TILE_O`` rows of W times ``TILE_GROUPS`` groups of the permuted order, with one
tensor per slot of a group, so that scores are compared tensor by tensor and no data crosses threads. A comparison is
the sign bit of a difference, and one instruction combines three sign bits into whether a slot is kept. Each channel of
a group is written to the place that it was read from, so that W is read once, W_eff is written once, and no inverse of
``index`` is needed. If channels are rows in memory (``weight.stride(0) == 1``), a channel's tile is one run of
``2 TILE_O`` bytes at 16 bits; for other strides, tiles have fewer rows and more groups and are transposed in registers.
Floor: 4 bytes per weight at 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.launch import DTYPES, Config, jit, tl, triton
from permtriton.kernels.operator import operator
from permtriton.util.permutation import inverse
from permtriton.util.sparsity import NMPattern

MOST_SLOTS = 4  # channels of a group, whose slots a program compares tensor by tensor

CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 1024, "TILE_GROUPS": 1}, num_warps=4, num_stages=1),
    Config({"TILE_O": 512, "TILE_GROUPS": 1}, num_warps=4, num_stages=1),
    Config({"TILE_O": 512, "TILE_GROUPS": 1}, num_warps=2, num_stages=1),
    Config({"TILE_O": 2048, "TILE_GROUPS": 1}, num_warps=8, num_stages=1),
)
ROW_MAJOR = Config({"TILE_O": 32, "TILE_GROUPS": 16}, num_warps=4, num_stages=1)  # if weight.stride(0) is not 1


def top_n_mask(scores_CO: Tensor, pattern: NMPattern) -> Tensor:
    """Returns bool ``[C, O]``: in each column, the ``kept`` largest scores of every ``group`` consecutive rows.

    Of equal scores, the first ones are kept.
    """
    return (group_ranks(scores_CO, pattern.group) < pattern.kept).flatten(0, 1)


def group_ranks(scores_CO: Tensor, group: int) -> Tensor:
    """Returns int8 ``[C / group, group, O]``: the rank of each row in its group, 0 for the largest.

    Of equal scores, the first ranks first. Counting ranks by comparing pairs is faster than sorting many tiny groups.
    """
    scores = scores_CO.unflatten(0, (-1, group))
    rank = torch.arange(group - 1, -1, -1, dtype=torch.int8, device=scores.device)
    rank = rank.view(1, group, 1).repeat(scores.shape[0], 1, scores.shape[2])
    for i in range(group):
        for j in range(i + 1, group):
            wins = (scores[:, i] >= scores[:, j]).view(torch.int8)
            rank[:, i] -= wins
            rank[:, j] += wins
    return rank


def nm_mask_reference(
    weight: Tensor, importance: ImportanceFactors, index: Tensor, blocks: Sequence[int], pattern: NMPattern
) -> Tensor:
    """The masked weight in plain torch, one tile of blocks at a time."""
    weight_CO = weight.t()
    masked = torch.empty_like(weight_CO, memory_format=torch.contiguous_format)
    for start, size, count, _ in equal_blocks(blocks, _most_channels(weight_CO)):
        tile = slice(start, start + size * count)
        inside = index[tile] - start
        scores = importance.of_channels(tile).scores(weight_CO[tile])
        mask = top_n_mask(scores.index_select(0, inside), pattern)
        torch.mul(weight_CO[tile], mask.index_select(0, inverse(inside)), out=masked[tile])
        masked[tile].add_(0.0)  # a negative weight times 0 is -0.0
    return masked.t()


def nm_mask_backward(
    grad: Tensor,
    weight: Tensor,
    importance: ImportanceFactors,
    index: Tensor,
    blocks: Sequence[int],
    group: int,
) -> Tensor:
    """Returns dP, flat ``[sum of sizes^2]``, in the dtype of ``importance.scale``.

    dP is the gradient of a softmax over whole groups, so that it does not depend on how many weights a group keeps. It
    is linear in ``grad``, which is dL/dW_eff, ``[O, C]``. ``group`` is that of the pattern; the other arguments are as
    `nm_mask` takes them. One tile of blocks is computed at a time.
    """
    grad_CO, weight_CO = grad.t(), weight.t()
    products = []
    for start, size, count, _ in equal_blocks(blocks, _most_channels(weight_CO)):
        tile = slice(start, start + size * count)
        inside = index[tile] - start
        agreement = grad_CO[tile].to(importance.scale.dtype) * weight_CO[tile]  # A
        scores = importance.of_channels(tile).scores(weight_CO[tile])
        grouped = scores.index_select(0, inside).unflatten(0, (-1, group))
        soft = grouped.softmax(1)
        grad_scores = agreement.index_select(0, inside).unflatten(0, (-1, group)).mul_(soft)
        grad_scores.addcmul_(soft, grad_scores.sum(1, keepdim=True), value=-1)
        shape = (count, size, -1)
        product = torch.bmm(agreement.view(shape), soft.view(shape).mT)
        products.append(product.baddbmm_(scores.view(shape), grad_scores.view(shape).mT).reshape(-1))
    return torch.cat(products)


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


TILE = 1 << 19  # weights per tile on a CPU: temporaries stay in the cache, five times faster than whole weights
GPU_TILE = 1 << 24  # weights per tile on a GPU: temporaries take some 64 MiB each


def _most_channels(weight_CO: Tensor) -> int:
    return (TILE if weight_CO.device.type == "cpu" else GPU_TILE) // max(weight_CO.shape[1], 1)


@jit
def _importance(weight, scale, row, column, POWER: tl.constexpr, STATISTICS: tl.constexpr):
    """|W|^power * (row + column) * scale, rounded after each step as in the reference, so that the same scores tie."""
    scores = tl.abs(weight)
    if POWER == 2:
        scores = scores * scores
    if STATISTICS:
        scores = scores * (row + column)
    return tl.fma(scores, scale, 0.0)  # keeps the compiler from fusing the product into a later difference of scores


@jit
def _kept(scores, k: tl.constexpr, KEPT: tl.constexpr, GROUP: tl.constexpr):
    """int32 whose sign bit says whether slot k of a group of up to four is kept.

    A slot is kept if it wins at least ``GROUP - KEPT`` of its comparisons. A comparison is the sign bit of a
    difference: one instruction combines three sign bits; predicates would have to be moved to registers first.
    """
    one, every, two = 0, -1, 0
    for other in tl.static_range(GROUP):
        if other != k:
            if other < k:  # k wins if its score is larger
                wins = (scores[other] - scores[k]).to(tl.int32, bitcast=True)
            else:  # k also wins a tie
                wins = ~(scores[k] - scores[other]).to(tl.int32, bitcast=True)
            two = two | (one & wins)
            one = one | wins
            every = every & wins
    if GROUP - KEPT == 1:
        return one
    if GROUP - KEPT == 2 and GROUP == 4:
        return two
    return every


@jit
def _nm_mask_fwd_kernel(
    weight_ptr, scale_ptr, row_ptr, column_ptr, index_ptr, masked_ptr,
    rows, groups, row_stride, channel_stride, masked_channel_stride,
    KEPT: tl.constexpr, GROUP: tl.constexpr, POWER: tl.constexpr, STATISTICS: tl.constexpr,
    TILE_O: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    g = (tl.program_id(0) * TILE_GROUPS + tl.arange(0, TILE_GROUPS))[None, :]
    o = (tl.program_id(1) * TILE_O + tl.arange(0, TILE_O))[:, None]
    inside = (o < rows) & (g < groups)
    o_long = o.to(tl.int64)
    row_factor = 0.0
    if STATISTICS:
        row_factor = tl.load(row_ptr + o, mask=o < rows, other=0.0)
    weights, scores = (), ()
    for k in tl.static_range(GROUP):
        channel = tl.load(index_ptr + g * GROUP + k, mask=g < groups, other=0).to(tl.int64)
        value = tl.load(weight_ptr + o_long * row_stride + channel * channel_stride, mask=inside)
        column_factor = 0.0
        if STATISTICS:
            column_factor = tl.load(column_ptr + channel)
        value = value.to(tl.float32) + 0.0  # -0.0 becomes 0.0
        score = _importance(value, tl.load(scale_ptr + channel), row_factor, column_factor, POWER, STATISTICS)
        weights, scores = weights + (value,), scores + (score,)  # type: ignore[assignment]  # noqa: RUF005
    for k in tl.static_range(GROUP):
        kept = _kept(scores, k, KEPT, GROUP) >> 31
        result = (weights[k].to(tl.int32, bitcast=True) & kept).to(tl.float32, bitcast=True)
        channel = tl.load(index_ptr + g * GROUP + k, mask=g < groups, other=0).to(tl.int64)
        tl.store(
            masked_ptr + channel * masked_channel_stride + o_long, result.to(masked_ptr.dtype.element_ty), mask=inside
        )


def nm_mask_triton(
    weight: Tensor, factors: ImportanceFactors, index: Tensor, blocks: Sequence[int], pattern: NMPattern
) -> Tensor:
    """Computes `nm_mask_reference`, for finite scores bit for bit, of dtypes that `supports` accepts.

    Groups have up to `MOST_SLOTS` channels.
    """
    rows, channels = weight.shape
    masked = torch.empty((channels, rows), dtype=weight.dtype, device=weight.device)
    tensors = (weight, *factors.contiguous(), index.contiguous(), masked)
    kept, group = pattern.kept, pattern.group
    options = {"KEPT": kept, "GROUP": group, "POWER": factors.power, "STATISTICS": factors.row is not None}
    config = ROW_MAJOR
    if weight.stride(0) == 1:
        config = config_for("nm_mask", CONFIGS, (rows, channels, kept, group), weight.dtype)
    groups, tile_o, tile_groups = channels // group, config.constants["TILE_O"], config.constants["TILE_GROUPS"]
    grid = (triton.cdiv(groups, tile_groups), triton.cdiv(rows, tile_o))
    _nm_mask_fwd_kernel[grid](*tensors, rows, groups, *weight.stride(), rows, **config.arguments(), **options)
    return masked.t()


def supports(weight: Tensor, scale: Tensor) -> bool:
    """Whether the kernels support the dtypes: bfloat16, float16 or float32 weights with a float32 ``scale``."""
    return weight.dtype in DTYPES and scale.dtype == torch.float32


@operator(
    lambda weight, *_: weight.new_empty(weight.shape[::-1]).t(),
    launcher=nm_mask_triton,
    supports=lambda weight, importance, index, blocks, pattern: (
        supports(weight, importance.scale) and pattern.group <= MOST_SLOTS
    ),
)
def nm_mask(
    weight: Tensor, importance: ImportanceFactors, index: Tensor, blocks: Sequence[int], pattern: NMPattern
) -> Tensor:
    """Returns the masked weight ``[O, C]`` in base order; not differentiable.

    Args:
        weight: ``[O, C]``, any strides.
        importance: Factors of the weight's scores.
        index: int64 ``[C]``, a permutation inside the blocks.
        blocks: Sizes of the blocks in channel order; multiples of the group that sum to C.
        pattern: N:M pattern of the mask.
    """
    return nm_mask_reference(weight, importance, index, blocks, pattern)
