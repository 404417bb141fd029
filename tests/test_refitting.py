"""Refitting gives the exact least-squares weights on SparseGPT's mask, and a pruned model that is closer to the dense."""

import pytest
import torch
from torch import Tensor

from permtriton import NMPattern, find_plan
from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError
from permtriton.methods import refitting as module
from permtriton.methods.obs import damped, sparsegpt
from permtriton.methods.refitting import Fit, best_weight, fit_weight, least_squares, refit, row_errors
from permtriton.methods.statistics import Moments
from permtriton.methods.weights import update_weights
from permtriton.model.checks import check_pruned
from permtriton.model.forward import last_hidden_state
from permtriton.model.plan import linear_module
from permtriton.progress import NoProgress

from . import zoo
from .updating import PATTERN, Recording, facts, tiny_model

EXACT = Fit(iterations=200, tolerance=1e-7)
FAMILIES = ["gpt2", "gemma2", "opt", "falcon", "gpt_neox", "bert", "mistral", "t5"]


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
    hessian, target = damped(moment.hessian), best_weight(weight, moment, 0.75)
    start = sparsegpt(target, moment.hessian, pattern, None)
    found, expected = least_squares(start, target, hessian, EXACT), exact(start, target, hessian)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(found != 0, start != 0)
    errors = [float(row_errors(each, target, hessian).sum()) for each in (start, found, expected.float())]
    assert errors[1] < 0.98 * errors[0]
    assert errors[1] == pytest.approx(errors[2], rel=1e-4)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_best_weight_gives_the_targets_with_the_least_error(share):
    """It is the minimum of ``|T - V X_p|^2 + damping |W - V|^2``, the normal equations of which are solved by hand."""
    weight, dense, pruned = (each.double() for each in problem(40))
    hessian = damped(pruned @ pruned.T)
    damping = hessian - pruned @ pruned.T
    right = ((1 - share) * weight @ pruned + share * weight @ dense) @ pruned.T + weight @ damping
    found = best_weight(weight.float(), moment_of(dense.float(), pruned.float()), share)
    torch.testing.assert_close(found.double(), right @ torch.linalg.inv(hessian), rtol=1e-3, atol=1e-4)


def test_without_dense_targets_the_best_weight_is_the_dense_one():
    weight, dense, pruned = problem(40)
    assert best_weight(weight, moment_of(dense, pruned), 0.0) is weight
    assert best_weight(weight, Moments(pruned @ pruned.T, None), 0.75) is weight
    torch.testing.assert_close(best_weight(weight, moment_of(pruned, pruned), 0.75), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("iterations", [0, 1, 3, 50])
@pytest.mark.parametrize("tokens", [10, 400])
def test_no_row_ends_worse_than_sparsegpt(dtype, iterations, tokens):
    """As the weights are stored: rounding to 16 bits may cost more than the fit gains."""
    weight, dense, pruned = problem(64, rows=50, tokens=tokens)
    weight, moment = weight.to(dtype), moment_of(dense, pruned)
    hessian, target = damped(moment.hessian), best_weight(weight.float(), moment, 0.75)
    start = sparsegpt(target, moment.hessian, PATTERN, None).to(dtype)
    fitted = fit_weight(weight, moment, PATTERN, Fit(0.75, iterations))
    before, after = (row_errors(each, target, hessian) for each in (start, fitted.weight))
    assert fitted.weight.dtype == dtype
    assert (after <= before).all()
    assert fitted.end <= fitted.start
    assert fitted.end < fitted.start if iterations else torch.equal(fitted.weight, start)
    size = float(row_errors(torch.zeros_like(target), target, hessian).sum())
    assert fitted.end == pytest.approx(float(after.sum()) / size, rel=1e-5)


def test_a_fit_that_fails_keeps_sparsegpt(monkeypatch):
    weight, dense, pruned = problem(64)
    monkeypatch.setattr(module, "least_squares", lambda start, *_: torch.full_like(start, torch.nan))
    fitted = fit_weight(weight, moment_of(dense, pruned), PATTERN, Fit())
    assert fitted.weight.isfinite().all()
    assert fitted.end == fitted.start


def test_more_iterations_are_never_worse_and_the_tolerance_ends_them():
    weight, dense, pruned = problem(96, rows=20)
    moment = moment_of(dense, pruned)
    ends = [fit_weight(weight, moment, PATTERN, Fit(iterations=count, tolerance=0)).end for count in (0, 1, 2, 5, 20)]
    assert ends == sorted(ends, reverse=True)
    loose = fit_weight(weight, moment, PATTERN, Fit(iterations=20, tolerance=0.9)).end
    assert loose > ends[-1]


def test_dead_channels_and_dead_inputs():
    weight, dense, pruned = problem(24)
    pruned[5], dense[7], pruned[8:12] = 0, 0, 0
    fitted = fit_weight(weight, moment_of(dense, pruned), PATTERN, Fit()).weight
    assert fitted.isfinite().all()
    assert (fitted[:, 5] == 0).all()
    assert (fitted[:, 8:12] == 0).all()
    nothing = fit_weight(weight, Moments(torch.eye(24), torch.zeros(24, 24)), PATTERN, Fit()).weight
    torch.testing.assert_close(nothing, weight * (nothing != 0))
    zeros = fit_weight(torch.zeros(3, 24), moment_of(dense, pruned), PATTERN, Fit())
    assert not zeros.weight.any()
    assert (zeros.start, zeros.end) == (0, 0)


def test_singular_moments_are_refused():
    with pytest.raises(CalibrationError, match="layer x"):
        fit_weight(torch.ones(2, 8), Moments(-torch.ones(8, 8), torch.ones(8, 8)), PATTERN, Fit(), "layer x")


# -- the walk through the layers ---------------------------------------------------------------------------------------


class Problem:
    """A dense model, and how far it is from itself once it has been pruned."""

    def __init__(self, model, plan=None, ids: Tensor | None = None) -> None:
        self.model, self.plan = model, plan or find_plan(model, PATTERN)
        self.samples = Samples.of(zoo.token_ids(24, 16) if ids is None else ids)
        self.weights = {name: linear_module(model, name).get_parameter("weight") for _, name in self.plan.linears()}
        self.dense = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.expected = self.hidden()

    @torch.no_grad()
    def hidden(self) -> Tensor:
        return last_hidden_state(self.model, self.samples).float()

    def error(self) -> float:
        return float((self.hidden() - self.expected).square().sum() / self.expected.square().sum())

    @torch.no_grad()
    def reset(self) -> "Problem":
        for name, weight in self.weights.items():
            weight.copy_(self.dense[name])
        return self

    def refit(self, fit: Fit = Fit(), progress=None, batch: int = 4):
        arguments = (self.dense, self.samples, batch, PATTERN, fit, progress or NoProgress())
        return refit(self.model, self.plan, *arguments)

    def sparsegpt(self) -> float:
        from .updating import config

        options = config(weight_update="sparsegpt", permutation="none")
        update_weights(
            self.model,
            self.plan,
            dict.fromkeys([s.name for s in self.plan.sites]),
            self.samples,
            4,
            options,
            NoProgress(),
        )
        error = self.error()
        self.reset()
        return error


def test_the_last_hidden_state_comes_closer_than_with_sparsegpt():
    problem, progress = Problem(tiny_model(layers=4), ids=zoo.tiny_ids(24, 16)), Recording()
    before = problem.sparsegpt()
    start = facts(problem.model)
    report = problem.refit(progress=progress)
    assert problem.error() < 0.9 * before
    assert facts(problem.model) == start
    check_pruned(problem.model, problem.plan, PATTERN)
    assert [entry["linear"] for entry in report] == [name for _, name in problem.plan.linears()]
    assert all(entry["end"] < entry["start"] for entry in report)
    assert sum(progress.steps) == progress.total


@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_models(name):
    problem = Problem(*zoo.planned(name))
    before = problem.sparsegpt()
    problem.refit()
    assert problem.error() < before
    check_pruned(problem.model, problem.plan, PATTERN)
