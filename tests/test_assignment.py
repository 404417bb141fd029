from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from permtriton.kernels.assignment import assignment


def random_scores(size: int, blocks: int = 4) -> Tensor:
    return torch.randn(blocks, size, size, generator=torch.Generator().manual_seed(size))


def adversarial(size: int) -> Tensor:
    """Score matrices on which greedy or float-careless solvers go wrong."""
    line = torch.arange(1.0, size + 1)
    product = line.outer(line)
    greedy_trap = torch.full((size, size), -1e4)
    greedy_trap.diagonal().fill_(1.0)
    greedy_trap.diagonal(1).fill_(1.5)
    greedy_trap[-1, 0] = -1e5
    huge = random_scores(size, 1)[0] * 1e30
    tiny = random_scores(size, 1)[0] * 1e-30
    onehot = torch.eye(size).flip(0)
    offset = random_scores(size, 1)[0].mul(8).round() + 2.0**20
    return torch.stack((product, -product, -(line.view(-1, 1) - line).abs(), greedy_trap, huge, tiny, onehot, offset))


def total(score: Tensor, index: Tensor) -> Tensor:
    """The total by the project's convention: column j is given row ``index[j]``."""
    return score.double().gather(1, index.long().unsqueeze(1)).sum((1, 2))


def best(score: Tensor) -> Tensor:
    totals = []
    for block in score.double().numpy():
        rows, columns = linear_sum_assignment(-block)
        totals.append(block[rows, columns].sum())
    return torch.tensor(np.array(totals))


def check(score: Tensor) -> Tensor:
    index = assignment(score)
    assert index.dtype == torch.int32
    assert index.shape == score.shape[:2]
    assert torch.equal(index.sort(1).values, torch.arange(score.shape[1], dtype=torch.int32).expand_as(index))
    torch.testing.assert_close(total(score, index), best(score), rtol=1e-12, atol=0)
    return index


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 33, 64])
def test_random(size):
    check(random_scores(size))


@pytest.mark.parametrize("size", [2, 8, 33])
def test_adversarial(size):
    check(adversarial(size))


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("size", [4, 32])
def test_integer_scores_with_many_ties(size, levels):
    check(torch.randint(0, levels + 1, (6, size, size), generator=torch.Generator().manual_seed(levels)).float())


@pytest.mark.parametrize("value", [0.0, -3.5, 1e38])
def test_constant_scores(value):
    check(torch.full((2, 9, 9), value))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_against_every_permutation(size):
    score = random_scores(size).mul(2).round()
    columns = torch.arange(size)
    every = torch.stack([score[:, list(p), columns].sum(1) for p in permutations(range(size))])
    torch.testing.assert_close(total(score, assignment(score)), every.max(0).values.double())


def test_index_names_the_row_of_each_column():
    index = torch.tensor([2, 0, 3, 1])
    score = torch.zeros(1, 4, 4)
    score[0, index, torch.arange(4)] = 1
    assert assignment(score).tolist() == [index.tolist()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    check(random_scores(12).to(dtype))


def test_strided_scores():
    score = random_scores(10)
    check(score.mT)
    check(torch.cat((score, score), 2)[:, :, ::2])


def test_scores_that_require_a_gradient():
    score = random_scores(6)
    assert torch.equal(assignment(score.clone().requires_grad_()), assignment(score))


def test_does_not_change_the_scores():
    score = random_scores(6).double()
    before = score.clone()
    assignment(score)
    assert torch.equal(score, before)


def test_empty_batch():
    index = assignment(torch.empty(0, 8, 8))
    assert index.shape == (0, 8)
    assert index.dtype == torch.int32


def test_many_blocks_come_back_in_their_order():
    index = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(k)) for k in range(200)])
    score = torch.nn.functional.one_hot(index, 5).mT.float()
    assert torch.equal(assignment(score).long(), index)


@pytest.mark.parametrize("where", [(0, 0, 0), (2, 3, 1)])
def test_nan_is_refused(where):
    score = random_scores(4)
    score[where] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        assignment(score)


@pytest.mark.parametrize("shape", [(2, 4, 4), (0, 4, 4), (3, 1, 1)])
def test_opcheck(shape):
    score = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    torch.library.opcheck(torch.ops.permtriton.assignment.default, (score,))
    torch.library.opcheck(torch.ops.permtriton.assignment.default, (score.mT,))


def test_compiles_without_a_break():
    score = random_scores(6)
    compiled = torch.compile(lambda x: assignment(x * 2).long() + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(score), assignment(score * 2).long() + 1)
