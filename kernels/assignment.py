"""Exact linear assignment of a batch of square score matrices (eq. 6 of the paper).

    index = argmax over permutations of sum_j score[index[j], j]

Shapes: ``score`` ``[n, B, B]`` -> ``index`` int32 ``[n, B]``, the row chosen for each column, which is the project's
index convention (``P[index[j], j] = 1``). The solver breaks ties; only the total is determined.
Bytes moved: the scores read once.

On a GPU `permtriton.kernels.assignment_triton` runs, or the reference for blocks larger than 256.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from permtriton.kernels.assignment_triton import assignment_triton, assignment_warm_triton, launched, refusal, supports
from permtriton.kernels.launch import on_gpu
from permtriton.kernels.sinkhorn import sinkhorn_reference
from permtriton.kernels.tools.cases import BLOCK, META, Case, Floor, Inputs, blocks_of, generator_of, near_identity


def assignment(score: Tensor) -> Tensor:
    """Returns int32 ``[n, B]``: the row of each column in the permutation with the largest total score.

    Args:
        score: ``[n, B, B]``, any float dtype, no NaN.

    Raises:
        ModelError: a score is NaN, or a block has no assignment with a finite total.
    """
    return torch.ops.permtriton.assignment(score)


def assignment_warm(score: Tensor, prices: Tensor) -> tuple[Tensor, Tensor]:
    """The same, starting from the prices of an earlier call: faster on a GPU if the scores changed little.

    Args:
        score: ``[n, B, B]``, any float dtype, no NaN.
        prices: float32 ``[n, B]``; any prices give the same total. NaN for the first call.

    Returns:
        (index, prices for the next call). Prices may decide between equally good permutations.

    Raises:
        ModelError: a score is NaN, or a block has no assignment with a finite total.
    """
    return torch.ops.permtriton.assignment_warm(score, prices)


def assignment_reference(score: Tensor) -> Tensor:
    """scipy's shortest augmenting paths, one thread per core: the solver releases the GIL."""
    host = score.detach().to("cpu", torch.float64).numpy()
    index = np.empty(host.shape[:2], np.int32)

    def solve(block: int) -> None:
        rows, columns = linear_sum_assignment(host[block], maximize=True)
        index[block, columns] = rows

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(solve, range(host.shape[0])))
    except ValueError as error:  # scipy's, of NaN and of infinite scores
        raise refusal(score) from error
    return torch.from_numpy(index).to(score.device)


def assignment_warm_reference(score: Tensor, prices: Tensor) -> tuple[Tensor, Tensor]:
    """scipy always starts afresh: returns the prices unchanged."""
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


def cases(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Case]:
    """Returns what is checked, tuned and measured for linears of these shapes (out, in)."""
    return [assignment_case(blocks_of(shapes), BLOCK, device)]


def assignment_case(blocks: int, size: int, device: torch.device) -> Case:
    """Hard permutations of soft ones, as in a learning step; correct if every block's total is the largest one."""

    def make(seed: int) -> Inputs:
        return (sinkhorn_reference(near_identity(blocks, size, generator_of(seed, device)), 0.5, 5)[0].float(),)

    def total(score: Tensor, index: Tensor) -> Tensor:
        return score.double().gather(1, index.long().unsqueeze(1)).sum((1, 2))

    def error(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
        (score, index), (_, best) = found, expected
        inside = bool((index.long().sort(1).values == torch.arange(size, device=index.device)).all())
        return float((total(score, best) - total(score, index)).abs().max()) if inside else float("inf")

    return Case(
        "assignment", f"{blocks}x{size}x{size}", torch.float32, make, lambda score: (score, assignment(score)),
        lambda score: (score, assignment_reference(score)), error, 1e-4, blocks * size * (size * 4 + 4),
    )  # fmt: skip


def floors() -> Iterator[Floor]:
    """Yields the named shape whose resources are listed; the scores decide how often its loops run."""
    blocks = 11648

    def call() -> Tensor:
        return launched(torch.empty(blocks, BLOCK, BLOCK), None)

    yield Floor(assignment_case(blocks, BLOCK, META), call, blocks * BLOCK * BLOCK, "score", None)
