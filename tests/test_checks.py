"""Checks of saved tensors: N:M groups, no -0.0, and finite values."""

import pytest
import torch

from permtriton.errors import VerificationError
from permtriton.model.checks import check_finite_tensor, check_weight
from permtriton.sparsity import NMPattern


def sparse() -> torch.Tensor:
    return torch.tensor([[1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 3.0, 4.0, 0.0, 5.0, 6.0, 0.0]])


def test_check_weight_takes_what_is_sparse_enough():
    check_weight("w", sparse(), NMPattern(2, 4))
    check_weight("w", torch.ones(2, 8) * torch.tensor([1, 1, 1, 0] * 2), NMPattern(3, 4))
    check_weight("w", torch.zeros(2, 8), NMPattern(1, 8))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-0.0, "-0.0"),
        (float("nan"), "1 of 16"),
        (float("-inf"), "1 of 16"),
        (9.0, "row 1, group 1 holds 3 .*2:4 allows 2"),
    ],
)
def test_check_weight_names_what_is_wrong(value, words):
    weight = sparse()
    weight[1, 7] = value
    with pytest.raises(VerificationError, match=f"^w: .*{words}"):
        check_weight("w", weight, NMPattern(2, 4))


def test_check_finite_tensor_counts():
    check_finite_tensor("t", torch.tensor([1.0, -0.0, 3e38]))
    check_finite_tensor("t", torch.tensor([1, 2]))
    with pytest.raises(VerificationError, match="t: 2 of 3 values are not finite"):
        check_finite_tensor("t", torch.tensor([1.0, float("nan"), float("inf")]))
