"""An interrupted search continues to the same end."""

import pytest

from permtriton.running.resume import StateFile

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
