"""A run continues only from a whole state of the same model: anything else would end in another result in silence."""

import json
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import permtriton
from permtriton import config_from
from permtriton.driver.pipeline import compile_model
from permtriton.errors import OutputError
from permtriton.methods.order.learning import LearningFile
from permtriton.model.checks import model_hash

from . import zoo
from .learning import QUICK, unchanged
from .updating import Recording

OPTIONS = {
    "recipe": "heuristic,learned,mask", "learn_epochs": 2, "learn_batch_size": 4, "micro_batch_size": 4,
    "learn_block_size": 16,
}  # fmt: skip
TWO_EPOCHS, MINE = replace(QUICK, epochs=2), {"weights": "mine"}
IDS = zoo.token_ids(4, 8).clamp(max=40)


def run(path, change=lambda model: None, ids=IDS, **more: object) -> permtriton.CompiledModel:
    model = zoo.build("llama")
    change(model)
    return compile_model(model, None, config_from(OPTIONS), ids=ids, resume_path=path, **more)


@torch.no_grad()
def change_an_embedding(model: nn.Module) -> None:
    """That of a token of the later sequences: what the reference sequences, the first two, give does not change."""
    token = min(set(IDS[2:].flatten().tolist()) - set(IDS[:2].flatten().tolist()))
    model.get_input_embeddings().weight[token] *= 3


@torch.no_grad()
def change_a_weight(model: nn.Module) -> None:
    model.model.layers[1].mlp.down_proj.weight[0, 0] += 1e-3


def change_the_config(model: nn.Module) -> None:
    """Weights alone do not say what a model computes."""
    model.config.rms_norm_eps = 0.3


@pytest.mark.parametrize("change", [change_an_embedding, change_a_weight, change_the_config])
@pytest.mark.slow(but=["change_a_weight"])
def test_a_changed_model_is_refused(tmp_path, change):
    path = tmp_path / "state.safetensors"
    run(path)
    with pytest.raises(OutputError, match="the model is another one") as caught:
        run(path, change)
    assert "`restart=True`" in str(caught.value)


def test_every_difference_is_named(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    run(path)
    present, version = torch.__version__, metadata.version
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    monkeypatch.setattr("platform.python_version", lambda: "3.11.0")
    monkeypatch.setattr(metadata, "version", lambda name: "5.0.0" if name == "transformers" else version(name))
    with pytest.raises(OutputError, match="calibration sequences differ") as caught:
        run(path, change_a_weight, ids=IDS.roll(1, 0))
    words = ["model is another one", f"torch was {present} and is 9.9", "transformers was", "python was"]
    assert [word for word in words if word not in str(caught.value)] == []
    assert "permtriton was" not in str(caught.value), "it is the same"


@pytest.mark.slow
def test_another_number_of_threads_is_said_and_continues(tmp_path, monkeypatch):
    """Sums in another order may differ in their last bits: no reason to throw hours away."""
    path = tmp_path / "state.safetensors"
    first = run(path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    progress = Recording()
    again = run(path, progress=progress)
    assert again.report["steps"] == first.report["steps"], "to the second: it was not run again"
    said = [line for line in progress.lines if "interrupted run was on cpu, 1 threads" in line]
    assert len(said) == 1
    assert "this is cpu, 64 threads" in said[0]


@pytest.mark.slow
def test_what_is_lowered_where_memory_ran_out_continues_the_run(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    first = run(path)
    smaller = {**OPTIONS, "micro_batch_size": 2, "activation_checkpointing": True}
    monkeypatch.setattr(f"{__name__}.OPTIONS", smaller)
    assert run(path).report["steps"] == first.report["steps"], "to the second: it was not run again"


def test_other_weights_before_the_stage_are_refused(tmp_path, monkeypatch):
    """The state is relative to the base order; another one, found with other threads, makes it meaningless."""
    path = tmp_path / "state.safetensors"
    run(path)
    monkeypatch.setattr("permtriton.driver.identity.model_hash", lambda model: "same")
    monkeypatch.setattr("permtriton.driver.workspace.model_hash", lambda model: "another")
    kept = tmp_path / "state.learned.safetensors"
    damage(kept, metadata=lambda m: m.update(inputs=json.dumps({**json.loads(m["inputs"]), "weights": "same"})))
    with pytest.raises(OutputError, match="stages before it ended with other weights, as they may with another number"):
        run(path)


def test_the_hash_sees_every_parameter_and_buffer():
    model = zoo.build("llama")
    before = model_hash(model)
    assert before == model_hash(zoo.build("llama"))
    for tensor in [*model.parameters(), *model.buffers()]:
        with torch.no_grad():
            flat = tensor.view(-1)
            value = flat[-1].clone()
            flat[-1] += 1
            assert model_hash(model) != before
            flat[-1] = value
    assert model_hash(model) == before
    assert model_hash(model.bfloat16()) != before


def damage(path, tensors=lambda t: None, metadata=lambda m: None) -> None:
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors(stored)
    metadata(about)
    save_file(stored, path, about)


def history(change):
    def edit(metadata: dict) -> None:
        epochs = json.loads(metadata["history"])
        change(epochs)
        metadata["history"] = json.dumps(epochs)

    return edit


DAMAGE = {
    "an index is missing": ({"tensors": lambda t: t.pop("index.stream")}, "index.stream is missing"),
    "an index is too short": ({"tensors": lambda t: t.update({"index.stream": torch.arange(5)})}, "shape .5."),
    "an index is no permutation": (
        {"tensors": lambda t: t["index.stream"].zero_()},
        "not a permutation",
    ),
    "a parameter has another shape": ({"tensors": lambda t: t.update({"parameter.0": torch.ones(1)})}, "shape .1."),
    "a parameter of another dtype": (
        {"tensors": lambda t: t.update({"parameter.0": t["parameter.0"].double()})},
        "parameter.0 is torch.float64",
    ),
    "a parameter is not finite": (
        {"tensors": lambda t: t["parameter.0"].fill_(float("nan"))},
        "not finite",
    ),
    "a mean of squares is negative": ({"tensors": lambda t: t["optimizer.0.exp_avg_sq"].sub_(1)}, "negative values"),
    "a negative step": ({"tensors": lambda t: t["optimizer.0.step"].fill_(-1)}, "negative values"),
    "an optimizer state is missing": ({"tensors": lambda t: t.pop("optimizer.0.exp_avg")}, "exp_avg is missing"),
    "a tensor too many": ({"tensors": lambda t: t.update({"parameter.99": torch.ones(1)})}, "parameter.99"),
    "an epoch of 999": ({"metadata": history(lambda epochs: epochs[-1].update(epoch=999))}, "not numbered from 0"),
    "999 epochs": (
        {"metadata": history(lambda epochs: epochs.extend({**epochs[0], "epoch": n} for n in range(3, 1000)))},
        "reaches epoch 999, but this run has only 2",
    ),
    "an epoch is missing": ({"metadata": history(lambda epochs: epochs.pop(1))}, "history"),
    "an epoch that is true": (
        {"metadata": history(lambda epochs: epochs[1].update(epoch=True))},
        r"\[1\].epoch is True",
    ),
    "a loss that is not finite": (
        {"metadata": history(lambda epochs: epochs[1].update(loss=float("nan")))},
        r"\[1\].loss is nan",
    ),
    "no history": ({"metadata": lambda m: m.pop("history")}, "history"),
    "a history that is no list": ({"metadata": lambda m: m.update(history="7")}, "history"),
    "an epoch kept that is not there": ({"metadata": lambda m: m.update(kept="7")}, "keeps epoch 7"),
    "an epoch kept that is no number": ({"metadata": lambda m: m.update(kept="[]")}, r"kept: it is \[\], expected"),
}


@pytest.fixture(scope="module")
def stored(problem, tmp_path_factory) -> bytes:
    """The state of a run of two epochs."""
    path = tmp_path_factory.mktemp("stored") / "state.safetensors"
    problem.learn(TWO_EPOCHS, resume=LearningFile(path, MINE))
    return path.read_bytes()


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_is_refused_by_name(problem, stored, tmp_path, name):
    path = tmp_path / "state.safetensors"
    path.write_bytes(stored)
    change, words = DAMAGE[name]
    damage(path, **change)
    before = path.read_bytes()
    with unchanged(problem.model), pytest.raises(OutputError, match=words) as caught:
        problem.learn(TWO_EPOCHS, resume=LearningFile(path, MINE))
    assert str(path) in str(caught.value)
    assert "delete the file" in str(caught.value)
    assert path.read_bytes() == before
