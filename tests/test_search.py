"""A search ends no worse than it began, with what it reports, the same every time, also after an interruption."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from permtriton.errors import CalibrationError, ConfigError
from permtriton.methods.order import searched as file
from permtriton.running.resume import StateFile
from permtriton.util.permutation import is_permutation, moved

from . import zoo
from .expert_stacks import unstacked
from .learning import Counting, stop, unchanged
from .runs import Order
from .searching import Problem, planted

MINE = {"weights": "mine"}  # what identifies a run
SEQUENCES, STEP = 8, 4  # of the problem, and of a micro batch
STEPS = SEQUENCES // STEP  # of the pass before the search, and of every round


@pytest.fixture(scope="module")
def given() -> Problem:
    return planted()


@pytest.fixture(scope="module")
def result(given) -> Order:
    return given.search()


@pytest.mark.parametrize("options", [{}, {"seed": 3, "micro_batch_size": 3}])
def test_the_loss_falls_to_what_is_reported(given, options):
    with unchanged(given.model):
        found = given.search(**options)
    losses = [each.loss for each in found.history]
    assert all(after <= before for before, after in pairwise(losses))
    assert losses[-1] < 0.9 * losses[0]
    assert given.loss({}) == pytest.approx(losses[0], rel=1e-6)
    assert given.loss(found.indices) == pytest.approx(losses[-1], rel=1e-6)
    assert [each.round for each in found.history] == list(range(len(losses)))


def test_indices_are_permutations_inside_segments(given, result):
    assert result.indices.keys() == {space.name for space in given.spaces}
    for space in given.spaces:
        index = result.indices[space.name]
        owner = torch.repeat_interleave(torch.arange(len(space.segments)), torch.tensor(space.segments))
        assert index.dtype == torch.int64
        assert is_permutation(index)
        assert torch.equal(owner[index], owner)
    assert result.history[-1].moved == sum(moved(index) for index in result.indices.values()) > 0


def test_a_round_swaps_each_group_at_most_once(given):
    found = given.search(search_rounds=1)
    (first,) = found.history[1:]
    assert first.moved == 2 * first.swaps > 0
    for index in found.indices.values():
        groups = (index != torch.arange(index.numel())).view(-1, 4).sum(1)
        assert groups.max() <= 1


@pytest.mark.slow
def test_the_same_seed_gives_the_same_order(given, result):
    assert given.search().same(result)


@pytest.mark.slow
def test_a_start_that_nothing_betters_is_kept(given, monkeypatch):
    """Every order but the first is made to look worse."""
    seen = []
    monkeypatch.setattr(file.Searcher, "loss", lambda searcher, indices: seen.append(indices) or float(len(seen)))
    found = given.search(search_rounds=9)
    assert [each.trials for each in found.history] == [0, file.TRIALS, file.TRIALS]
    assert not any(moved(index) for index in found.indices.values())


def test_experts_that_no_token_visits_keep_their_order():
    model, plan = unstacked("mixtral")
    given = Problem(model, plan, zoo.token_ids(1, 1))
    found = given.search(search_rounds=1)
    still = {name for name, index in found.indices.items() if ".experts." in name and not moved(index)}
    assert len(still) >= zoo.LAYERS * (5 - 2)
    assert found.history[-1].loss < found.history[0].loss


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_refused(given):
    damaged = planted()
    nn.init.constant_(damaged.model.model.norm.weight, float("inf"))
    with pytest.raises(CalibrationError):
        damaged.search()


def test_nothing_to_search_is_a_clear_error(given):
    frozen = planted()
    for space in frozen.plan.spaces:
        space.freeze("a test")
    with pytest.raises(ConfigError, match="no permutation is left to search"):
        frozen.search()


@pytest.mark.parametrize("rounds", [1, *(pytest.param(rounds, marks=pytest.mark.slow) for rounds in (0, 3))])
def test_an_interrupted_search_continues_to_the_same_end(given, result, tmp_path, rounds):
    """After as many rounds as were stored."""
    path = tmp_path / "state.safetensors"
    progress = Counting(STEPS + 1 + rounds * STEPS + 1, stop(KeyboardInterrupt()))
    with unchanged(given.model), pytest.raises(KeyboardInterrupt):
        given.search(progress, StateFile(path, MINE))
    assert path.is_file() == (rounds > 0)
    progress = Counting()
    continued = given.search(progress, StateFile(path, MINE))
    left = len(result.history) - 1 - rounds
    assert progress.steps[STEPS:] == [rounds * SEQUENCES, *[STEP] * (left * STEPS)]
    assert continued.same(result)
    assert len(result.history) > 4


def test_a_finished_search_is_not_run_again(given, tmp_path):
    state = StateFile(tmp_path / "state.safetensors", MINE)
    whole = given.search(state=state, search_rounds=2)
    progress = Counting()
    again = given.search(progress, state, search_rounds=2)
    assert progress.steps[STEPS:] == [2 * SEQUENCES]
    assert again.same(whole)
    assert again.history == whole.history, "to the second"
