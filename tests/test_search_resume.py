"""An interrupted search continues to the same end; a damaged state and one of another run are refused by name."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import permtriton
from permtriton import config_from
from permtriton.driver.pipeline import compile_model
from permtriton.errors import OutputError, VerificationError
from permtriton.methods.order import swap_search
from permtriton.methods.order.swap_search import SearchedOrder, SearchFile, search
from permtriton.util.permutation import inverse

from . import zoo
from .learning import Counting, plant, stop, tiny, unchanged
from .searching import OPTIONS, Problem, planted, same

MINE, ANOTHER = {"weights": "mine"}, {"weights": "another's"}  # what identifies a run
SEQUENCES, STEP = 8, 4  # of the problem, and of a micro batch
STEPS = SEQUENCES // STEP  # of the pass before the search, and of every round


@pytest.fixture(scope="module")
def given() -> Problem:
    return planted()


@pytest.fixture(scope="module")
def result(given) -> SearchedOrder:
    return given.search(search_block=16)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_an_interrupted_search_continues_to_the_same_end(given, result, tmp_path, rounds):
    """After as many rounds as were stored; each round's random blocks are those of the whole run."""
    path = tmp_path / "state.safetensors"
    progress = Counting(STEPS + 1 + rounds * STEPS + 1, stop(KeyboardInterrupt()))
    with unchanged(given.model), pytest.raises(KeyboardInterrupt):
        given.search(progress, SearchFile(path, MINE), search_block=16)
    assert path.is_file() == (rounds > 0)
    progress = Counting()
    continued = given.search(progress, SearchFile(path, MINE), search_block=16)
    left = len(result.history) - 1 - rounds
    assert progress.steps[STEPS:] == [rounds * SEQUENCES, *[STEP] * (left * STEPS)]
    assert same(continued, result)
    assert len(result.history) > 4


def test_a_finished_search_is_not_run_again(given, tmp_path):
    state = SearchFile(tmp_path / "state.safetensors", MINE)
    whole = given.search(state=state, search_rounds=2)
    progress = Counting()
    again = given.search(progress, state, search_rounds=2)
    assert progress.steps[STEPS:] == [2 * SEQUENCES]
    assert same(again, whole)
    assert again.history == whole.history, "to the second"
    state.delete()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["another run", "garbage"])
def test_a_state_that_does_not_belong_is_refused(given, tmp_path, content):
    path = tmp_path / "state.safetensors"
    if content == "garbage":
        path.write_bytes(b"garbage" * 9)
    else:
        given.search(state=SearchFile(path, ANOTHER), search_rounds=1)
    words = "model is another one" if content == "another run" else "is damaged: it is not a whole safetensors file"
    with unchanged(given.model), pytest.raises(OutputError, match=f"{words}.*`restart=True`"):
        given.search(state=SearchFile(path, MINE), search_block=16)


def history(change):
    def edit(metadata: dict[str, str]) -> None:
        rounds = json.loads(metadata["history"])
        change(rounds)
        metadata["history"] = json.dumps(rounds)

    return edit


DAMAGE = {
    "an index is missing": (lambda t: t.pop("stream"), None, "stream is missing"),
    "a space too many": (lambda t: t.update(other=torch.arange(4)), None, "other does not belong"),
    "an index is too short": (lambda t: t.update(stream=torch.arange(5)), None, "stream is torch.int64 of shape .5."),
    "an index is a number": (lambda t: t.update(stream=torch.tensor(32)), None, "stream is torch.int64 of shape ..,"),
    "an index is no permutation": (lambda t: t["stream"].zero_(), None, "stream is not a permutation"),
    "an index of other numbers": (lambda t: t.update(stream=t["stream"].float()), None, "stream is torch.float32"),
    "a round is missing": (None, history(lambda rounds: rounds.pop(1)), "not numbered from 0"),
    "no round": (None, history(lambda rounds: rounds.clear()), "at least one"),
    "a round of 999": (None, history(lambda rounds: rounds[-1].update(round=999)), "not numbered from 0"),
    "more rounds than there are": (
        None,
        history(lambda rounds: rounds.append({**rounds[-1], "round": 3})),
        "reaches round 3, but this run has only 2",
    ),
    "a negative count": (None, history(lambda rounds: rounds[1].update(moved=-1)), "it holds -1"),
    "a loss that is no number": (None, history(lambda rounds: rounds[1].update(loss="0.1")), r"\[1\].loss is '0.1'"),
    "an infinite loss": (None, history(lambda rounds: rounds[1].update(loss=float("inf"))), r"\[1\].loss is inf"),
    "a field too many": (None, history(lambda rounds: rounds[0].update(colour=1)), r"\[0\].colour is unknown"),
    "a field is missing": (None, history(lambda rounds: rounds[0].pop("loss")), r"\[0\].loss is missing"),
    "no history": (None, lambda m: m.pop("history"), "history cannot be read"),
    "a history that is no list": (None, lambda m: m.update(history="7"), "history: it is 7, expected a valid list"),
    "not said whether finished": (None, lambda m: m.pop("finished"), "its finished cannot be read"),
    "not finished after the last round": (None, lambda m: m.update(finished="false"), "finished is False"),
    "finished is a number": (None, lambda m: m.update(finished="1"), "finished: it is 1, expected a valid boolean"),
    "not said whose it is": (None, lambda m: m.pop("inputs"), "its inputs cannot be read"),
    "inputs that are no JSON": (None, lambda m: m.update(inputs="{"), "its inputs cannot be read"),
    "inputs without the weights": (None, lambda m: m.update(inputs='{"machine": "cpu"}'), r"inputs\.\w+ is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.slow(
    but=[
        "an index is missing",
        "an index is no permutation",
        "a round is missing",
        "a loss that is no number",
        "inputs without the weights",
        "no history",
        "a space too many",
    ]
)
def test_a_damaged_state_is_refused_by_name(given, tmp_path, name):
    path = tmp_path / "state.safetensors"
    given.search(state=SearchFile(path, MINE), search_rounds=2)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    tensor_change, text_change, words = DAMAGE[name]
    for change, target in ((tensor_change, tensors), (text_change, metadata)):
        if change:
            change(target)
    save_file(tensors, path, metadata)
    before = path.read_bytes()
    with pytest.raises(OutputError, match=words) as caught:
        given.search(state=SearchFile(path, MINE), search_rounds=2)
    assert str(path) in str(caught.value)
    assert "delete the file" in str(caught.value)
    assert path.read_bytes() == before


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


def compiled(name: str, layout: str, **options: object) -> permtriton.CompiledModel:
    config = config_from({**OPTIONS, "search_rounds": 2, "layout": layout, **options})
    return compile_model(zoo.build(name), None, config, ids=zoo.token_ids(4, 12))


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", "portable"), ("llama", "fused"), ("gpt2", "fused"), ("bert", "portable"), ("mixtral", "portable")],
)
@pytest.mark.slow(but=["llama-fused"])
def test_what_is_searched_right_passes(name, layout):
    """The promise is checked: the loss and the retained importance are those that the search measured."""
    found = compiled(name, layout)
    report = json.loads(json.dumps(found.report, allow_nan=False))
    _, searched, _ = report["steps"]
    assert searched["history"][-1]["loss"] < searched["history"][0]["loss"]


@pytest.mark.parametrize("layout", ["portable", "fused"])
@pytest.mark.slow(but=["fused"])
def test_an_order_that_is_not_the_one_measured_is_refused(layout, monkeypatch):
    def search_another(*arguments, **options) -> SearchedOrder:
        found = search(*arguments, **options)
        right, found.indices = found.indices, {name: inverse(index) for name, index in found.indices.items()}
        assert any(not torch.equal(index, right[name]) for name, index in found.indices.items())
        return found

    monkeypatch.setattr(swap_search, "search", search_another)
    with pytest.raises(VerificationError, match=r"loss \(calibration"):
        compiled("gpt2" if layout == "portable" else "llama", layout, search_rounds=5)
