"""Training that was interrupted continues to the same end, bit for bit, and a damaged state is refused."""

import pytest
import torch

from permtriton.errors import OutputError
from permtriton.methods.train import distill
from permtriton.running.state import StateFile

from .updating import STEPS, Recording, equal, interrupt, tiny

MINE, ANOTHER = {"weights": "mine"}, {"weights": "another's"}  # what identifies a run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.safetensors"


@pytest.mark.parametrize(
    ("optimizer", "rate", "dtype"),
    [
        ("adam", 0.01, torch.float32),
        ("adafactor", 0.01, torch.bfloat16),
        pytest.param("adam", 3.0, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_distilling_continues_to_the_same_end(path, rate, dtype, optimizer):
    pruned, options = tiny(dtype), {"learning_rate": rate, "optimizer": optimizer}
    whole = pruned.distill(**options)
    expected = pruned.trained_weights()
    at = 1 + 2 * STEPS + 2  # the first call reports what was done before; then in the third epoch
    with pytest.raises(KeyboardInterrupt):
        pruned.reset().distill(Recording(at, interrupt), StateFile(path, MINE), **options)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    progress = Recording()
    continued = pruned.reset().distill(progress, StateFile(path, MINE), **options)
    assert progress.steps == [2 * STEPS, *[1] * STEPS], "one epoch was left"
    assert "after round 2" in progress.lines[0]
    assert continued.same(whole)
    assert equal(pruned.trained_weights(), expected)
    assert pruned.moved() if rate < 1 else not pruned.moved()


def test_an_epoch_of_many_steps_keeps_its_state_in_between(path, monkeypatch):
    pruned = tiny()
    in_one = pruned.distill(epochs=1)
    expected = pruned.trained_weights()
    monkeypatch.setattr(distill, "ROUND", 1)
    whole = pruned.reset().distill(epochs=1)
    assert (len(in_one.history), len(whole.history)) == (2, 1 + STEPS)
    assert whole.history[-1].held_out == in_one.history[-1].held_out, "the same steps in the same order"
    assert whole.kept == STEPS
    assert equal(pruned.trained_weights(), expected)
    with pytest.raises(KeyboardInterrupt):
        pruned.reset().distill(Recording(3, interrupt), StateFile(path, MINE), epochs=1)
    progress = Recording()
    continued = pruned.reset().distill(progress, StateFile(path, MINE), epochs=1)
    assert "after round 1" in progress.lines[0]
    assert progress.steps == [1] * STEPS
    assert continued.same(whole)
    assert equal(pruned.trained_weights(), expected)


def test_a_finished_run_is_not_run_again(path):
    pruned, state = tiny(), StateFile(path, MINE)
    pruned.distill(state=state, epochs=1)
    expected = pruned.trained_weights()
    progress = Recording()
    pruned.reset().distill(progress, state, epochs=1)
    assert progress.steps == [progress.total]
    assert equal(pruned.trained_weights(), expected)
    assert pruned.moved()


def test_a_state_of_another_run_is_refused(path):
    pruned = tiny()
    pruned.distill(state=StateFile(path, ANOTHER), epochs=1, seed=9)
    with pytest.raises(OutputError, match="model is another one"):
        pruned.reset().distill(state=StateFile(path, MINE), epochs=1)
    assert not pruned.moved()


DAMAGES = {
    "its last byte changed": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "a text changed": lambda content: content.replace(b"held_out", b"held-out", 1),
    "truncated": lambda content: content[:-1],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused(path, damage):
    pruned = tiny(layers=1)
    pruned.distill(state=StateFile(path, MINE), epochs=1)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(OutputError, match=r"is damaged.*delete the file"):
        pruned.reset().distill(state=StateFile(path, MINE), epochs=1)
    assert not pruned.moved()
