# mypy: allow-untyped-defs
"""Exact linear assignment of a batch of square score matrices (eq. 6 of the paper).

    index = argmax over permutations of sum_j score[index[j], j]

Shapes: ``score`` ``[n, B, B]`` -> ``index`` int32 ``[n, B]``, the row chosen for each column, which is the project's
index convention (``P[index[j], j] = 1``). Of permutations with equal totals, any may be returned.
Bytes moved: the scores read once.

The Triton kernel, for float32 blocks of up to 256, computes shortest augmenting paths with prices (Jonker and
Volgenant), one program (by default one warp) per block. The costs are ``c = -score``; a column has a price ``v`` and,
once assigned, an owner, which is its row. Prices start at the columns' least costs, and each row takes the first column
whose least cost is in that row. Then every row without a column searches for one, as in Dijkstra's algorithm:

    reach[j] = c[row, j] - v[j] + add;   the nearest column is closed, and its owner searches on with
    add = distance[j] + v[j] - c[owner, j],   until the nearest column has no owner: the sink;

the price of each closed column falls by the distance of the sink minus its own, and the columns on the path change
owners. The state of all columns is in registers; a reduction finds the nearest column, at equal distances one without
an owner. Rows are read from the caches, one per search step: about 4 B steps for random scores, B^2 / 2 at worst.

Sums and prices are float64, as in scipy, so that totals equal scipy's; this costs no time, because steps wait for loads
and reductions. Floor: the scores read once.

The index of a block without an assignment (a NaN, a score of +inf, or -inf in such places that no finite total is left)
is all -1, so that the host finds such blocks by one comparison over ``[n]`` numbers and one synchronisation. Both are
skipped while a CUDA graph is captured.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Config, jit, tl, triton
from permtriton.kernels.operator import operator

LARGEST = 256

CONFIGS: tuple[Config, ...] = (
    Config({"UNROLL": 4}, num_warps=1),
    Config({"UNROLL": 8}, num_warps=1),
    Config({"UNROLL": 2}, num_warps=1),
    Config({"UNROLL": 4}, num_warps=2),
    Config({"UNROLL": 4}, num_warps=4),
)


def assignment_reference(score: Tensor) -> Tensor:
    """Returns int32 ``[n, B]``: the row of each column in the permutation with the largest total; any dtype of scores.

    Blocks are solved by scipy's ``linear_sum_assignment`` in one thread per core: the solver releases the GIL.
    """
    host = score.detach().to("cpu", torch.float64).numpy()
    index = np.empty(host.shape[:2], np.int32)

    def solve(block: int) -> None:
        rows, columns = linear_sum_assignment(host[block], maximize=True)
        index[block, columns] = rows

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(solve, range(host.shape[0])))
    except ValueError as error:  # raised by scipy for NaN and for infinite scores
        raise refusal(score) from error
    return torch.from_numpy(index).to(score.device)


@jit
def _costs(score_ptr, row, columns, valid, SIZE: tl.constexpr):
    return -tl.load(score_ptr + row * SIZE + columns, mask=valid, other=-float("inf")).to(tl.float64)


@jit
def _joined(high, low):
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@jit
def _ordered(bits):
    """Turns the bits of float64 numbers into int64 of the same order, and back."""
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@jit
def _least(values):
    """The least float64, by two integer reductions of one instruction per warp; a float64 one takes ten shuffles."""
    order = _ordered(values.to(tl.int64, bitcast=True))
    high, low = (order >> 32).to(tl.int32), order.to(tl.int32) ^ -2147483648  # low: unsigned order
    least = tl.min(high)
    rest = tl.min(tl.where(high == least, low, 2147483647)) ^ -2147483648
    return _ordered(_joined(least, rest)).to(tl.float64, bitcast=True)


@jit
def _at(values, here):
    """The float64 at the one place where ``here`` is true."""
    bits = tl.where(here, values.to(tl.int64, bitcast=True), 0)
    return _joined(tl.sum((bits >> 32).to(tl.int32)), tl.sum(bits.to(tl.int32))).to(tl.float64, bitcast=True)


@jit
def _survey(score_ptr, columns, valid, SIZE: tl.constexpr, PADDED: tl.constexpr, UNROLL: tl.constexpr):
    """(least cost of each column, first row that has it, which columns have a NaN or no finite least cost)."""
    least = tl.full([PADDED], float("inf"), tl.float64)
    first = tl.zeros([PADDED], tl.int32)
    wrong = ~valid & valid
    for row in tl.range(0, SIZE, loop_unroll_factor=UNROLL):
        cost = _costs(score_ptr, row, columns, valid, SIZE)
        first = tl.where(cost < least, row, first)
        least = tl.where(cost < least, cost, least)
        wrong = wrong | (cost != cost)
    wrong = valid & (wrong | (tl.abs(least) == float("inf")))
    return tl.where(valid & ~wrong, least, 0.0), first, wrong


@jit
def _assignment_kernel(score_ptr, index_ptr, SIZE: tl.constexpr, PADDED: tl.constexpr, UNROLL: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    valid = columns < SIZE
    score_ptr += block * (SIZE * SIZE)
    price, first, wrong = _survey(score_ptr, columns, valid, SIZE, PADDED, UNROLL)
    solved = tl.max(wrong.to(tl.int32)) == 0
    owner = tl.full([PADDED], -1, tl.int32)
    for row in range(SIZE):
        wins = tl.min(tl.where(valid & (first == row), columns, PADDED))
        owner = tl.where(columns == wins, row, owner)
    for root in range(SIZE):
        unvisited = valid
        distance = tl.full([PADDED], float("inf"), tl.float64)
        parent = tl.full([PADDED], -1, tl.int32)
        tags = (owner + 1) * PADDED + columns  # columns without an owner have the lowest
        row = root
        column = tl.full([], -1, tl.int32)
        add = tl.full([], 0.0, tl.float64)
        nearest = tl.full([], 0.0, tl.float64)
        searching = solved & (tl.max((owner == root).to(tl.int32)) == 0)
        sink = tl.full([], -1, tl.int32)
        while searching:
            # c[owner, j] is loaded beside the owner's row, so that a step waits for memory once.
            kept_score = tl.load(score_ptr + row * SIZE + column, mask=column >= 0, other=0.0).to(tl.float64)
            reach = _costs(score_ptr, row, columns, valid, SIZE) - price + (add + kept_score)
            nearer = unvisited & (reach < distance)
            distance = tl.where(nearer, reach, distance)
            parent = tl.where(nearer, column, parent)
            nearest = _least(tl.where(unvisited, distance, float("inf")))
            tag = tl.min(tl.where(unvisited & (distance == nearest), tags, (SIZE + 1) * PADDED))
            column = tag % PADDED
            solved = nearest < float("inf")
            searching = solved & (tag >= PADDED)
            if searching:
                row = tag // PADDED - 1
                here = columns == column
                unvisited = unvisited & ~here
                add = nearest + _at(price, here)
            else:
                sink = tl.where(solved, column, -1)
        price -= tl.where(valid & ~unvisited, nearest - distance, 0.0)
        while sink >= 0:
            here = columns == sink
            before = tl.max(tl.where(here, parent, -1))
            moved = tl.max(tl.where(columns == before, owner, -1))
            owner = tl.where(here, tl.where(before < 0, root, moved), owner)
            sink = before
    tl.store(index_ptr + block * SIZE + columns, tl.where(solved, owner, -1), mask=valid)


def assignment_triton(score: Tensor) -> Tensor:
    """Computes `assignment_reference` of scores that `supports` accepts.

    A block without an assignment of finite total raises a ModelError; while a CUDA graph is captured, its index is all
    -1 instead.
    """
    index = launched(score)
    capturing = score.is_cuda and torch.cuda.is_current_stream_capturing()
    if not capturing and bool((index[:, 0] < 0).any()):
        raise refusal(score)
    return index


def launched(score: Tensor) -> Tensor:
    """Returns the index, all -1 in blocks without an assignment."""
    blocks, size, _ = score.shape
    index = torch.empty((blocks, size), dtype=torch.int32, device=score.device)
    config = config_for("assignment", CONFIGS, (blocks, size), score.dtype)
    score, padded = score.detach().contiguous(), max(triton.next_power_of_2(size), 32)
    _assignment_kernel[(blocks,)](score, index, SIZE=size, PADDED=padded, **config.arguments())
    return index


def refusal(score: Tensor) -> ModelError:
    nans = int(score.isnan().sum())
    why = f"{nans} of them are NaN" if nans else "some are infinite and leave no assignment with a finite total"
    return ModelError(f"assignment of {tuple(score.shape)} scores: {why}")


def supports(score: Tensor) -> bool:
    """Whether the kernel supports the scores: float32 blocks of up to 256."""
    return score.dtype == torch.float32 and score.shape[-1] <= LARGEST


assignment = operator(
    lambda score: score.new_empty(score.shape[:2], dtype=torch.int32),
    launcher=assignment_triton,
    supports=supports,
)(assignment_reference)
