"""Exact linear assignment of a batch of square score matrices (eq. 6 of the paper).

    index = argmax over permutations of sum_j score[index[j], j]

Shapes: ``score`` ``[n, B, B]`` -> ``index`` int32 ``[n, B]``, the row chosen for each column, which is the project's
index convention (``P[index[j], j] = 1``). Ties are broken by the solver; the total is what is exact.
Bytes moved: the scores read once.

On a GPU `permtriton.kernels.assignment_triton` runs, and the reference for blocks beyond 256.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from permtriton.kernels.assignment_triton import assignment_triton, assignment_warm_triton, supports
from permtriton.kernels.launch import on_gpu


def assignment(score: Tensor) -> Tensor:
    """Returns int32 ``[n, B]``: for each column the row of the permutation with the largest total score.

    Args:
        score: ``[n, B, B]``, any float dtype, no NaN.

    Raises:
        ValueError: a score is NaN.
    """
    return torch.ops.permtriton.assignment(score)


def assignment_warm(score: Tensor, prices: Tensor) -> tuple[Tensor, Tensor]:
    """The same, begun from the prices of an earlier call, which saves time on a GPU where the scores changed little.

    Args:
        score: ``[n, B, B]``, any float dtype, no NaN.
        prices: float32 ``[n, B]``; the total is the same from any. NaN for the first call.

    Returns:
        (index, prices for the next call). Among several best permutations the prices may decide.

    Raises:
        ValueError: a score is NaN.
    """
    return torch.ops.permtriton.assignment_warm(score, prices)


def assignment_reference(score: Tensor) -> Tensor:
    """scipy's shortest augmenting paths, a thread a core: the solver releases the GIL."""
    host = score.detach().to("cpu", torch.float64).numpy()
    if np.isnan(host).any():
        raise ValueError(f"assignment of {tuple(score.shape)} scores: {int(np.isnan(host).sum())} of them are NaN")
    index = np.empty(host.shape[:2], np.int32)

    def solve(block: int) -> None:
        rows, columns = linear_sum_assignment(host[block], maximize=True)
        index[block, columns] = rows

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(solve, range(host.shape[0])))
    return torch.from_numpy(index).to(score.device)


def assignment_warm_reference(score: Tensor, prices: Tensor) -> tuple[Tensor, Tensor]:
    """scipy starts afresh: the prices come back as they are."""
    return assignment_reference(score), prices.to(torch.float32).clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("permtriton::assignment", mutates_args=())
def _assignment(score: Tensor) -> Tensor:
    return assignment_reference(score)


@_assignment.register_fake
def _(score: Tensor) -> Tensor:
    return score.new_empty(score.shape[:2], dtype=torch.int32)


@torch.library.custom_op("permtriton::assignment_warm", mutates_args=())
def _assignment_warm(score: Tensor, prices: Tensor) -> tuple[Tensor, Tensor]:
    return assignment_warm_reference(score, prices)


@_assignment_warm.register_fake
def _(score: Tensor, prices: Tensor) -> tuple[Tensor, Tensor]:
    return score.new_empty(score.shape[:2], dtype=torch.int32), prices.new_empty(prices.shape, dtype=torch.float32)


@on_gpu(_assignment)
def _(score: Tensor) -> Tensor:
    return (assignment_triton if supports(score) else assignment_reference)(score)


@on_gpu(_assignment_warm)
def _(score: Tensor, prices: Tensor) -> tuple[Tensor, Tensor]:
    return (assignment_warm_triton if supports(score) else assignment_warm_reference)(score, prices)
