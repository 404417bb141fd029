"""Checks of saved tensors: N:M groups, no -0.0, finite values. Checks of outputs: no more than rounding explains."""

import pytest
import torch

from permtriton.data.samples import Samples
from permtriton.errors import VerificationError
from permtriton.model import checks
from permtriton.model.checks import (
    check_finite_tensor,
    check_same_outputs,
    model_outputs,
    relative_difference,
    rounding_noise,
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


def test_outputs_may_differ_by_what_rounding_explains(monkeypatch):
    """As in a model that amplifies rounding beyond the tolerance of its dtype."""
    model, plan = zoo.planned("llama")
    samples = Samples.of(zoo.token_ids(2, 16))
    before = model_outputs(model, samples)
    noise = rounding_noise(model, lambda: model_outputs(model, samples))
    assert 1e-7 < noise < 1e-5
    assert not any(module._forward_hooks for module in model.modules())
    monkeypatch.setitem(checks.TOLERANCE, torch.float32, 1e-9)
    zoo.fold(model, plan, zoo.random_indices(plan))
    difference = check_same_outputs(before, lambda: model_outputs(model, samples), model, "folding")
    assert difference == relative_difference(before, model_outputs(model, samples)) > 1e-9
    with pytest.raises(VerificationError, match=r"^folding: .*rounding alone.*permtriton inspect"):
        check_same_outputs(before * (1 + 30 * noise), lambda: model_outputs(model, samples), model, "folding")


@pytest.mark.parametrize(("dtype", "advice"), [(torch.float32, "please report"), (torch.bfloat16, "`dtype=float32`")])
def test_no_noise_explains_every_difference(dtype, advice, monkeypatch):
    monkeypatch.setattr(checks, "rounding_noise", lambda *_: 1.0)
    model, before = zoo.tiny_llama().to(dtype), torch.randn(4)
    wrong = before * (1 + 1.1 * max(checks.TOLERANCE[dtype], checks.MOST_ALLOWED))
    with pytest.raises(VerificationError, match=f"rounding alone.*{advice}"):
        check_same_outputs(before, lambda: wrong, model, "folding")
