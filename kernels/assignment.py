"""Exact linear assignment of a batch of square score matrices (eq. 6 of the paper).

    index = argmax over permutations of sum_j score[index[j], j]

Shapes: ``score`` ``[n, B, B]`` -> ``index`` int32 ``[n, B]``, the row chosen for each column, which is the project's
index convention (``P[index[j], j] = 1``). The solver breaks ties; only the total is determined.
Bytes moved: the scores read once.

On a GPU `permtriton.kernels.assignment_triton` runs, or the reference for blocks larger than 256.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from permtriton.kernels.assignment_triton import assignment_triton, assignment_warm_triton, refusal, supports
from permtriton.kernels.operator import operator


def assignment_reference(score: Tensor) -> Tensor:
    """Returns int32 ``[n, B]``: the row of each column in the permutation with the largest total score.

    Computes scipy's shortest augmenting paths, one thread per core: the solver releases the GIL.

    Args:
        score: ``[n, B, B]``, any float dtype, no NaN.

    Raises:
        ModelError: a score is NaN, or a block has no assignment with a finite total.
    """
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
    """The same, starting from the prices of an earlier call: faster on a GPU if the scores changed little.

    Args:
        score: ``[n, B, B]``, any float dtype, no NaN.
        prices: float32 ``[n, B]``; any prices give the same total. NaN for the first call.

    Returns:
        (index, prices for the next call). Prices may decide between equally good permutations. scipy always starts
        afresh, and the prices stay as they are.

    Raises:
        ModelError: a score is NaN, or a block has no assignment with a finite total.
    """
    return assignment_reference(score), prices.to(torch.float32).clone(memory_format=torch.contiguous_format)


def _fake(score: Tensor) -> Tensor:
    return score.new_empty(score.shape[:2], dtype=torch.int32)


assignment = operator("assignment", _fake, launcher=assignment_triton, supports=supports)(assignment_reference)

assignment_warm = operator(
    "assignment_warm",
    lambda score, prices: (_fake(score), prices.new_empty(prices.shape, dtype=torch.float32)),
    launcher=assignment_warm_triton,
    supports=lambda score, prices: supports(score),
)(assignment_warm_reference)
