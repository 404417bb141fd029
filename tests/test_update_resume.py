"""Training that was interrupted continues to the same end, bit for bit."""

import pytest
import torch

from permtriton.methods.train import distill
from permtriton.running.resume import StateFile

from .updating import STEPS, Recording, equal, interrupt, tiny

MINE = {"weights": "mine"}  # what identifies a run


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
