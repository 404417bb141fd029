import pytest
import torch
from torch import Tensor

from permtriton.methods.measure.importance import importance_of
from permtriton.methods.measure.statistics import Curvature

IN, OUT = 12, 7


@pytest.fixture
def weight() -> Tensor:
    """``[out_features, in_features]``, as in the formulas."""
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def inputs() -> Tensor:
    """``[tokens, in_features]``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(40, IN, generator=generator) * torch.linspace(0.1, 3, IN)


def scores(method, weight: Tensor, statistic: Tensor) -> Tensor:
    found = importance_of(method, weight.T, statistic).scores(weight.T)
    assert found.shape == (weight.shape[1], weight.shape[0])
    assert found.dtype == torch.float32
    return found.T


def test_magnitude(weight, inputs):
    assert torch.equal(scores("magnitude", weight, inputs.norm(dim=0)), weight.abs())


def test_wanda(weight, inputs):
    expected = torch.empty(OUT, IN)
    for o in range(OUT):
        for c in range(IN):
            expected[o, c] = weight[o, c].abs() * inputs[:, c].square().sum().sqrt()
    torch.testing.assert_close(scores("wanda", weight, inputs.norm(dim=0)), expected)


def test_ria(weight, inputs):
    expected = torch.empty(OUT, IN)
    for o in range(OUT):
        for c in range(IN):
            relative = weight[o, c].abs() / weight[:, c].abs().sum() + weight[o, c].abs() / weight[o].abs().sum()
            expected[o, c] = relative * inputs[:, c].norm() ** 0.5
    torch.testing.assert_close(scores("ria", weight, inputs.norm(dim=0)), expected)


def test_obs(weight, inputs):
    hessian = inputs.T.double() @ inputs.double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(IN)
    expected = weight.double() ** 2 / hessian.inverse().diagonal()
    found = scores("obs", weight, Curvature(inputs.T @ inputs).inverse_diagonal())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "ria", "obs"])
def test_scores_of_low_precision_weights_are_float32(method, weight, inputs):
    low = weight.bfloat16()
    statistic = inputs.norm(dim=0)
    torch.testing.assert_close(scores(method, low, statistic), scores(method, low.float(), statistic))


@pytest.mark.parametrize("method", ["magnitude", "wanda", "ria"])
def test_dead_rows_columns_and_channels_score_zero(method, weight, inputs):
    weight[2] = 0
    weight[:, 5] = 0
    inputs[:, 7] = 0
    found = scores(method, weight, inputs.norm(dim=0))
    assert found.isfinite().all()
    assert found[2].eq(0).all()
    assert found[:, 5].eq(0).all()
    assert found[:, 7].eq(0).all() or method == "magnitude"
    alive = torch.ones(OUT, IN, dtype=torch.bool)
    alive[2], alive[:, 5], alive[:, 7] = False, False, False
    assert found[alive].gt(0).all()
