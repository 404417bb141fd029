# mypy: allow-untyped-defs
"""How the loss changes as a channel takes a position of its block: the gradient of a block permutation.

A linear's weight ``W [O, C]`` is pruned to N:M in the present order, whose permutation ``P`` moves channels inside
blocks. With the terms that `permtriton.kernels.swap_gains` defines for every position of that order,

    dP[c, s] = D[c, s] = sum_o [S_oc > t_os] (A_oc - a_os)

is how the loss changes as base channel c takes position s of the same block and the weight is pruned again: to first
order, plus the second-order rise of the loss from every weight that is pruned or restored. dP is linear in gradient and
curvature together: if both are sums of parts, dP is the sum of the dP of each part of the gradient with its curvature.

``blocks`` are the sizes of the blocks in channel order; the result holds the blocks' matrices one after another, flat
``[sum of sizes^2]``, channels in base order by positions.
Bytes moved: W and dL/dW_eff read, the terms (16 bytes per weight) written and read, 4 bytes per pair written.
Floor: B comparisons per weight for blocks of B, each with a difference and a multiply-add.

A program of the Triton kernel, one warp, holds the sums of a tile of one block's pairs in registers and goes over a
part of the rows, one at a time, as that of `swap_gains` does. The parts' sums are added in a fixed order. The terms are
computed in torch. In the reference the rival wins a tie of scores; in the kernel's terms ties are decided as in a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.launch import Config, jit, tl, triton
from permtriton.kernels.nm_mask import equal_blocks, group_ranks, supports
from permtriton.kernels.operator import operator
from permtriton.kernels.swap_gains import (
    ALIGN,
    RankOneCurvature,
    SwapTerms,
    _added,
    for_each,
    row_major,
    swap_terms,
    weight_terms,
)
from permtriton.util.sparsity import NMPattern

AT_ONCE, GPU_AT_ONCE = 1 << 17, 1 << 24  # weights whose terms are in memory at once; on a CPU they fit a core's cache
COMPARED, ROWS_AT_ONCE = 1 << 17, 512  # most comparisons, and most rows of W, that the reference computes at once
LEAST_ROWS = 128  # at most one split of the rows of W per this many of them
CONFIGS: tuple[Config, ...] = (
    Config({"TILE_I": 32, "TILE_J": 64, "STAGES": 3, "PROGRAMS": 4224}, num_warps=1, num_stages=1),
    Config({"TILE_I": 64, "TILE_J": 64, "STAGES": 3, "PROGRAMS": 2112}, num_warps=1, num_stages=1),
    Config({"TILE_I": 32, "TILE_J": 32, "STAGES": 3, "PROGRAMS": 8448}, num_warps=1, num_stages=1),
)


def placement_gradient_reference(
    grad: Tensor,
    weight: Tensor,
    importance: ImportanceFactors,
    index: Tensor,
    blocks: Sequence[int],
    pattern: NMPattern,
    curvature: RankOneCurvature,
) -> Tensor:
    """Returns dP, flat ``[sum of sizes^2]``: float32, or float64 for float64 weights.

    ``grad`` (dL/dW_eff) and ``weight`` are ``[O, C]`` in base order; ``index``, int64 ``[C]``, is the present order,
    which moves channels inside ``blocks``, whose sizes are multiples of the group. If ``grad`` is multiplied by a loss
    scale, ``curvature`` must be, too.
    """
    on_cpu = weight.device.type == "cpu"
    dtype = torch.promote_types(weight.dtype, torch.float32)
    result = torch.empty(sum(size * size for size in blocks), dtype=dtype, device=weight.device)
    tiles = list(equal_blocks(blocks, (AT_ONCE if on_cpu else GPU_AT_ONCE) // max(weight.shape[0], 1)))

    def fill(tile: tuple[int, int, int, int]) -> None:
        start, size, count, offset = tile
        chosen = index[start : start + size * count]
        scores, agreement, rise = weight_terms(weight, importance, grad, chosen, curvature)
        matrices = result[offset : offset + size * size * count].view(count, size, size)
        inside = (chosen - start).view(count, size) % size
        for matrix, channels, terms in zip(
            matrices, inside, _by_block(scores, agreement, rise, count, pattern), strict=True
        ):
            matrix.index_copy_(0, channels, _placed(*terms))

    for_each(tiles, fill, on_cpu)
    return result


def _by_block(
    scores: Tensor, agreement: Tensor, rise: Tensor, blocks: int, pattern: NMPattern
) -> Iterator[tuple[Tensor, ...]]:
    """Yields the arguments of `_placed` for each block, from terms of the channel at each position, ``[C, O]``.

    A group has only two thresholds per row: one for the positions whose weight is kept, and one for the others. So one
    comparison serves several positions, and products with the masks add up the results.

    Yields:
        Scores and agreement ``[B, O]``, thresholds and displaced agreement ``[2 groups, O]``, and the masks of the
        positions that each threshold is for, ``[2 groups, group, O]``.
    """
    rank = group_ranks(scores, pattern.group)
    masks = (rank >= pattern.kept).to(scores.dtype), (rank < pattern.kept).to(scores.dtype)
    agreement.addcmul_(rise, masks[0].sub(masks[1]).flatten(0, 1))
    rivals = [(rank == place).to(scores.dtype) for place in (pattern.kept - 1, pattern.kept)]
    grouped = [part.unflatten(0, (-1, pattern.group)) for part in (scores, agreement)]
    thresholds, displaced = ([(part * rival).sum(1) for rival in rivals] for part in grouped)
    for block in zip(
        *(part.chunk(blocks) for part in (scores, agreement, *thresholds, *displaced, *masks)), strict=True
    ):
        yield *block[:2], *(torch.cat(block[first : first + 2]) for first in (2, 4, 6))


def _placed(scores: Tensor, agreement: Tensor, threshold: Tensor, displaced: Tensor, masks: Tensor) -> Tensor:
    """Returns D of one block ``[positions, positions]``."""
    (size, rows), both = scores.shape, threshold.shape[0]
    step = -(-rows // max(-(-rows // ROWS_AT_ONCE), 1))  # equal parts, since a shorter one takes as long
    channels = min(max(COMPARED // max(both * step, 1), 1), size)
    totals = [masks.new_zeros(*masks.shape[:2], part.shape[0]) for part in scores.split(channels)]
    for start in range(0, rows, max(step, 1)):
        there = slice(start, start + step)
        limit, other, mask = (part[..., there] for part in (threshold, displaced, masks))
        parts = (part[:, None, there].split(channels) for part in (scores, agreement))
        for total, score, added in zip(totals, *parts, strict=True):
            taken = limit.new_empty(score.shape[0], *limit.shape)
            torch.gt(score, limit, out=taken)
            torch.lerp(other.expand_as(taken), added.expand_as(taken), taken, out=taken)
            total.baddbmm_(mask, taken.permute(1, 2, 0))
    stayed = torch.bmm(masks, displaced.unsqueeze(2)) if rows else totals[0][..., :1]
    moved = torch.cat(totals, 2).sub_(stayed)
    return moved.unflatten(0, (2, -1)).sum(0).flatten(0, 1).t()


@jit
def _placement_gradient_kernel(
    scores_ptr, agreement_ptr, threshold_ptr, displaced_ptr, index_ptr, partial_ptr,
    rows, steps, size, row_stride, total,
    ALIGN: tl.constexpr, TILE_I: tl.constexpr, TILE_J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # The launcher divided these by ALIGN: the compiler knows the products to be multiples of it, and makes copies wide.
    size, row_stride, total = size * ALIGN, row_stride * ALIGN, total * ALIGN
    block, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(size, TILE_J)
    i = (tl.program_id(2) // tiles) * TILE_I + tl.arange(0, TILE_I)
    j = (tl.program_id(2) % tiles) * TILE_J + tl.arange(0, TILE_J)
    i_valid, j_valid = i < size, j < size
    start, begin = block * size, split * steps
    at_i, at_j = start + i + begin * row_stride, start + j + begin * row_stride
    moved = tl.zeros([TILE_I, TILE_J], tl.float32)
    for _ in tl.range(tl.minimum(steps, rows - begin), num_stages=STAGES):
        score = tl.load(scores_ptr + at_i, mask=i_valid, other=0.0)
        agreement = tl.load(agreement_ptr + at_i, mask=i_valid, other=0.0)
        threshold = tl.load(threshold_ptr + at_j, mask=j_valid, other=0.0)
        displaced = tl.load(displaced_ptr + at_j, mask=j_valid, other=0.0)
        moved = _added(moved, score[:, None], threshold[None, :], agreement[:, None], displaced[None, :])
        at_i += row_stride
        at_j += row_stride
    channel = tl.load(index_ptr + start + i, mask=i_valid, other=0) - start
    places = split * total + start * size + channel[:, None] * size + j[None, :]
    tl.store(partial_ptr + places, moved, mask=i_valid[:, None] & j_valid[None, :])


def placement_gradient_triton(
    grad: Tensor,
    weight: Tensor,
    importance: ImportanceFactors,
    index: Tensor,
    blocks: Sequence[int],
    pattern: NMPattern,
    curvature: RankOneCurvature,
) -> Tensor:
    parts = []
    for start, size, count, _ in equal_blocks(blocks, GPU_AT_ONCE // max(weight.shape[0], 1)):
        chosen = index[start : start + size * count]
        terms = swap_terms(weight, importance, grad, chosen, pattern, curvature)
        parts.append(launched(terms, chosen - start, size))
    return torch.cat(parts)


def launched(terms: SwapTerms, index: Tensor, size: int) -> Tensor:
    """Returns D of blocks of one ``size``, flat, from the terms of every position; lines of D are in base order."""
    channels, rows = terms.scores.shape
    total = channels * size
    config = config_for("placement_gradient", CONFIGS, (rows, channels, size), torch.float32).arguments()
    programs, blocks = config.pop("PROGRAMS"), channels // size
    tiles = triton.cdiv(size, config["TILE_I"]) * triton.cdiv(size, config["TILE_J"])
    splits = max(min(programs // (blocks * tiles), triton.cdiv(rows, LEAST_ROWS)), 1)
    steps = triton.cdiv(rows, splits)
    splits = triton.cdiv(rows, steps)
    partial = torch.empty((splits, total), dtype=torch.float32, device=index.device)
    by_row = row_major(terms.tensors()[:4])
    sizes = (size, by_row[0].stride(0), total)
    align = ALIGN if not any(number % ALIGN for number in sizes) else 1
    _placement_gradient_kernel[(blocks, splits, tiles)](
        *by_row, index.contiguous(), partial, rows, steps, *(number // align for number in sizes), ALIGN=align, **config
    )
    return partial.sum(0) if splits > 1 else partial[0]


placement_gradient = operator(
    lambda grad, weight, importance, index, blocks, *_: weight.new_empty(
        sum(size**2 for size in blocks), dtype=torch.promote_types(weight.dtype, torch.float32)
    ),
    launcher=placement_gradient_triton,
    supports=lambda grad, weight, importance, *_: supports(weight, importance.scale),
)(placement_gradient_reference)
