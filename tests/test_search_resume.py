"""An interrupted search continues to the same end; a damaged state and one of another run are refused by name."""

import pytest

import permtriton
from permtriton import config_from
from permtriton.driver.pipeline import compile_model
from permtriton.errors import OutputError
from permtriton.running.state import StateFile

from . import zoo
from .learning import Counting, plant, stop, tiny, unchanged
from .runs import Order
from .searching import OPTIONS, Problem, planted

MINE, ANOTHER = {"weights": "mine"}, {"weights": "another's"}  # what identifies a run
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
    state.delete()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["another run", "garbage"])
def test_a_state_that_does_not_belong_is_refused(given, tmp_path, content):
    path = tmp_path / "state.safetensors"
    if content == "garbage":
        path.write_bytes(b"garbage" * 9)
    else:
        given.search(state=StateFile(path, ANOTHER), search_rounds=1)
    words = "model is another one" if content == "another run" else "is damaged: it is not a whole safetensors file"
    with unchanged(given.model), pytest.raises(OutputError, match=f"{words}.*`restart=True`"):
        given.search(state=StateFile(path, MINE))


@pytest.mark.slow
def test_compile_continues_only_an_equal_compilation(tmp_path):
    def run(changes: dict[str, object], **more: object) -> permtriton.CompiledModel:
        config = config_from({**OPTIONS, "search_rounds": 2, **changes})
        return compile_model(plant(tiny(num_hidden_layers=1)), None, config, ids=zoo.tiny_ids(4, 8), **more)

    path = tmp_path / "state.safetensors"
    first = run({}, resume_path=path)
    assert [each.name for each in tmp_path.iterdir()] == ["state.searched.safetensors"]
    again = run({}, resume_path=path)
    assert again.report["steps"] == first.report["steps"], "to the second: it was not run again"
    with pytest.raises(OutputError, match=r"search_damping was 4\.0 and is 1\.0; seed was 0 and is 1"):
        run({"search_damping": 1.0, "seed": 1}, resume_path=path)
