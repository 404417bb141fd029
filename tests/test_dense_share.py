"""The share of the prunable weights that stays dense: which linears it takes, and that the rest is pruned as ever."""

import pytest
import torch

from permtriton import NMPattern, config_from
from permtriton.data.samples import Samples
from permtriton.driver.pipeline import compile_model
from permtriton.errors import ConfigError
from permtriton.kernels.importance import ImportanceFactors
from permtriton.methods.measure.importance import importances_of
from permtriton.methods.measure.statistics import Curvature, site_statistics
from permtriton.methods.prune.dense_share import UPDATED_ROWS, _share_left, most_sensitive, statistics_and_shares_left
from permtriton.passes.plan import Plan, linear_module, weight_in_out
from permtriton.running.layer_walk import LayerWalk
from permtriton.util.progress import NoProgress

from . import zoo
from .zoo import find_plan

TWO_FOUR = NMPattern(2, 4)
REASON = "of the dense share: its mask would raise the loss most per weight"


def alike(model: torch.nn.Module) -> tuple[Plan, dict, dict]:
    plan = find_plan(model, TWO_FOUR)
    shapes = {name: weight_in_out(linear_module(model, name)).shape for _, name in plan.linears()}
    importances = importances_of(
        model, plan, "magnitude", {site.name: torch.ones(site.channels) for site in plan.sites}
    )
    return plan, importances, {name: torch.ones(rows) for name, (_, rows) in shapes.items()}


def sizes(model: torch.nn.Module, names: list[str]) -> int:
    return sum(linear_module(model, name).get_parameter("weight").numel() for name in names)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.9])
@pytest.mark.slow
def test_the_share_is_not_exceeded(share):
    model = zoo.build("llama")
    plan, importances, rows = alike(model)
    every = [name for _, name in plan.linears()]
    found = most_sensitive(model, plan, importances, importances, rows, share, {})
    assert sizes(model, found) <= share * sizes(model, every)
    left = share * sizes(model, every) - sizes(model, found)
    passed_over = [name for name in every if name not in found]
    assert all(sizes(model, [name]) > left for name in passed_over) or len(passed_over) == 1
    assert len(set(found)) == len(found) < len(every)


@pytest.mark.slow
@pytest.mark.parametrize("power", [1, 2])
def test_the_costliest_per_weight_come_first(power):
    """What a mask drops, squared, times how much the loss feels its row, by the definition."""
    model = zoo.build("llama")
    plan, _, rows = alike(model)
    generator = torch.Generator().manual_seed(0)
    rows = {name: torch.rand(each.shape, generator=generator) for name, each in rows.items()}
    weights = {name: weight_in_out(linear_module(model, name)) for _, name in plan.linears()}
    importances = {
        name: ImportanceFactors(power, 0.1 + torch.rand(each.shape[0], generator=generator))
        for name, each in weights.items()
    }
    costs = {}
    for name, weight in weights.items():
        scores = importances[name].scale[:, None] * weight.abs() ** power
        cost = 0.0
        for row in range(weight.shape[1]):
            for group in scores[:, row].split(4):
                dropped = group.sort().values[:2]
                cost += float(rows[name][row] * (dropped ** (2 / power)).sum())
        costs[name] = cost / weight.numel()
    found = most_sensitive(model, plan, importances, importances, rows, 0.9, {})
    assert found[:3] == sorted(costs, key=costs.__getitem__, reverse=True)[:3]
    assert found[:3] != sorted(costs)[:3]


@pytest.mark.parametrize("rows", [UPDATED_ROWS // 2, 3 * UPDATED_ROWS])
def test_what_an_update_leaves_of_the_scores(rows):
    """Nothing is mended where channels are independent, and nearly all where neighbours are almost equal."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, rows, generator=generator)
    alone = torch.randn(4000, 16, generator=generator)
    pairs = alone[:, 1::2].repeat_interleave(2, 1) + 0.03 * alone
    independent = torch.diag(1 + torch.rand(16, generator=generator))
    shares = [
        _share_left(weight, Curvature(hessian), TWO_FOUR) for hessian in (independent, alone.T @ alone, pairs.T @ pairs)
    ]
    assert shares[0] == pytest.approx(1, abs=0.02), "but for the damping"
    assert shares[1] == pytest.approx(1, abs=0.1)
    assert shares[2] > 1.5, "each of two equal channels is worth nothing alone, and both are dropped"
    assert _share_left(torch.zeros(16, rows), Curvature(independent), TWO_FOUR) == 1


def test_the_statistics_are_those_without_a_dense_share_and_hold_nothing_else():
    """A run that continues measures no shares, and its order must be the same: equal bits, by the same operations."""
    model, ids = zoo.build("llama"), Samples.of(zoo.token_ids(4, 12))
    plan = find_plan(model, TWO_FOUR)
    found, left = statistics_and_shares_left(LayerWalk(model, plan, ids, 4), NoProgress())
    expected = site_statistics(LayerWalk(model, plan, ids, 4), "obs", NoProgress())
    assert found.keys() == expected.keys()
    for name, statistic in found.items():
        assert torch.equal(statistic, expected[name])
        assert statistic.untyped_storage().nbytes() == statistic.nbytes
    assert left.keys() == {name for _, name in plan.linears()}


@pytest.mark.slow
def test_units_decide_nothing():
    """A power of 2 that moves from one linear to the next changes no output, and so no choice."""

    def dense(**factors: float) -> list[str]:
        config = config_from({"dense_share": 0.4, "importance": "ria"}, "mask")
        compiled = compile_model(zoo.rescaled(zoo.build("llama"), **factors), None, config, ids=zoo.token_ids(4, 12))
        return [name for name, why in compiled.report["skipped"].items() if why == REASON]

    assert dense() == dense(v_proj=2.0**-4, o_proj=2.0**4, up_proj=2.0**4, down_proj=2.0**-4)


def test_a_share_stays_dense_and_the_rest_is_pruned(tmp_path):
    model = zoo.build("llama")
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    every = [name for _, name in find_plan(model, TWO_FOUR).linears()]
    config = config_from({"dense_share": 0.3, "layout": "portable"}, "heuristic,refit")
    compiled = compile_model(model, None, config, ids=zoo.token_ids(4, 12))
    pruned = set(compiled.report["sparsity_by_layer"])
    dense = [name for name, why in compiled.report["skipped"].items() if why == REASON]
    assert len(dense) > 1
    assert pruned == set(every) - set(dense)
    assert set(compiled.report["sparsity_by_layer"].values()) == {0.5}
    for linear in dense:
        if (old := before.get(f"{linear}.weight")) is not None:  # an expert's weight is a part of a parameter
            weight = linear_module(model, linear).get_parameter("weight")
            assert torch.equal(weight.flatten().sort().values, old.flatten().sort().values), "only its order changed"
    assert config_from(compiled.report["config"]) == config
    assert compiled.report["seconds"]["dense share"] >= 0
    assert "dense share" in compiled.report["memory"]["estimate"]["stages"]
    ids = zoo.token_ids(2, 12)
    expected = model(ids).logits
    for form in ("dense", "packed"):
        folder = compiled.save_pretrained(tmp_path / form, format=form)
        loaded = type(model).from_pretrained(folder)
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [-0.1, 0.95, float("nan")])
def test_a_share_that_cannot_be(share):
    with pytest.raises(ConfigError, match=r"`dense_share=` is .*: expected a finite number from 0 to 0\.9"):
        config_from({"dense_share": share})
