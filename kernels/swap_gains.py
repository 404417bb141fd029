# mypy: allow-untyped-defs
"""What swapping two channels of an N:M order gains, to first order, for many pairs of positions at once.

A linear's weight ``W [O, C]`` is pruned to N:M in the present order: position p holds base channel ``index[p]``, group
g is the positions gM to gM + M - 1, and of each group each row o keeps the ``kept`` largest scores S, of equal ones the
first. ``G = dL/dW_eff``, and ``A = G * W`` is the agreement of every weight, pruned ones included. The rival of
position j in row o is the weight with the ``kept``-th largest of the other scores of j's group: it is pruned if the
weight at j is kept, and kept otherwise. ``t_oj`` is the rival's score and ``a_oj`` its agreement. Then

    D[i, j]    = sum_o [S_oi > t_oj] (A_oi - a_oj)             how the loss changes as the channel at i takes position j
    gain[i, j] = D[i, i] + D[j, j] - D[i, j] - D[j, i]         for i and j in different groups

and a positive gain lowers the loss. A gain has no meaning for two positions of one group: leave these out.
Where position j precedes its rival, the threshold is the number next below the rival's score: ``>`` then decides ties
as the mask does. `swap_terms` makes S, A, t, a and D[j, j] in O(C O) steps; the pairs take O(C C O).

Terms have one line of O rows per position, ``[C, O]``. The reference is fastest if rows are adjacent in memory, the
Triton kernel if positions are, so `swap_terms` chooses the layout by device; both take any strides.
Bytes moved: 16 per position and row on either side, and 4 per pair.
Floor: per pair and row 2 comparisons, which write 1.0 or 0.0, 2 subtractions, and 2 multiply-adds of difference and
comparison; 3.6e13 comparisons for all pairs of all linears of LLaMA-2-7B.

A program of the Triton kernel, one warp, holds the sums of one tile of pairs in registers and goes over the rows, one
at a time. From either side it loads one vector per term, so positions should be adjacent in memory; the launcher copies
terms whose positions are not. Vectors are copied to shared memory two rows ahead. Each thread owns four columns of the
tile: it reads their terms once, and those of the lines as broadcasts, four at a time; a ``[rows, I, J]`` tensor never
exists. Multiplying by the comparison and adding is one instruction, and as exact as adding. A predicated addition is
also one instruction, but keeping the predicates of a row costs more than it saves. 8 programs fit on a multiprocessor,
1056 on an H200: a call should have 4 million pairs or more.

128 sums per thread fill the registers. Where sizes are not multiples of `ALIGN`, vectors are copied one number at a
time, and tiles are half as wide, because sums would be spilled otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.launch import Config, jit, tl, triton
from permtriton.kernels.nm_mask import group_ranks
from permtriton.kernels.operator import operator
from permtriton.util.sparsity import NMPattern

Tile = TypeVar("Tile")

ALIGN = 16  # positions and strides that are multiples of it are copied four numbers at a time
CONFIGS: tuple[Config, ...] = (
    Config({"TILE_I": 32, "TILE_J": 128, "STAGES": 3}, num_warps=1, num_stages=1),
    Config({"TILE_I": 32, "TILE_J": 64, "STAGES": 2}, num_warps=1, num_stages=1),
    Config({"TILE_I": 32, "TILE_J": 32, "STAGES": 2}, num_warps=1, num_stages=1),
)


@dataclass(frozen=True)
class RankOneCurvature:
    """The second-order rise of the loss when a weight w changes between w and 0: ``row_O * column_C * w^2``."""

    row: Tensor  # float32 ``[out_features]``
    column: Tensor  # float32 ``[in_features]``

    def to(self, device: torch.device) -> RankOneCurvature:
        return RankOneCurvature(self.row.to(device), self.column.to(device))


@dataclass(frozen=True)
class SwapTerms:
    """The terms of swap gains at some positions of one linear's order.

    All are float32, or float64 for float64 weights, and ``[positions, O]`` except for ``own``.
    """

    scores: Tensor  # S of the channel at the position
    agreement: Tensor  # A of the channel at the position
    threshold: Tensor  # t of the position: a weight is kept there if its score exceeds t
    displaced: Tensor  # a of the position: the agreement of its rival
    own: Tensor  # D[j, j], ``[positions]``

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())

    def of_positions(self, positions: slice | Tensor) -> SwapTerms:
        """Returns the terms of some positions: a slice, or int64 ``[positions]``."""
        return SwapTerms(*(_lines(part, positions) for part in self.tensors()))


def _lines(part: Tensor, positions: slice | Tensor) -> Tensor:
    """Returns some lines of a matrix, or entries of a vector; positions that are adjacent in memory stay so."""
    if part.dim() == 2 and part.stride(1) != 1 and not isinstance(positions, slice):
        return part.t()[:, positions].t()
    return part[positions]


def swap_terms(
    weight: Tensor,
    importance: ImportanceFactors,
    gradient: Tensor,
    index: Tensor,
    pattern: NMPattern,
    curvature: RankOneCurvature,
) -> SwapTerms:
    """Returns the terms of the positions that hold the channels ``index``.

    Gains are those to first order, less the second-order rise of the loss, by ``curvature``, from every weight that the
    swap prunes or restores. This rise is linear in whether the weight's channel is kept at the new position, so the
    same operator computes these gains from terms that include it.

    ``weight`` and ``gradient`` (dL/dW_eff, any float dtype) are ``[O, C]`` in base order, of any strides; ``index`` is
    int64, the present order or whole groups of it.
    """
    out_features, channels = weight.shape[0], len(index)
    fits = gradient.shape == weight.shape and channels % pattern.group == 0
    assert fits, f"a weight {weight.shape}, its gradient {gradient.shape}, an order {index.shape}, {pattern}"
    dtype = torch.promote_types(weight.dtype, torch.float32)
    on_cpu = weight.device.type == "cpu"
    shape = (channels, out_features) if on_cpu else (out_features, channels)
    made = [torch.empty(shape, dtype=dtype, device=weight.device) for _ in range(4)]
    parts = [*(made if on_cpu else (part.t() for part in made)), made[0].new_empty(channels)]
    groups = TILE // (pattern.group * max(out_features, 1)) if on_cpu else channels
    step = max(groups, 1) * pattern.group

    def fill(start: int) -> None:
        tile = slice(start, start + step)
        terms = _terms(*weight_terms(weight, importance, gradient, index[tile], curvature), pattern)
        for part, of_tile in zip(parts, terms.tensors(), strict=True):
            part[tile] = of_tile

    for_each(range(0, channels, step), fill, on_cpu)
    return SwapTerms(*parts)


def weight_terms(
    weight: Tensor, importance: ImportanceFactors, gradient: Tensor, chosen: Tensor, curvature: RankOneCurvature
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns scores, agreement, and second-order rise of some channels, ``[channels, O]``."""
    weight_CO, gradient_CO = _channels(weight, chosen), _channels(gradient, chosen)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    rise = weight_CO.to(dtype).square().mul_(curvature.column[chosen].unsqueeze(1)).mul_(curvature.row)
    return importance.of_channels(chosen).scores(weight_CO), gradient_CO.to(dtype).mul_(weight_CO), rise


def _channels(matrix: Tensor, chosen: Tensor) -> Tensor:
    """Returns columns of a matrix as ``[channels, O]``, read in the order of memory; contiguous on a CPU."""
    if matrix.stride(1) != 1:
        return matrix.t().index_select(0, chosen)
    lines = matrix.index_select(1, chosen).t()
    return lines.contiguous() if lines.device.type == "cpu" else lines


def _terms(scores: Tensor, agreement: Tensor, rise: Tensor, pattern: NMPattern) -> SwapTerms:
    """The terms of whole groups from their scores, agreement and second-order rise, ``[C, O]`` in the present order.

    The rival of a weight that the mask keeps is the largest one that it prunes; the rival of a pruned weight is the
    smallest one that it keeps.
    """
    group = pattern.group
    slots = torch.arange(group, device=scores.device).view(1, group, 1)
    rank = group_ranks(scores, group)
    kept = rank < pattern.kept
    order = torch.empty_like(rank, dtype=torch.int64).scatter_(1, rank.long(), slots.expand_as(rank))
    rival = order.gather(1, kept + (pattern.kept - 1))
    threshold = scores.unflatten(0, (-1, group)).gather(1, rival)
    displaced = agreement.unflatten(0, (-1, group)).gather(1, rival).flatten(0, 1)
    # Scores are at least 0. Below 0 comes -1: the next smaller float is subnormal, which some modes round to 0.
    lower = threshold.nextafter(threshold.new_tensor(-torch.inf)).sub_((threshold == 0).to(scores.dtype))
    threshold = threshold.lerp_(lower, (slots < rival).to(scores.dtype)).flatten(0, 1)
    kept_CO = kept.flatten(0, 1)
    own = (agreement - displaced).mul_(kept_CO).sum(1)
    rival_rise = rise.unflatten(0, (-1, group)).gather(1, rival).flatten(0, 1)
    own -= (rise + rival_rise).mul_(kept_CO).sum(1)
    sign = 1 - 2 * kept_CO.to(rise.dtype)
    agreement, displaced = agreement.addcmul(rise, sign), displaced.addcmul(rival_rise, sign, value=-1)
    return SwapTerms(scores, agreement, threshold, displaced, own)


TILE = 1 << 18  # entries of each of the right side's terms per CPU thread at once: 1 MiB, which stays in its cache
GPU_TILE = 1 << 24


def swap_gains_reference(left: SwapTerms, right: SwapTerms) -> Tensor:
    """Returns the gain of swapping each position of ``left`` with each of ``right``, positive if the loss falls.

    Gains of linears that share their input channels add up. A gain has no meaning for two positions of one group.

    With ``S_oi > t_oj`` as a float mask, every step is a vectorised operation on a tile, in place: torch's boolean
    comparison, `where` and `masked_fill` take several times as long. D of a pair (see the top of this file) is

        sum_o [S_oi > t_oj] (A_oi - a_oj) = sum_o lerp(a_oj, A_oi, mask_oij) - sum_o a_oj

    The result is ``[I, J]`` in the dtype of the terms. On a CPU, temporaries take some MiB per thread.
    """
    columns, rows = right.scores.shape
    on_cpu = right.scores.device.type == "cpu"
    step = max((TILE if on_cpu else GPU_TILE) // max(rows, 1), 1)
    gains = right.scores.new_empty(left.scores.shape[0], columns)

    def fill(start: int) -> None:
        there = slice(start, start + step)
        scores, agreement, threshold, displaced, own = (part[there].contiguous() for part in right.tensors())
        mask = torch.empty_like(scores)
        # D[i, j] and D[j, i], each plus a sum of a; ``kept`` has both sums, too
        moved = gains.new_empty(2, len(gains), len(scores))
        taking, giving = moved.unbind()
        for i in range(len(gains)):
            line = [part[i].contiguous() for part in left.tensors()[:4]]
            s, a, t, d = (part.expand_as(scores) for part in line)
            torch.gt(s, threshold, out=mask)
            torch.lerp(displaced, a, mask, out=mask)
            torch.sum(mask, 1, out=taking[i])
            torch.gt(scores, t, out=mask)
            torch.lerp(d, agreement, mask, out=mask)
            torch.sum(mask, 1, out=giving[i])
        kept = (left.own + left.displaced.sum(1)).unsqueeze(1) + (own + displaced.sum(1))
        torch.sub(kept, moved.sum(0), out=gains[:, there])

    for_each(range(0, columns, step), fill, on_cpu)
    return gains


def for_each(tiles: Sequence[Tile], run: Callable[[Tile], None], on_cpu: bool) -> None:
    """Calls ``run`` for each tile; on a CPU in a pool of threads, in each of which torch uses one thread.

    If torch's own threads shared each operation, they would wait for each other after every operation: on a busy
    machine, up to a hundred times as long as the work takes.
    """

    def alone(tile: Tile) -> None:
        with torch.inference_mode():  # the caller's mode does not hold in a new thread
            run(tile)

    threads = torch.get_num_threads()
    if not on_cpu or threads == 1:
        for tile in tiles:
            alone(tile)
        return
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(alone, tiles))
    finally:
        torch.set_num_threads(threads)  # else threads that start later would use one thread


@jit
def _added(total, score, threshold, agreement, displaced):
    """``total``, plus ``agreement - displaced`` where ``score`` exceeds ``threshold``."""
    return tl.fma((score > threshold).to(tl.float32), agreement - displaced, total)


@jit
def _row(scores_ptr, agreement_ptr, threshold_ptr, displaced_ptr, places, valid):
    """(S, A, t, a) of one row; zeros outside."""
    return (
        tl.load(scores_ptr + places, mask=valid, other=0.0),
        tl.load(agreement_ptr + places, mask=valid, other=0.0),
        tl.load(threshold_ptr + places, mask=valid, other=0.0),
        tl.load(displaced_ptr + places, mask=valid, other=0.0),
    )


@jit
def _swap_gains_kernel(
    s_left_ptr, a_left_ptr, t_left_ptr, d_left_ptr, own_left_ptr,
    s_right_ptr, a_right_ptr, t_right_ptr, d_right_ptr, own_right_ptr, gains_ptr,
    rows, left, right, left_row_stride, right_row_stride,
    ALIGN: tl.constexpr, TILE_I: tl.constexpr, TILE_J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # The launcher divided these by ALIGN: the compiler knows the products to be multiples of it, and makes copies wide.
    left, left_row_stride = left * ALIGN, left_row_stride * ALIGN
    right, right_row_stride = right * ALIGN, right_row_stride * ALIGN
    i = tl.program_id(1) * TILE_I + tl.arange(0, TILE_I)
    j = tl.program_id(0) * TILE_J + tl.arange(0, TILE_J)
    i_valid, j_valid = i < left, j < right
    at_i, at_j = i.to(tl.int64), j.to(tl.int64)
    moved = tl.zeros([TILE_I, TILE_J], tl.float32)
    for _ in tl.range(rows, num_stages=STAGES):
        s_i, a_i, t_i, d_i = _row(s_left_ptr, a_left_ptr, t_left_ptr, d_left_ptr, at_i, i_valid)
        s_j, a_j, t_j, d_j = _row(s_right_ptr, a_right_ptr, t_right_ptr, d_right_ptr, at_j, j_valid)
        moved = _added(moved, s_i[:, None], t_j[None, :], a_i[:, None], d_j[None, :])
        moved = _added(moved, s_j[None, :], t_i[:, None], a_j[None, :], d_i[:, None])
        at_i += left_row_stride
        at_j += right_row_stride
    own_i = tl.load(own_left_ptr + i, mask=i_valid, other=0.0)
    own_j = tl.load(own_right_ptr + j, mask=j_valid, other=0.0)
    places = i.to(tl.int64)[:, None] * right + j[None, :]
    tl.store(gains_ptr + places, own_i[:, None] + own_j[None, :] - moved, mask=i_valid[:, None] & j_valid[None, :])


def swap_gains_triton(left: SwapTerms, right: SwapTerms) -> Tensor:
    (lines, rows), columns = left.scores.shape, right.scores.shape[0]
    gains = torch.empty((lines, columns), dtype=torch.float32, device=left.own.device)
    by_row = [row_major(side.tensors()[:4]) for side in (left, right)]
    sizes = [lines, columns, *(side[0].stride(0) for side in by_row)]
    options = {"ALIGN": ALIGN, **config_for("swap_gains", CONFIGS, (rows,), torch.float32).arguments()}
    if any(size % ALIGN for size in sizes):
        options |= {"ALIGN": 1, "TILE_J": min(options["TILE_J"], 64)}
    grid = (triton.cdiv(columns, options["TILE_J"]), triton.cdiv(lines, options["TILE_I"]))
    _swap_gains_kernel[grid](
        *by_row[0], left.own.contiguous(), *by_row[1], right.own.contiguous(), gains,
        rows, *(size // options["ALIGN"] for size in sizes), **options,
    )  # fmt: skip
    return gains


def row_major(parts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the terms as ``[O, positions]`` with equal strides and adjacent positions; copies them if need be."""
    turned = [part.t() for part in parts]
    if len({part.stride() for part in turned}) == 1 and turned[0].stride(1) == 1:
        return turned
    return [part.clone(memory_format=torch.contiguous_format) for part in turned]


swap_gains = operator(
    lambda left, right: left.scores.new_empty(left.scores.shape[0], right.scores.shape[0]),
    launcher=swap_gains_triton,
    supports=lambda left, right: left.scores.dtype == torch.float32,
)(swap_gains_reference)
