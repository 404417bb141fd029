"""Weights of rows decide the heuristic order, and nothing else."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from permtriton import config_from
from permtriton.driver.pipeline import compile_model
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.methods.measure.importance import retained
from permtriton.methods.order.heuristic import heuristic_index, space_scores
from permtriton.passes.plan import ChannelSpace, Plan, Site

from . import zoo
from .kernel_inputs import TWO_FOUR, rng
from .learning import Counting

CHANNELS = 16


class Linears(nn.Module):
    """Two linears of different sizes on one site."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(CHANNELS, 6), nn.Linear(CHANNELS, 40)
        self.small.weight.data = torch.randn(6, CHANNELS, generator=rng(1))
        self.large.weight.data = torch.randn(40, CHANNELS, generator=rng(2))


SPACE = ChannelSpace("space", (CHANNELS,), ())
SITE = Site("both", ("small", "large"), CHANNELS, torch.arange(CHANNELS), SPACE)
PLAN = Plan([SITE], [SPACE], dict.fromkeys(SITE.linears, TWO_FOUR))


def importances(power: int = 1) -> dict[str, ImportanceFactors]:
    return {name: ImportanceFactors(power, torch.rand(CHANNELS, generator=rng(5)) + 0.5) for name in SITE.linears}


def weights(**rows: Tensor) -> dict[str, Tensor]:
    return {"small": torch.rand(6, generator=rng(3)), "large": torch.rand(40, generator=rng(4)), **rows}


def plain(name: str, power: int) -> Tensor:
    return importances(power)[name].scores(Linears().get_parameter(f"{name}.weight").detach().t())


def order(row_weights: dict[str, Tensor] | None, plan: Plan = PLAN) -> Tensor:
    scores = space_scores(Linears(), plan.sites, importances(), row_weights)
    return heuristic_index(SPACE, scores, TWO_FOUR, lambda *_: None)


def test_a_factor_per_row_changes_no_mask():
    given = weights()
    found = space_scores(Linears(), [SITE], importances(), given).split((6, 40), 1)
    for name, scores in zip(SITE.linears, found, strict=True):
        assert torch.equal(top_n_mask(scores, TWO_FOUR), top_n_mask(plain(name, 1), TWO_FOUR))


def test_the_heavy_row_decides_the_order():
    """Only one row counts: its largest scores are spread over the groups, and all of what it can keep is kept."""
    for row in (0, 4):
        heavy = torch.full((6,), 1e-12)
        heavy[row] = 1.0
        index = order({"small": heavy, "large": torch.zeros(40)})
        scores = plain("small", 1)[:, row : row + 1]
        best = scores.flatten().topk(CHANNELS // 2).values.sum().item()
        assert retained(scores, index, TWO_FOUR) == pytest.approx(best, rel=1e-3)
        assert retained(scores, torch.arange(CHANNELS), TWO_FOUR) < 0.99 * best
    assert not torch.equal(order(None), index)


def test_rows_that_the_loss_does_not_feel_are_no_error():
    """As of an expert that no token visits: alone it keeps its order, beside another linear it does not count."""
    nothing = {"small": torch.zeros(6), "large": torch.zeros(40)}
    assert torch.equal(order(nothing), torch.arange(CHANNELS))
    with_large = order(weights(small=torch.zeros(6)))
    plan = Plan([replace(SITE, linears=("large",))], [SPACE], {"large": TWO_FOUR})
    alone = order(weights(), plan)
    assert torch.equal(with_large, alone)
    assert not torch.equal(alone, torch.arange(CHANNELS))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.slow
def test_compile_weighs_rows_only_if_asked(name):
    """With one token, most experts are never visited."""
    indices = {}
    for rows in ("fisher", "none"):
        config = config_from({"recipe": "heuristic,mask", "heuristic_row_weights": rows})
        compiled = compile_model(zoo.build(name), None, config, ids=zoo.token_ids(1, 2), progress=Counting())
        indices[rows] = compiled.indices
    assert any(not torch.equal(index, indices["none"][space]) for space, index in indices["fisher"].items())
