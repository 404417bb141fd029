"""Checks of saved tensors: N:M groups, no -0.0, finite values. Checks of outputs: no more than rounding explains."""

import pytest
import torch

from permtriton.data.samples import Samples
from permtriton.errors import VerificationError
from permtriton.model.checks import (
    OUTPUT_TOLERANCE,
    check_finite_tensor,
    check_same_outputs,
    model_outputs,
    relative_difference,
)
from permtriton.model.nm_checks import check_weight
from permtriton.util.sparsity import NMPattern

from . import zoo


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


def test_outputs_may_differ_by_rounding():
    model, plan = zoo.planned("llama")
    samples = Samples.of(zoo.token_ids(2, 16))
    before = model_outputs(model, samples)
    zoo.fold(model, plan, zoo.random_indices(plan))
    after = model_outputs(model, samples)
    assert check_same_outputs(before, after, torch.float32, "folding") == relative_difference(before, after) > 0


@pytest.mark.parametrize(
    ("dtype", "advice"), [(torch.float32, "saved; please report"), (torch.bfloat16, "`dtype=float32`")]
)
def test_outputs_that_differ_are_refused(dtype, advice):
    before = torch.randn(4)
    for wrong in (before * (1 + 1.1 * OUTPUT_TOLERANCE[dtype]), torch.full((4,), torch.nan)):
        with pytest.raises(VerificationError, match=f"^folding: .*{advice}.*permtriton inspect"):
            check_same_outputs(before, wrong, dtype, "folding")
