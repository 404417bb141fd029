"""The assignment kernel under Triton's interpreter: the total of what it chooses is scipy's."""

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels import autotune
from permtriton.kernels.assignment import CONFIGS, assignment_triton

from ..kernel_inputs import adversarial, check_assignment

NAN, INF = float("nan"), float("inf")


def check(score: Tensor, index: Tensor | None = None) -> Tensor:
    return check_assignment(score, assignment_triton(score) if index is None else index)


@pytest.mark.parametrize("size", [1, 2, 7, 33])
def test_random(size):
    check(torch.randn(1 if size > 16 else 2, size, size))


@pytest.mark.parametrize("size", [130])
def test_large_blocks(size):
    """Scores that need few searches: the interpreter is slow."""
    score = torch.eye(size)[torch.randperm(size)] + 0.02 * torch.rand(size, size)
    score[:, :3] = torch.rand(size, 3)
    check(score.unsqueeze(0))


def test_adversarial():
    check(adversarial(4))


def test_integers_with_many_ties():
    check(torch.randint(0, 3, (2, 17, 17)).float())


def test_differences_far_below_float32_sums():
    """Path lengths in float32 would round away the differences that decide."""
    check(2.0**23 + torch.randint(0, 4, (2, 12, 12)).float())
    check((torch.randn(1, 12, 12) * 1e-3 + torch.arange(12.0) * 1e4).mT)


def test_strided_scores():
    score = torch.randn(2, 6, 6)
    for strided in (score.mT, torch.cat((score, score), 2)[:, :, ::2], score.requires_grad_()):
        check(strided.detach(), assignment_triton(strided))


def test_blocks_come_back_in_their_order():
    index = torch.stack([torch.randperm(5) for _ in range(9)])
    score = torch.nn.functional.one_hot(index, 5).mT.float()
    assert torch.equal(assignment_triton(score).long(), index)


@pytest.mark.parametrize("where", [(0, 0, 0), (2, 3, 1)])
def test_nan_is_refused(where):
    score = torch.randn(3, 5, 5)
    score[where] = NAN
    with pytest.raises(ModelError, match=r"\(3, 5, 5\).* 1 of them are NaN"):
        assignment_triton(score)
    with pytest.raises(ModelError, match="NaN"):
        assignment_triton(torch.full_like(score, NAN))


def test_forbidden_pairs():
    """A score of -inf is never chosen where another permutation exists."""
    score = torch.randn(3, 9, 9)
    score[torch.rand(score.shape) < 0.5] = -INF
    score.diagonal(dim1=1, dim2=2).fill_(-50.0)
    check(score)


@pytest.mark.parametrize("kind", ["row", "column", "corner", "above"])
def test_no_finite_assignment_is_refused(kind):
    score = torch.randn(2, 6, 6)
    if kind == "row":
        score[1, 2] = -INF
    elif kind == "column":
        score[1, :, 2] = -INF
    elif kind == "corner":  # rows 0 to 3 can only take columns 0 to 2
        score[1, :4, 3:] = -INF
    else:
        score[1, 4, 2] = INF
    with pytest.raises(ValueError, match=r"infeasible|invalid"):
        linear_sum_assignment(score[1].numpy(), maximize=True)
    with pytest.raises(ModelError, match="infinite"):
        assignment_triton(score)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_configuration(config):
    with autotune.forced({"assignment": config}):
        check(torch.randn(1, 6, 6))
