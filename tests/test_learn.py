"""Learning finds better orders, keeps the epoch that it should, and gives the same result for the same seed."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaModel

import permtriton
from permtriton.driver.pipeline import compile_model
from permtriton.errors import ConfigError
from permtriton.util.permutation import is_permutation, moved

from . import zoo
from .learning import CPU, PATTERN, QUICK, tiny
from .zoo import find_plan

# -- what it finds -------------------------------------------------------------------------------------------------


def test_learning_beats_the_base_order_and_moves_channels(problem):
    result = problem.learn(replace(QUICK, epochs=8))
    base, kept = result.history[0], result.history[result.kept]
    assert kept.loss < 0.9 * base.loss
    assert result.kept > 0
    assert kept.moved == sum(moved(index) for index in result.indices.values()) > 0


def test_the_losses_are_those_of_the_hard_permutations(problem):
    result = problem.learn()
    assert result.history[0].loss == pytest.approx(problem.hard_loss({}), rel=1e-4)
    assert result.history[result.kept].loss == pytest.approx(problem.hard_loss(result.indices), rel=1e-4)


def test_indices_are_permutations_inside_their_blocks(problem):
    result = problem.learn(replace(QUICK, init="random", keep="last"))
    assert set(result.indices) == {space.name for space in problem.plan.spaces}
    for space in problem.plan.spaces:
        index = result.indices[space.name]
        assert index.dtype == torch.int64
        for start, size in space.blocks(QUICK.block_size):
            assert is_permutation(index[start : start + size] - start)


def test_the_best_epoch_is_kept_and_never_one_worse_than_the_base(problem):
    result = problem.learn(replace(QUICK, init="random", learning_rate=0.5, epochs=4))
    losses = [epoch.loss for epoch in result.history]
    assert [epoch.epoch for epoch in result.history] == [0, 1, 2, 3, 4]
    assert losses[result.kept] == min(losses)


def test_the_last_epoch_is_kept_though_an_earlier_one_is_better(problem):
    result = problem.learn(replace(QUICK, keep="last", gradient="published", tau_end=0.1))
    losses = [epoch.loss for epoch in result.history]
    assert losses[result.kept] == losses[-1] > min(losses)
    assert losses[-1] == pytest.approx(problem.hard_loss(result.indices), rel=1e-4)


def test_the_published_temperature_is_that_of_the_epoch(problem):
    """And is not at its end in the last one: 0.118 after 50 epochs."""
    taus = [epoch.tau for epoch in problem.learn(replace(QUICK, tau_falls="epoch", tau_end=0.1)).history]
    assert taus == pytest.approx([1.0, 0.7, 0.4, 0.4])


def test_what_the_clamp_stops_still_learns(problem):
    relaxation = replace(QUICK, clamp=0.01).relaxation(QUICK.spaces(problem.plan), 0, CPU)
    relaxation.soft(0.5)[0][:, 0, 1].sum().backward()
    assert float(relaxation.weights[0].grad.abs().max()) > 0


@pytest.mark.parametrize("last", [1, 2, 9])
def test_last_layers_learn_and_the_others_stay(problem, last):
    options = replace(QUICK, layers=f"last:{last}", init="random", keep="last", epochs=1)
    names = {space.name for space in problem.plan.spaces}
    expected = {name for name in names if "layers.1." in name} if last == 1 else names
    assert {space.name for space in options.spaces(problem.plan)} == expected
    result = problem.learn(options)
    assert set(result.indices) == expected
    assert result.history[-1].loss == pytest.approx(problem.hard_loss(result.indices), rel=1e-4)


@pytest.mark.slow
def test_a_model_whose_channels_may_not_move_is_a_clear_error():
    """A headless model's stream is its output, heads of 6 hold no whole groups, and nothing else is pruned."""
    model = tiny(model_class=LlamaModel, hidden_size=24, intermediate_size=30)
    options = {"skip_indivisible": True, "learn_epochs": 1, "learn_batch_size": 4, "micro_batch_size": 4}
    config = permtriton.config_from(options, "heuristic,learned,mask")
    assert all(space.frozen for space in find_plan(model, PATTERN, skip_indivisible=True).spaces)
    with pytest.raises(ConfigError, match=r"none of this model's channels may move .* remove the step learned"):
        compile_model(model, None, config, ids=zoo.tiny_ids(4, 8))


# -- the same seed, the same result --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_seed_decides_everything(problem):
    runs = [problem.learn(replace(QUICK, init="random", keep="last"), seed) for seed in (3, 3, 4)]
    assert runs[0].same(runs[1])
    assert [epoch.loss for epoch in runs[0].history[1:]] != [epoch.loss for epoch in runs[2].history[1:]]
    assert not runs[0].same_indices(runs[2])
