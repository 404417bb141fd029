"""Refitting: exact weights on SparseGPT's mask and on better ones, and a model that is closer to the dense one."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.architectures import tiny as tiny_architectures
from permtriton import CompileConfig, NMPattern, config_from, find_plan
from permtriton.data.samples import Inputs
from permtriton.data.text import check_samples
from permtriton.driver.pipeline import compile_model
from permtriton.driver.step import Outcome
from permtriton.errors import VerificationError
from permtriton.methods.measure import statistics as module_statistics
from permtriton.methods.measure.statistics import Moments
from permtriton.methods.prune import exchange
from permtriton.methods.prune import refitting as module
from permtriton.methods.prune.obs import Curvature, sparsegpt
from permtriton.methods.prune.refit import Refit
from permtriton.methods.prune.refitting import (
    best_weight,
    coupled_least_squares,
    least_squares,
    metric_of,
    refit,
    row_errors,
)
from permtriton.methods.prune.weights import update_weights
from permtriton.model.checks import check_pruned
from permtriton.model.experts import unstack_experts
from permtriton.model.forward import last_hidden_state
from permtriton.passes.plan import Site, layer_modules, linear_module, named_layers, sequential_groups
from permtriton.running.kept_outputs import KeptOutputs
from permtriton.running.layer_inputs import from_model
from permtriton.running.offload import OffloadFolder
from permtriton.util.progress import NoProgress

from . import test_seq2seq, zoo
from .expert_stacks import unstacked
from .two_ranks import Interrupting
from .updating import PATTERN, Recording, facts, interrupt, tiny_model

FAMILIES = ["gpt2", "gemma2", "opt", "falcon", "gpt_neox", "bert", "mistral"]
CONFIG = CompileConfig(sparsity=PATTERN)


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
    curvature = Curvature.of(moment.hessian)
    hessian, target = curvature.damped, best_weight(weight, moment, curvature, Refit(dense_targets=0.75))
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
    curvature = Curvature.of(moment.hessian)
    hessian = curvature.damped.double()
    target = weight @ pruned + of_inputs * weight @ (dense - pruned) + of_residual * lacking
    right = target @ pruned.T + weight @ (hessian - pruned @ pruned.T)
    options = Refit(dense_targets=of_inputs, residual_targets=of_residual)
    found = best_weight(weight.float(), moment, curvature, options)
    torch.testing.assert_close(found.double(), right @ torch.linalg.inv(hessian), rtol=1e-3, atol=1e-4)


def test_without_dense_targets_the_best_weight_is_the_dense_one():
    weight, dense, pruned = problem(40)
    curvature = Curvature.of(pruned @ pruned.T)
    assert best_weight(weight, moment_of(dense, pruned), curvature, Refit(0.0, 0.0)) is weight
    assert best_weight(weight, Moments(pruned @ pruned.T, None), curvature, Refit(dense_targets=0.75)) is weight
    torch.testing.assert_close(
        best_weight(weight, moment_of(pruned, pruned), curvature, Refit(dense_targets=0.75)), weight
    )


def fit(weight: Tensor, moment: Moments, outputs: Tensor | None = None, **given: float) -> tuple[Tensor, float, float]:
    """Fits the weight of a linear; returns what it is then, and the errors that are reported."""
    linear = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    curvature, options = Curvature.of(moment.hessian), Refit(**given)
    with torch.no_grad():
        linear.weight.copy_(weight)
        part = module._fit(
            nn.ModuleDict({"x": linear}), {"x": PATTERN}, "x", "s", moment, lambda _: curvature, options, outputs
        )
    return linear.weight.detach(), part["start"], part["end"]


def gradients(rows: int, tokens: int = 200) -> Tensor:
    """Of outputs that are related."""
    generator = torch.Generator().manual_seed(7)
    mixing = torch.eye(rows) + torch.randn(rows, rows, generator=generator) / rows**0.5
    return 1e-3 * torch.randn(tokens, rows, generator=generator) @ mixing


def test_least_squares_in_a_metric():
    """Against one float64 system of all kept weights."""
    weight, _, pruned = problem(24, rows=7)
    curvature, metric = Curvature.of(pruned @ pruned.T), metric_of(gradients(7))
    start = sparsegpt(weight, curvature, PATTERN, None)
    found = coupled_least_squares(start, weight, curvature.damped, metric, 300)
    whole, kept = torch.kron(metric.double(), curvature.damped.double()), (start != 0).flatten()
    expected = torch.zeros(kept.numel(), dtype=torch.float64)
    expected[kept] = torch.linalg.solve(whole[kept][:, kept], (whole @ weight.flatten().double())[kept])
    torch.testing.assert_close(found.double().flatten(), expected, rtol=1e-3, atol=1e-4)
    errors = [module.error_of(each, weight, curvature.damped, metric) for each in (start, found)]
    difference = (found - weight).double().flatten()
    assert errors[1] == pytest.approx(float(difference @ whole @ difference), rel=1e-4)
    assert errors[1] < 0.9 * errors[0]


def test_in_the_metric_of_unrelated_outputs_each_row_is_on_its_own():
    weight, _, pruned = problem(24, rows=7)
    curvature = Curvature.of(pruned @ pruned.T)
    start = sparsegpt(weight, curvature, PATTERN, None)
    found = coupled_least_squares(start, weight, curvature.damped, torch.eye(7), 300)
    torch.testing.assert_close(found, least_squares(start, weight, curvature.damped, 300), rtol=1e-3, atol=1e-4)


def test_a_metric_does_not_depend_on_the_size_of_the_loss():
    torch.testing.assert_close(metric_of(gradients(9)), metric_of(1000 * gradients(9)))
    assert torch.equal(metric_of(torch.zeros(5, 9)), torch.eye(9))


def test_the_loss_falls_further_in_the_metric_of_the_outputs():
    """In the loss to second order, on which the rows' own errors, which are a little larger then, have no say."""
    weight, dense, pruned = problem(64, rows=50)
    moment, outputs = moment_of(dense, pruned), gradients(50, 2000)
    curvature, metric = Curvature.of(moment.hessian), metric_of(outputs)
    target = best_weight(weight, moment, curvature, Refit())
    ends = [fit(weight, moment, outputs=each)[0] for each in (None, outputs)]
    coupled, own = ([module.error_of(end, target, curvature.damped, m) for end in ends] for m in (metric, None))
    assert coupled[1] < 0.95 * coupled[0]
    assert own[1] > own[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("iterations", [0, 1, 3, 50])
@pytest.mark.parametrize("tokens", [10, 400])
def test_no_row_ends_worse_than_sparsegpt(dtype, iterations, tokens):
    """As the weights are stored: rounding to 16 bits may cost more than the fit gains."""
    weight, dense, pruned = problem(64, rows=50, tokens=tokens)
    weight, moment = weight.to(dtype), moment_of(dense, pruned)
    curvature = Curvature.of(moment.hessian)
    target = best_weight(weight.float(), moment, curvature, Refit(dense_targets=0.75))
    first = sparsegpt(target, curvature, PATTERN, None).to(dtype)
    fitted, start, end = fit(weight, moment, dense_targets=0.75, iterations=iterations)
    before, after = (row_errors(each, target, curvature.damped) for each in (first, fitted))
    assert fitted.dtype == dtype
    assert (after <= before).all()
    assert end < start if iterations else torch.equal(fitted, first)
    size = float(row_errors(torch.zeros_like(target), target, curvature.damped).sum())
    assert (start, end) == pytest.approx((float(before.sum()) / size, float(after.sum()) / size), rel=1e-5)


def test_errors_do_not_depend_on_how_a_weight_lies_in_memory():
    """A weight is compared bit for bit with its copy, and Conv1D stores it transposed."""
    weight, _, pruned = problem(72, rows=40)
    hessian = pruned @ pruned.T
    there, here = (row_errors(each, weight, hessian) for each in (weight + 1, (weight + 1).T.contiguous().T))
    assert torch.equal(there, here)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_a_fit_that_fails_keeps_sparsegpt(value, monkeypatch):
    weight, dense, pruned = problem(64)
    monkeypatch.setattr(module, "least_squares", lambda start, *_: torch.full_like(start, value))
    fitted, start, end = fit(weight, moment_of(dense, pruned))
    assert fitted.isfinite().all()
    assert end == start


def test_a_weight_that_is_worse_than_sparsegpts_is_refused(monkeypatch):
    """What is compared is the weight as it stands in the model."""
    weight, dense, pruned = problem(64)
    monkeypatch.setattr(module, "better_rows", lambda found, *_: 2 * found)
    with pytest.raises(VerificationError, match="refitting x"):
        fit(weight, moment_of(dense, pruned))


def test_more_iterations_are_never_worse():
    weight, dense, pruned = problem(96, rows=20)
    moment = moment_of(dense, pruned)
    ends = [fit(weight, moment, iterations=count, exchanges=0)[2] for count in (0, 1, 2, 5, 200)]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("pattern", [PATTERN, NMPattern(4, 8), NMPattern(1, 3)])
@pytest.mark.parametrize("at_once", [1, exchange.AT_ONCE])
def test_the_best_pair_of_each_group_changes_places(pattern, at_once, monkeypatch):
    """Against every pair of every group, tried one by one with a line search by the quadratic's own vertex."""
    monkeypatch.setattr(exchange, "AT_ONCE", at_once)
    weight, _, pruned = problem(24, rows=5)
    curvature = Curvature.of((pruned @ pruned.T).float())
    hessian = curvature.damped.double()
    start = sparsegpt(weight, curvature, pattern, None)
    gradient = (start - weight) @ curvature.damped
    found = exchange.exchanged(start, gradient, curvature, pattern, torch.ones(5))

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


def test_a_share_of_the_groups_that_gain_most():
    weight, _, pruned = problem(64, rows=20)
    curvature = Curvature.of(pruned @ pruned.T)
    start = sparsegpt(weight, curvature, PATTERN, None)
    gradient = (start - weight) @ curvature.damped
    counts = [
        ((exchange.exchanged(start, gradient, curvature, PATTERN, torch.full((20,), share)) != 0) != (start != 0))
        .sum(1).div(2)
        for share in (0.0, 0.5, 1.0)
    ]  # fmt: skip
    assert not counts[0].any()
    assert torch.equal(counts[1], (counts[2] / 2).ceil())
    assert (counts[2] > 1).any()


@pytest.mark.parametrize("pattern", [PATTERN, NMPattern(4, 8)])
def test_exchanges_lower_the_error_of_every_row_and_keep_the_pattern(pattern):
    weight, _, pruned = problem(96, rows=30)
    curvature = Curvature.of(pruned @ pruned.T)
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


# -- the walk through the layers ---------------------------------------------------------------------------------------


class Problem:
    """A dense model, and how far it is from itself once it has been pruned."""

    def __init__(self, model, plan=None, ids: Inputs | None = None) -> None:
        self.model, self.plan = model, plan or find_plan(model, PATTERN)
        self.samples = check_samples(model, zoo.token_ids(24, 16) if ids is None else ids)
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

    def refit(self, progress=None, low_memory=False, **options):
        arguments = (self.dense, self.samples, 4, Refit(**options), progress or NoProgress())
        return refit(self.model, self.plan, *arguments, low_memory=low_memory)

    def sparsegpt(self) -> float:
        update_weights(self.model, self.plan, None, self.samples, 4, CONFIG, NoProgress())
        error = self.error()
        self.reset()
        return error


def test_the_last_hidden_state_comes_closer_than_with_sparsegpt():
    problem, progress = Problem(tiny_model(layers=4), ids=zoo.tiny_ids(24, 16)), Recording()
    before = problem.sparsegpt()
    start = facts(problem.model)
    parts = problem.refit(progress)
    assert problem.error() < 0.9 * before
    assert facts(problem.model) == start
    check_pruned(problem.model, problem.plan)
    assert [part["name"] for part in parts] == [name for _, name in problem.plan.linears()]
    assert all(part["end"] < part["start"] for part in parts)
    assert sum(progress.steps) == progress.total


@pytest.mark.parametrize("option", ["dense_targets", "residual_targets"])
def test_targets_of_the_dense_model_bring_the_pruned_one_closer(option):
    problem = Problem(tiny_model(layers=4), ids=zoo.tiny_ids(24, 16))
    errors = []
    for share in (0.0, 0.5):
        problem.reset().refit(**{option: share})
        errors.append(problem.error())
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize(
    ("name", "options", "said"), [("gemma2", {}, 1), ("gemma2", {"residual_targets": 0}, 0), ("gpt2", {}, 0)]
)
def test_residual_targets_without_effect_are_said(name, options, said):
    progress = Recording()
    Problem(*zoo.planned(name), ids=zoo.token_ids(2, 8)).refit(progress, **options)
    assert sum("adds its output to the residual stream" in line for line in progress.lines) == said


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slow(but=["gpt2", "gemma2", "bert"])
def test_families_of_models(name):
    problem = Problem(*zoo.planned(name))
    before = problem.sparsegpt()
    problem.refit()
    assert problem.error() < before
    check_pruned(problem.model, problem.plan)


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.slow(but=["bart"])
def test_encoder_decoders(name):
    """The decoder of the dense model reads what the dense encoder made."""
    problem = Problem(test_seq2seq.build(name))
    before = problem.sparsegpt()
    problem.refit()
    assert problem.error() < before
    check_pruned(problem.model, problem.plan)


def test_moments_are_those_of_both_models():
    """The dense model runs with the weights from before pruning, also those of the layers that are pruned already."""
    problem = Problem(tiny_model(layers=3), ids=zoo.tiny_ids(6, 16))
    expected, found = inputs_of(problem), moments_of(problem)
    last = problem.plan.layers()[-1]
    present = inputs_of(problem, last[:1])  # of which nothing before was changed since
    for site in last[:1]:
        dense, pruned = expected[site.name], present[site.name]
        torch.testing.assert_close(found[site.name].hessian, pruned.T @ pruned, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found[site.name].shift, (dense - pruned).T @ pruned, rtol=1e-3, atol=1e-3)
    assert found[last[0].name].shift.abs().max() > 0.1


@pytest.mark.slow
def test_the_residual_moments_are_those_of_both_models():
    """The last linear's output is added to what the norm before its MLP reads, which is fixed once it is its turn."""
    problem = Problem(tiny_model(layers=3), ids=zoo.tiny_ids(6, 16))
    last = problem.plan.sites[-1]
    dense = residual_of(problem, last)
    found = moments_of(problem)
    pruned, inputs = residual_of(problem, last), inputs_of(problem, [last])[last.name]
    torch.testing.assert_close(found[last.name].residual_shift, (dense - pruned).T @ inputs, rtol=1e-3, atol=1e-3)
    assert found[last.name].residual_shift.abs().max() > 0.1
    writers = {site.name for site in problem.plan.sites if site.residual_reader}
    assert {name for name, moment in found.items() if moment.residual_shift is not None} == writers
    assert len(writers) == 6


def residual_of(problem: Problem, site: Site) -> Tensor:
    """What a site's output is added to in the model as it is, ``[tokens, hidden]``."""
    found = []
    hook = problem.model.get_submodule(site.residual_reader).register_forward_pre_hook(
        lambda _, inputs: found.append(inputs[0])
    )
    problem.hidden()
    hook.remove()
    return found[0].flatten(0, 1)


def inputs_of(problem: Problem, sites=None) -> dict[str, Tensor]:
    """What each site reads in the model as it is, ``[tokens, channels]``."""
    found: dict[str, list[Tensor]] = {}
    layer = from_model(problem.model, list(sites or problem.plan.sites), problem.samples, 4)
    module_statistics.watch_inputs(
        problem.model,
        layer,
        lambda site, inputs, _: found.setdefault(site.name, []).append(inputs.flatten(0, -2)),
        lambda *_: None,
    )
    return {name: torch.cat(parts) for name, parts in found.items()}


def in_place() -> PreTrainedModel:
    """A LLaMA that changes what one of its linears has returned."""
    model = zoo.tiny_llama(num_hidden_layers=3, vocab_size=zoo.VOCABULARY)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.SiLU(inplace=True)
    return model


PROBLEMS = {
    "llama": lambda: Problem(tiny_model(layers=3), ids=zoo.tiny_ids(6, 16)),
    "in place": lambda: Problem(in_place()),
    "gpt2": lambda: Problem(*zoo.planned("gpt2")),
    "gpt_neox": lambda: Problem(*zoo.planned("gpt_neox")),
    "bert": lambda: Problem(*zoo.planned("bert")),
    "bart": lambda: Problem(test_seq2seq.build("bart")),
    "t5": lambda: Problem(test_seq2seq.build("t5")),
    "mixtral": lambda: Problem(*unstacked("mixtral")),
    "qwen2_moe": lambda: Problem(*unstacked("qwen2_moe")),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.slow(but=["llama", "in place", "bart"])
def test_where_memory_is_short_the_result_is_the_same(name):
    """Then every run of a layer computes all of it."""
    problem, progress = PROBLEMS[name](), Recording()
    problem.refit()
    expected = {name: value.clone() for name, value in problem.model.state_dict().items()}
    problem.reset().refit(progress, low_memory=True)
    assert all(torch.equal(value, expected[name]) for name, value in problem.model.state_dict().items())
    assert sum(progress.steps) == progress.total


@pytest.mark.parametrize("name", ["llama", "t5", "mixtral"])
@pytest.mark.slow(but=["llama", "mixtral"])
def test_what_is_watched_always_runs(name):
    """No module returns what is kept of it where an expert, or a reader of the residual stream, is inside of it."""
    problem = PROBLEMS[name]()
    plan, running = problem.plan, 0
    watched = {site.residual_reader for site in plan.sites} | {each for _, each in plan.linears() if "expert" in each}
    for layer, whole in named_layers(problem.model, plan).items():
        sites = [site for site in plan.sites if site.linears[0].startswith(f"{layer}.")]
        with KeptOutputs(problem.model, layer, sites, Tensor.clone).running(torch.arange(2)):
            replaced = [name for name, part in whole.named_modules(prefix=layer) if "forward" in vars(part)]
        assert not any(each.startswith(f"{name}.") for name in replaced for each in watched)
        assert not any("expert" in name for name in replaced)
        running += len(replaced)
    assert running


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("refuses", [False, True])
def test_each_product_of_the_pruned_model_is_computed_once(low_memory, refuses, monkeypatch):
    """Once per sequence, whether sequences run together or one by one; the last linear of all has no reader."""
    problem = Problem(tiny_model(layers=3), ids=zoo.tiny_ids(6, 16))
    names = {weight: name for name, weight in problem.weights.items()}
    multiply, computed = nn.functional.linear, Counter()

    def count(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight in names and int((weight == 0).sum()) >= weight.numel() // 2:  # not the dense model's
            computed[names[weight]] += len(inputs)
        return multiply(inputs, weight, bias)

    def refuse(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if refuses and len(inputs[0]) > 1:
            raise RuntimeError("one sequence only")

    layer_modules(problem.model, problem.plan)[1].register_forward_pre_hook(refuse)
    monkeypatch.setattr(nn.functional, "linear", count)
    problem.refit(low_memory=low_memory)
    *others, last = problem.weights
    assert last not in computed
    if low_memory:
        assert min(computed[name] for name in others) == 6 < computed.total() / len(others)
    else:
        assert computed == dict.fromkeys(others, 6)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
@pytest.mark.slow
def test_experts(name):
    """Which tokens an expert's second linear reads depends on the routing; what enters the experts does not."""
    problem = Problem(*unstacked(name))
    before = problem.sparsegpt()
    shifts = shifts_of(problem)
    assert problem.error() < before
    routed = {site for site, has_shift in shifts.items() if not has_shift}
    assert routed == {site for site in shifts if ".experts." in site and site.endswith("down_proj")}
    check_pruned(problem.model, problem.plan)


@pytest.mark.slow
def test_experts_that_read_sorted_tokens_are_not_compared():
    model = tiny_architectures.build("JetMoeForCausalLM")
    unstack_experts(model)
    problem = Problem(model, ids=tiny_architectures.inputs(model))
    shifts = shifts_of(problem)
    experts = {site for site in shifts if "_linear." in site}
    assert len(experts) >= 4
    assert {site for site, has_shift in shifts.items() if not has_shift} == experts
    check_pruned(problem.model, problem.plan)


def shifts_of(problem: Problem) -> dict[str, bool]:
    """Refits, and returns site -> whether its inputs were compared with the dense model's."""
    return {site: moment.shift is not None for site, moment in moments_of(problem).items()}


def moments_of(problem: Problem) -> dict[str, Moments]:
    """Refits, and returns the moments of every site."""
    found: dict[str, Moments] = {}
    measure = module.moments

    def record(*args):
        measured = measure(*args)
        found.update(measured)
        return measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "moments", record)
        problem.refit()
    return found


def test_layers_that_share_weights():
    """Their inputs come from the whole model, the dense one with the weights from before."""
    model = zoo.tiny_llama(num_hidden_layers=4, vocab_size=zoo.VOCABULARY)
    first, last = model.model.layers[0], model.model.layers[3]
    last.self_attn, last.mlp = first.self_attn, first.mlp
    problem = Problem(model)
    before = problem.sparsegpt()
    problem.refit()
    assert problem.error() < before
    check_pruned(problem.model, problem.plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.slow(but=["dtype0"])
def test_sixteen_bits(dtype):
    problem = Problem(tiny_model(layers=4).to(dtype), ids=zoo.tiny_ids(24, 16))
    before = problem.sparsegpt()
    problem.refit()
    assert problem.error() < before
    assert {weight.dtype for weight in problem.weights.values()} == {dtype}
    check_pruned(problem.model, problem.plan)


def test_the_dense_weights_come_and_go():
    """After an interruption inside the dense model, every weight is the model's own again."""
    problem = Problem(tiny_model(layers=3), ids=zoo.tiny_ids(4, 16))
    storages = {name: weight.data_ptr() for name, weight in problem.weights.items()}
    with pytest.raises(KeyboardInterrupt):
        problem.refit(Recording(at=3, act=interrupt))
    assert {name: weight.data_ptr() for name, weight in problem.weights.items()} == storages


# -- in a recipe -------------------------------------------------------------------------------------------------------

RECONSTRUCT = {"reconstruct_epochs": 1, "reconstruct_batch_size": 4, "micro_batch_size": 4}


def compiled(recipe: str, **options):
    model, keywords = (
        tiny_model(),
        {name: options.pop(name) for name in ("progress", "resume_path", "offload") if name in options},
    )
    config = config_from({**options}, recipe)
    return compile_model(model, None, config, ids=zoo.tiny_ids(8, 16), **keywords)


def weights_of(found) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in found.model.state_dict().items()}


@pytest.mark.parametrize("layout", ["portable", "fused"])
@pytest.mark.slow(but=["fused"])
def test_a_recipe_with_refit_is_proved_and_reported(layout):
    found = compiled("heuristic,refit", layout=layout)
    assert found.report["proof"]["lowered_graph"] == "same outputs"
    (step,) = [each for each in found.report["steps"] if each["name"] == "refit"]
    assert [part["name"] for part in step["parts"]] == [name for _, name in found.plan.linears()]
    ((name, value),) = Refit().words(Outcome(parts=[{"name": "a", "start": 0.5, "end": 0.25}]))
    assert (name, value) == ("refit: error", "0.5000 to 0.2500 (mean of 1 linears)")


@pytest.mark.slow
def test_an_interrupted_recipe_continues_to_the_same_bytes(tmp_path):
    expected = weights_of(compiled("heuristic,refit,reconstruct", **RECONSTRUCT))
    path = tmp_path / "state.safetensors"
    for stage, call in (("refit", 4), ("reconstruct", 4)):
        with pytest.raises(KeyboardInterrupt):
            compiled("heuristic,refit,reconstruct", **RECONSTRUCT, resume_path=path, progress=Interrupting(stage, call))
    found = weights_of(compiled("heuristic,refit,reconstruct", **RECONSTRUCT, resume_path=path))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.slow
def test_weights_in_files_give_the_same_bytes(tmp_path):
    expected = weights_of(compiled("heuristic,refit"))
    found = weights_of(compiled("heuristic,refit", offload=OffloadFolder(tmp_path)))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize(("name", "turns"), [("llama_eager", 4), ("opt", 4), ("gpt_neox", 4), ("mixtral", 4)])
def test_a_linear_is_fitted_to_what_the_new_weights_before_it_give(name, turns):
    """Numbers tell experts apart, which share a turn; fc1 and fc2, or dense_h_to_4h and dense_4h_to_h, share none."""
    _, plan = zoo.planned(name)[:2]
    for sites in plan.layers():
        groups = sequential_groups(sites)
        assert len(groups) == turns
        if name != "mixtral":
            assert [len(group) for group in groups] == [1] * turns
