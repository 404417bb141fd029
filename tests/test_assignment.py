from itertools import permutations

import pytest
import torch
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels.assignment import assignment

from .kernel_inputs import adversarial, check_assignment, scores_of, total


def check(score: Tensor) -> Tensor:
    return check_assignment(score, assignment(score))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 33, 64])
def test_random(size):
    check(scores_of(size))


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
    score = scores_of(size).mul(2).round()
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
    check(scores_of(12).to(dtype))


def test_strided_scores():
    score = scores_of(10)
    check(score.mT)
    check(torch.cat((score, score), 2)[:, :, ::2])


def test_does_not_change_the_scores():
    score = scores_of(6).double()
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
    score = scores_of(4)
    score[where] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        assignment(score)


@pytest.mark.parametrize("value", [float("-inf"), float("inf")])
def test_no_finite_assignment_is_refused(value):
    score = scores_of(4)
    score[1, 2] = value
    with pytest.raises(ModelError, match="infinite"):
        assignment(score)


def test_compiles_without_a_break():
    score = scores_of(6)
    compiled = torch.compile(lambda x: assignment(x * 2).long() + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(score), assignment(score * 2).long() + 1)
