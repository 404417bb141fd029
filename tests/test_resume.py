"""An interrupted run continues to the same end, and a saved state that does not fit is ignored."""

from dataclasses import replace

import pytest
import torch

import permtriton
from permtriton.errors import PermTritonError
from permtriton.prune.resume import ResumeFile

from . import zoo
from .learning import QUICK, STEPS, Counting, plant, same_history, stop, tiny, unchanged

IN_EPOCH_3 = 1 + 2 * STEPS + 1  # the first call reports what was done before


@pytest.mark.parametrize("keep_epoch", ["best", "last"])
@pytest.mark.parametrize("start", ["identity", "random"])
def test_an_interrupted_run_continues_to_the_same_end(problem, tmp_path, keep_epoch, start):
    config = replace(QUICK, epochs=4, keep_epoch=keep_epoch, start=start)
    whole = problem.learn(config)
    path = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        problem.learn(config, progress=Counting(IN_EPOCH_3, stop(KeyboardInterrupt())), resume=ResumeFile(path, "same"))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    progress = Counting()
    continued = problem.learn(config, progress=progress, resume=ResumeFile(path, "same"))
    assert progress.steps == [2 * STEPS] + [1] * (2 * STEPS), "two epochs were left"
    assert same_history(continued, whole)
    assert whole.history[2].moved > 0, "there was something to continue from"


def test_a_finished_run_is_not_run_again(problem, tmp_path):
    resume = ResumeFile(tmp_path / "state.safetensors", "same")
    whole = problem.learn(resume=resume)
    progress = Counting()
    again = problem.learn(progress=progress, resume=resume)
    assert progress.steps == [QUICK.epochs * STEPS]
    assert same_history(again, whole)
    resume.delete()
    assert list(tmp_path.iterdir()) == []
    resume.delete()


@pytest.mark.parametrize("content", ["another fingerprint", "garbage", "empty"])
def test_a_state_that_does_not_belong_is_ignored(problem, tmp_path, content):
    path = tmp_path / "state.safetensors"
    if content == "another fingerprint":
        problem.learn(replace(QUICK, epochs=1), seed=9, resume=ResumeFile(path, "another"))
    else:
        path.write_bytes(b"" if content == "empty" else b"garbage" * 9)
    assert same_history(problem.learn(resume=ResumeFile(path, "mine")), problem.learn())


def test_a_state_that_cannot_be_written_is_a_clear_error(problem, tmp_path, monkeypatch):
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("permtriton.prune.state_file.save_file", full)
    with unchanged(problem.model), pytest.raises(PermTritonError, match="No space left"):
        problem.learn(resume=ResumeFile(tmp_path / "state.safetensors", "same"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"learning_rate": 0.1}, {"seed": 1}, {"sparsity": "1:4"}, {"importance": "ria"}])
def test_compile_continues_only_an_equal_compilation(tmp_path, change):
    options = {
        "permutation": "learned",
        "epochs": 2,
        "batch_size": 4,
        "micro_batch_size": 4,
        "block_size": 16,
        "base_order": "identity",
    }
    ids = zoo.tiny_ids(4, 8)

    def run(changes: dict[str, object], **more: object) -> permtriton.CompiledModel:
        config = permtriton.CompileConfig.from_options({**options, **changes})
        return permtriton.compile(plant(tiny(num_hidden_layers=1)), None, config, ids=ids, **more)

    path = tmp_path / "state.safetensors"
    first = run({}, resume_path=path)
    assert path.with_suffix(".learning.safetensors").is_file()
    again = run({}, resume_path=path)
    assert again.report["learning"] == first.report["learning"], "to the second: it was not run again"
    other, fresh = run(change, resume_path=path), run(change)
    for mine, theirs in zip(other.report["learning"]["epochs"], fresh.report["learning"]["epochs"], strict=True):
        assert {**mine, "seconds": 0} == {**theirs, "seconds": 0}
    assert all(torch.equal(other.indices[name], fresh.indices[name]) for name in fresh.indices)
