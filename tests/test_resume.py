"""An interrupted run continues to the same end, and a saved state of another run is refused."""

from dataclasses import replace

import pytest

import permtriton
from permtriton.driver.pipeline import compile_model
from permtriton.errors import OutputError, PermTritonError
from permtriton.running.resume import StateFile

from . import zoo
from .learning import QUICK, STEPS, Counting, plant, stop, tiny, unchanged
from .updating import Recording

MINE, ANOTHER = {"weights": "mine"}, {"weights": "another's"}  # what identifies a run
FISHER = 2  # steps of the pass before learning, on 4 sequences each
IN_EPOCH_3 = FISHER + 1 + 2 * STEPS + 1  # the first call reports what was done before


@pytest.mark.parametrize(
    ("init", "keep"), [("identity", "best"), pytest.param("random", "last", marks=pytest.mark.slow)]
)
def test_an_interrupted_run_continues_to_the_same_end(problem, tmp_path, keep, init):
    options, path = replace(QUICK, epochs=4, keep=keep, init=init), tmp_path / "state.safetensors"
    whole = problem.learn(options)
    interrupted = Counting(IN_EPOCH_3, stop(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        problem.learn(options, progress=interrupted, resume=StateFile(path, MINE))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    progress = Counting()
    continued = problem.learn(options, progress=progress, resume=StateFile(path, MINE))
    assert progress.steps[FISHER:] == [2 * STEPS] + [1] * (2 * STEPS), "two epochs were left"
    assert continued.same(whole)
    assert whole.history[2].moved > 0, "there was something to continue from"


def test_a_finished_run_is_not_run_again(problem, tmp_path):
    resume = StateFile(tmp_path / "state.safetensors", MINE)
    whole = problem.learn(resume=resume)
    progress = Counting()
    again = problem.learn(progress=progress, resume=resume)
    assert progress.steps[FISHER:] == [QUICK.epochs * STEPS]
    assert again.same(whole)


@pytest.mark.parametrize("content", ["another run", "garbage", "empty"])
def test_a_state_that_does_not_belong_is_refused(problem, tmp_path, content):
    path = tmp_path / "state.safetensors"
    if content == "another run":
        problem.learn(replace(QUICK, epochs=1), seed=9, resume=StateFile(path, ANOTHER))
    else:
        path.write_bytes(b"" if content == "empty" else b"garbage" * 9)
    before = path.read_bytes()
    words = "model is another one" if content == "another run" else "cannot be read"
    with unchanged(problem.model), pytest.raises(PermTritonError, match=f"{words}.*`restart=True`"):
        problem.learn(resume=StateFile(path, MINE))
    assert path.read_bytes() == before


def test_a_state_that_cannot_be_written_is_a_clear_error(problem, tmp_path, monkeypatch):
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("permtriton.running.resume.save_file", full)
    with unchanged(problem.model), pytest.raises(PermTritonError, match="No space left"):
        problem.learn(resume=StateFile(tmp_path / "state.safetensors", MINE))
    assert list(tmp_path.iterdir()) == []


CHANGES = {
    "learn_learning_rate was 0.005 and is 0.1": {"learn_learning_rate": 0.1},
    "seed was 0 and is 1": {"seed": 1},
    "importance was wanda and is ria; sparsity was 2:4 and is 1:4": {"sparsity": "1:4", "importance": "ria"},
    "recipe was learned,mask and is heuristic,mask": {"recipe": "heuristic,mask"},
}


@pytest.mark.parametrize("words", CHANGES)
@pytest.mark.slow
def test_compile_continues_only_an_equal_compilation(tmp_path, words):
    """Another one is refused before any work, and the message names what differs, with both values."""
    options = {
        "recipe": "learned,mask", "learn_epochs": 2, "learn_batch_size": 4, "micro_batch_size": 4,
        "learn_block_size": 16, "learn_learning_rate": 0.005,
    }  # fmt: skip
    ids = zoo.tiny_ids(4, 8)

    def run(changes: dict[str, object], **more: object) -> permtriton.CompiledModel:
        config = permtriton.config_from({**options, **changes})
        return compile_model(plant(tiny(num_hidden_layers=1)), None, config, ids=ids, **more)

    path = tmp_path / "state.safetensors"
    first = run({}, resume_path=path)
    state = path.with_suffix(".learned.safetensors")
    before = state.read_bytes()
    again = run({}, resume_path=path)
    assert again.report["steps"] == first.report["steps"], "to the second: it was not run again"
    before = state.read_bytes()
    progress = Recording()
    with pytest.raises(OutputError, match=f"belongs to another run: {words}. To continue") as caught:
        run(CHANGES[words], resume_path=path, progress=progress)
    assert str(state) in str(caught.value)
    assert state.read_bytes() == before
    assert progress.steps == [], "before any work"
    state.unlink()
    run(CHANGES[words], resume_path=path)
