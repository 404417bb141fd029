"""Fitting one weight: exact on SparseGPT's mask, in a metric of its outputs, and on better masks."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from permtriton import NMPattern
from permtriton.methods.measure.statistics import Curvature, Moments
from permtriton.methods.prune import least_squares as module
from permtriton.methods.prune import refit
from permtriton.methods.prune.least_squares import exchanged, least_squares, metric_of, row_errors
from permtriton.methods.prune.refit import Refit
from permtriton.methods.prune.sparsegpt import sparsegpt

from .updating import PATTERN


def problem(channels: int, rows: int = 6, tokens: int = 0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A weight and the correlated inputs ``[channels, tokens]`` that it reads in the dense and in the pruned model."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(channels) + torch.randn(channels, channels, generator=generator) / channels**0.5
    dense = mixing @ torch.randn(channels, tokens or 4 * channels, generator=generator)
    pruned = dense + 0.3 * mixing @ torch.randn(dense.shape, generator=generator)
    return torch.randn(rows, channels, generator=generator), dense, pruned


def moment_of(dense: Tensor, pruned: Tensor) -> Moments:
    return Moments(pruned @ pruned.T, (dense - pruned) @ pruned.T)


def exact(start: Tensor, target: Tensor, hessian: Tensor) -> Tensor:
    """The minimum on each row's support, by a float64 system per row."""
    target, hessian, found = target.double(), hessian.double(), torch.zeros(start.shape, dtype=torch.float64)
    for row, support in enumerate(start != 0):
        right = (target[row] @ hessian)[support]
        found[row, support] = torch.linalg.solve(hessian[support][:, support], right)
    return found


@pytest.mark.parametrize("pattern", [NMPattern(2, 4), NMPattern(1, 4), NMPattern(4, 8), NMPattern(3, 12)], ids=str)
@pytest.mark.parametrize(("channels", "rows"), [(24, 1), (72, 5), (120, 33)])
def test_least_squares_on_the_mask(pattern, channels, rows):
    weight, dense, pruned = problem(channels, rows)
    moment = moment_of(dense, pruned)
    curvature = Curvature(moment.hessian)
    hessian, target = curvature.damped, Refit(dense_targets=0.75).best_weight(weight, moment, curvature)
    start = sparsegpt(target, curvature, pattern, None)
    found, expected = least_squares(start, target, hessian, 200), exact(start, target, hessian)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(found != 0, start != 0)
    errors = [float(row_errors(each, target, hessian).sum()) for each in (start, found, expected.float())]
    assert errors[1] < 0.98 * errors[0]
    assert errors[1] == pytest.approx(errors[2], rel=1e-4)


@pytest.mark.parametrize(("of_inputs", "of_residual"), [(0.0, 0.0), (0.5, 0.0), (1.0, 0.25), (0.0, 1.0)])
def test_the_best_weight_gives_the_targets_with_the_least_error(of_inputs, of_residual):
    """It is the minimum of ``|T - V X_p|^2 + damping |W - V|^2``, the normal equations of which are solved by hand."""
    weight, dense, pruned = (each.double() for each in problem(40))
    lacking = torch.randn(6, 160, generator=torch.Generator().manual_seed(1)).double()  # of the residual stream
    moment = replace(moment_of(dense.float(), pruned.float()), residual_shift=(lacking @ pruned.T).float())
    curvature = Curvature(moment.hessian)
    hessian = curvature.damped.double()
    target = weight @ pruned + of_inputs * weight @ (dense - pruned) + of_residual * lacking
    right = target @ pruned.T + weight @ (hessian - pruned @ pruned.T)
    options = Refit(dense_targets=of_inputs, residual_targets=of_residual)
    found = options.best_weight(weight.float(), moment, curvature)
    torch.testing.assert_close(found.double(), right @ torch.linalg.inv(hessian), rtol=1e-3, atol=1e-4)


def fit(weight: Tensor, moment: Moments, outputs: Tensor | None = None, **given: float) -> tuple[Tensor, float, float]:
    """The fitted weight of a linear, and the errors that are reported."""
    fitted, start, end = Refit(**given).fit(weight, moment, Curvature(moment.hessian), PATTERN, outputs)
    return fitted + 0.0, start, end


def gradients(rows: int, tokens: int = 200) -> Tensor:
    """Of outputs that are related."""
    generator = torch.Generator().manual_seed(7)
    mixing = torch.eye(rows) + torch.randn(rows, rows, generator=generator) / rows**0.5
    return 1e-3 * torch.randn(tokens, rows, generator=generator) @ mixing


def test_least_squares_in_a_metric():
    """Against one float64 system of all kept weights."""
    weight, _, pruned = problem(24, rows=7)
    curvature, metric = Curvature(pruned @ pruned.T), metric_of(gradients(7))
    start = sparsegpt(weight, curvature, PATTERN, None)
    found = least_squares(start, weight, curvature.damped, 300, metric)
    whole, kept = torch.kron(metric.double(), curvature.damped.double()), (start != 0).flatten()
    expected = torch.zeros(kept.numel(), dtype=torch.float64)
    expected[kept] = torch.linalg.solve(whole[kept][:, kept], (whole @ weight.flatten().double())[kept])
    torch.testing.assert_close(found.double().flatten(), expected, rtol=1e-3, atol=1e-4)
    errors = [module.error_of(each, weight, curvature.damped, metric) for each in (start, found)]
    difference = (found - weight).double().flatten()
    assert errors[1] == pytest.approx(float(difference @ whole @ difference), rel=1e-4)
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("iterations", [0, 1, 3, 50])
@pytest.mark.parametrize("tokens", [10, 400])
def test_no_row_ends_worse_than_sparsegpt(dtype, iterations, tokens):
    """As the weights are stored: rounding to 16 bits may cost more than the fit gains."""
    weight, dense, pruned = problem(64, rows=50, tokens=tokens)
    weight, moment = weight.to(dtype), moment_of(dense, pruned)
    curvature = Curvature(moment.hessian)
    target = Refit(dense_targets=0.75).best_weight(weight.float(), moment, curvature)
    first = sparsegpt(target, curvature, PATTERN, None).to(dtype)
    fitted, start, end = fit(weight, moment, dense_targets=0.75, iterations=iterations)
    before, after = (row_errors(each, target, curvature.damped) for each in (first, fitted))
    assert fitted.dtype == dtype
    assert (after <= before).all()
    assert end < start if iterations else torch.equal(fitted, first)
    size = float(row_errors(torch.zeros_like(target), target, curvature.damped).sum())
    assert (start, end) == pytest.approx((float(before.sum()) / size, float(after.sum()) / size), rel=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_a_fit_that_fails_keeps_sparsegpt(value, monkeypatch):
    weight, dense, pruned = problem(64)
    monkeypatch.setattr(refit, "least_squares", lambda start, *_: torch.full_like(start, value))
    fitted, start, end = fit(weight, moment_of(dense, pruned))
    assert fitted.isfinite().all()
    assert end == start


@pytest.mark.parametrize("pattern", [PATTERN, NMPattern(4, 8), NMPattern(1, 3)])
@pytest.mark.parametrize("at_once", [1, module.AT_ONCE["cpu"]])
def test_the_best_pair_of_each_group_changes_places(pattern, at_once, monkeypatch):
    """Against every pair of every group, tried one by one with a line search by the quadratic's own vertex."""
    monkeypatch.setattr(module, "AT_ONCE", {"cpu": at_once})
    weight, _, pruned = problem(24, rows=5)
    curvature = Curvature((pruned @ pruned.T).float())
    hessian = curvature.damped.double()
    start = sparsegpt(weight, curvature, pattern, None)
    gradient = (start - weight) @ curvature.damped
    found = exchanged(start, gradient, curvature, pattern, torch.ones(5))

    def error(row: int, values: Tensor) -> Tensor:
        difference = values.double() - weight[row].double()
        return difference @ hessian @ difference

    for row in range(5):
        for first in range(0, 24, pattern.group):
            group = range(first, first + pattern.group)
            best, expected = error(row, start[row]), start[row, first : first + pattern.group]
            for out in (i for i in group if start[row, i]):
                for into in (j for j in group if not start[row, j]):
                    values = start[row].double()
                    values[out] = 0
                    slope = ((values - weight[row].double()) @ hessian)[into]
                    values[into] = -slope / hessian[into, into]
                    if error(row, values) < best * (1 - 1e-9):
                        best, expected = error(row, values), values[first : first + pattern.group].float()
            torch.testing.assert_close(found[row, first : first + pattern.group], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pattern", [PATTERN, NMPattern(4, 8)])
def test_exchanges_lower_the_error_of_every_row_and_keep_the_pattern(pattern):
    weight, _, pruned = problem(96, rows=30)
    curvature = Curvature(pruned @ pruned.T)
    start = least_squares(sparsegpt(weight, curvature, pattern, None), weight, curvature.damped, 50)
    errors = [row_errors(module.better_mask(start, weight, curvature, pattern, rounds), weight, curvature.damped)
              for rounds in (0, 1, 2, 4, 8)]  # fmt: skip
    for before, after in pairwise(errors):
        assert (after <= before * (1 + 1e-5)).all()
    assert errors[2].sum() < 0.99 * errors[0].sum()
    found = module.better_mask(start, weight, curvature, pattern, 8)
    assert ((found != 0).unflatten(1, (-1, pattern.group)).sum(2) == pattern.kept).all()


def test_dead_channels_and_dead_inputs():
    weight, dense, pruned = problem(24)
    pruned[5], dense[7], pruned[8:12] = 0, 0, 0
    moment = moment_of(dense, pruned)
    fitted = fit(weight, moment)[0]
    assert fitted.isfinite().all()
    assert (fitted[:, [5, 8, 9, 10, 11]] == 0).all()
    nothing = fit(weight, Moments(torch.eye(24), torch.zeros(24, 24)))[0]
    torch.testing.assert_close(nothing, weight * (nothing != 0))
    zeros, start, end = fit(torch.zeros(3, 24), moment)
    assert not zeros.any()
    assert (start, end) == (0, 0)
