"""Masks written into weights are the N:M masks of the present order; gradients are autograd's; the model comes back."""

import copy

import pytest
import torch
from torch import Tensor

from benchmarks.known_run import Known
from permtriton import NMPattern, config_from
from permtriton.data.samples import Samples
from permtriton.kernels import nm_mask as kernel
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.kernels.swap_gains import RankOneCurvature
from permtriton.methods.measure.importance import importances_of
from permtriton.methods.measure.losses import Objective, dense_objective, has_head
from permtriton.methods.order.hard_masks import hard_masked
from permtriton.model.forward import last_hidden_state
from permtriton.passes.plan import Plan, linear_module, weight_in_out
from permtriton.util.permutation import identity

from . import zoo
from .expert_stacks import unstacked
from .kernel_inputs import TWO_FOUR, rng
from .updating import facts
from .zoo import find_plan

IDS = zoo.token_ids(5, 7)


class Given:
    """A model with every argument that `hard_masked` takes."""

    def __init__(self, name: str, pattern: NMPattern = TWO_FOUR, method: str = "wanda", **changes: object) -> None:
        if name in zoo.MIXTURES:
            self.model, self.plan = unstacked(name)
        elif pattern == TWO_FOUR and not changes:
            self.model, self.plan = zoo.planned(name)
        else:
            self.model = zoo.build(name, **changes)
            self.plan = find_plan(self.model, pattern, layout="portable")
        self.pattern = pattern
        statistics = {site.name: torch.rand(site.channels, generator=rng(site.channels)) for site in self.plan.sites}
        self.importances = importances_of(self.model, self.plan, method, statistics)
        self.curvatures = {}
        for _, linear in self.plan.linears():
            channels, rows = self.weight(linear).shape
            self.curvatures[linear] = RankOneCurvature(torch.ones(rows), torch.ones(channels))

    def weight(self, linear: str) -> Tensor:
        return weight_in_out(linear_module(self.model, linear))

    def masked(self, objective: Objective | None = None, ids: Tensor = IDS, **options: object):
        """Without an objective, no loss is measured."""
        objective = objective or Objective("cosine", self.model, Samples.of(ids), torch.empty(0))
        config = config_from({"sparsity": str(self.pattern), "micro_batch_size": 2, **options})
        run = Known(self.model, self.plan, Samples.of(ids), config, importances=self.importances)
        return hard_masked(run, self.model, objective, self.curvatures)

    def expected(self, indices: dict[str, Tensor]) -> dict[str, Tensor]:
        """Linear name -> masked weight in base order, ``[in_features, out_features]``."""
        return expected_weights(self.model, self.plan, self.importances, indices, self.pattern)


def expected_weights(model, plan: Plan, importances, indices, pattern) -> dict[str, Tensor]:
    found = {}
    for site, name in plan.linears():
        index = site.expand(indices[site.space.name]) if site.space.name in indices else identity(site.channels)
        weight = weight_in_out(linear_module(model, name)).clone()
        mask = torch.empty_like(weight, dtype=torch.bool)
        mask[index] = top_n_mask(importances[name].scores(weight)[index], pattern)
        found[name] = torch.where(mask, weight, 0)
    return found


@pytest.mark.parametrize("method", ["wanda", "ria", "obs"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "bert"])
def test_weights_are_masked_in_the_present_order(name, method):
    given = Given(name, method=method)
    for indices in (zoo.random_indices(given.plan), {}, zoo.random_indices(given.plan, 5)):
        expected = given.expected(indices)
        with given.masked() as masks:
            masks.set(indices)
            for linear, weight in expected.items():
                assert torch.equal(given.weight(linear), weight), linear


def test_heads_that_hold_no_whole_groups_are_masked_across_heads(monkeypatch):
    monkeypatch.setattr(kernel, "TILE", 1)
    given = Given("llama", NMPattern(4, 8), head_dim=12)
    assert any(space.frozen for space in given.plan.spaces)
    indices = zoo.random_indices(given.plan)
    expected = given.expected(indices)
    with given.masked() as masks:
        masks.set(indices)
        assert all(torch.equal(given.weight(linear), weight) for linear, weight in expected.items())


def mean_gradients(given: Given, objective, indices: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over all sequences at once and its gradients by the masked weights, on a copy of the model."""
    model = copy.deepcopy(given.model)
    for linear, weight in given.expected(indices).items():
        weight_in_out(linear_module(model, linear)).copy_(weight)
    loss = objective.loss(last_hidden_state(model, Samples.of(IDS)), torch.arange(IDS.shape[0]))
    weights = {linear: linear_module(model, linear).weight for linear in given.curvatures}
    grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return loss.item(), dict(zip(weights, grads, strict=True))


@pytest.mark.parametrize(("micro", "name"), [(1, "gpt2"), (3, "llama"), (3, "mixtral")])
def test_gradients_are_those_of_the_mean_loss(name, micro):
    given = Given(name)
    objective = dense_objective(given.model, "kl" if has_head(given.model) else "cosine", Samples.of(IDS), 2)
    indices = zoo.random_indices(given.plan)
    mean, expected = mean_gradients(given, objective, indices)
    with given.masked(objective, micro_batch_size=micro, activation_checkpointing=micro == 3) as masks:
        masks.set(indices)
        for _ in range(2):  # the second does not add to the first
            assert masks.take_gradients() == pytest.approx(mean, rel=1e-4)
        assert masks.loss() == pytest.approx(mean, rel=1e-4)
        for (linear, grad), held in zip(expected.items(), masks._linears, strict=True):
            assert held.parameter.grad is None
            if grad is None:
                assert not held.total.any()
                continue
            bound = 1e-4 * grad.abs().max().item()
            torch.testing.assert_close(held.total, held.out_in(grad), rtol=1e-3, atol=bound, msg=linear)
        assert any(grad is not None and grad.any() for grad in expected.values())
        masks.drop_gradients()
        assert all(linear.gradient is None for linear in masks._linears)


def test_an_expert_that_no_token_visits_has_no_gradient():
    given = Given("mixtral")
    objective = dense_objective(given.model, "kl", Samples.of(IDS[:1, :1]), 1)
    with given.masked(objective, IDS[:1, :1]) as masks:
        masks.set({})
        masks.take_gradients()
        idle = [linear for linear in masks._linears if not linear.total.any()]
    assert len(idle) == 2 * zoo.LAYERS * (5 - 2)


@pytest.mark.parametrize(("name", "error"), [("gpt2", None), ("mixtral", KeyboardInterrupt)])
def test_the_model_comes_back(name, error):
    """To the bit, in the same storage, also after an error between masking and gradients."""
    given = Given(name)
    objective = dense_objective(given.model, "kl", Samples.of(IDS), 2)
    next(given.model.parameters()).requires_grad_(False)
    first = next(iter(given.curvatures))
    linear_module(given.model, first).weight.requires_grad_(False)
    before, tensors = facts(given.model), copy.deepcopy(given.model.state_dict())
    try:
        with given.masked(objective) as masks:
            masks.set(zoo.random_indices(given.plan))
            masks.take_gradients()
            assert not torch.equal(tensors[f"{first}.weight"], linear_module(given.model, first).weight)
            if error:
                raise error
    except KeyboardInterrupt:
        assert error
    assert facts(given.model) == before
    assert all(torch.equal(tensors[key], tensor) for key, tensor in given.model.state_dict().items())
