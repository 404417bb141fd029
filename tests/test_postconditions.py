"""Faults that leave a consistent model and throw the quality away are refused, not only those that change outputs."""

import dataclasses

import pytest
from torch import Tensor

import permtriton
from permtriton import config_from
from permtriton.driver import run
from permtriton.driver.pipeline import compile_model
from permtriton.errors import VerificationError
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.methods.order import learning
from permtriton.methods.order.learning import learn
from permtriton.methods.prune import weights
from permtriton.passes.edits import moves_of
from permtriton.util.permutation import compose, inverse

from . import zoo

HEURISTIC = {"recipe": "heuristic,mask", "importance": "wanda"}
LEARNED = {
    "recipe": "heuristic,learned,mask", "learn_epochs": 2, "learn_batch_size": 4, "learn_learning_rate": 0.1,
    "learn_block_size": 16,
}  # fmt: skip
layouts = pytest.mark.parametrize("layout", ["portable", "fused"])


def compiled(name: str = "llama", **options: object) -> permtriton.CompiledModel:
    return compile_model(zoo.build(name), None, config_from(options), ids=zoo.token_ids())


def with_other_indices(change):
    """What `moves_of` returns when every index is another one than was found."""
    return lambda plan, indices: moves_of(plan, {k: change(v) for k, v in indices.items()})


@layouts
def test_an_order_that_is_not_the_one_found_is_refused(layout, monkeypatch):
    monkeypatch.setattr(run, "moves_of", with_other_indices(lambda index: compose(index, index)))
    said = {"portable": "not in the order that the plan says", "fused": "retain an importance"}
    with pytest.raises(VerificationError, match=said[layout]):
        compiled(layout=layout, **HEURISTIC)


@layouts
def test_statistics_that_stay_behind_are_refused(layout, monkeypatch):
    monkeypatch.setattr(run, "reorder_statistics", lambda statistics, moves: dict(statistics))
    with pytest.raises(VerificationError, match="retain an importance"):
        compiled(layout=layout, **HEURISTIC)


def test_statistics_of_another_order_are_refused(monkeypatch):
    def rolled(statistics, moves):
        moved = reorder(statistics, moves)
        return {name: statistic.roll(1) for name, statistic in moved.items()}

    reorder = run.reorder_statistics
    monkeypatch.setattr(run, "reorder_statistics", rolled)
    with pytest.raises(VerificationError, match="retain an importance"):
        compiled(**HEURISTIC)


def smallest(scores: Tensor, pattern: permtriton.NMPattern) -> Tensor:
    return top_n_mask(-scores, pattern)


def one_of_four(scores: Tensor, pattern: permtriton.NMPattern) -> Tensor:
    return top_n_mask(scores, dataclasses.replace(pattern, kept=1))


@pytest.mark.parametrize(("mask", "named"), [(smallest, "retain an importance"), (one_of_four, "keep fewer weights")])
def test_a_mask_that_keeps_too_little_is_refused(mask, named, monkeypatch):
    monkeypatch.setattr(weights, "top_n_mask", mask)
    with pytest.raises(VerificationError, match=named):
        compiled(**HEURISTIC)


@layouts
@pytest.mark.slow
def test_a_learned_order_that_is_not_the_one_measured_is_refused(layout, monkeypatch):
    def learn_another(*arguments, **options):
        learned = learn(*arguments, **options)
        assert learned.kept > 0
        learned.indices = {name: inverse(index) for name, index in learned.indices.items()}
        return learned

    assert compiled(layout=layout, **LEARNED).report["steps"][1]["kept"] is not None
    monkeypatch.setattr(learning, "learn", learn_another)
    with pytest.raises(VerificationError, match=r"loss \(calibration"):
        compiled(layout=layout, learn_keep="last", **LEARNED)


def test_what_is_right_passes():
    config = config_from({"recipe": "heuristic,mask", "importance": "wanda", "layout": "fused"})
    compile_model(zoo.build("llama"), None, config, ids=zoo.token_ids())


@pytest.mark.slow
def test_what_is_learned_right_passes_in_bfloat16():
    config = config_from(LEARNED)
    compile_model(zoo.build("llama").bfloat16(), None, config, ids=zoo.token_ids())
