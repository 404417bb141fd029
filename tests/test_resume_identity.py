"""A run continues only from a whole state of the same model: anything else would end in another result in silence."""

import json
from importlib import metadata

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import permtriton
from permtriton import config_from
from permtriton.driver.pipeline import compile_model
from permtriton.errors import OutputError
from permtriton.model.checks import model_hash, sample_hash
from permtriton.running.resume import StateFile

from . import zoo

OPTIONS = {
    "recipe": "heuristic,learned,mask", "learn_epochs": 2, "learn_batch_size": 4, "micro_batch_size": 4,
    "learn_block_size": 16,
}  # fmt: skip
MINE = {"weights": "mine"}
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
@pytest.mark.slow
def test_a_changed_model_is_refused(tmp_path, change):
    path = tmp_path / "state.safetensors"
    run(path)
    with pytest.raises(OutputError, match="the model is another one") as caught:
        run(path, change)
    assert "`restart=True`" in str(caught.value)


@pytest.mark.slow
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
def test_a_run_continues_with_another_number_of_threads(tmp_path, monkeypatch):
    """Sums in another order may differ in their last bits: no reason to throw hours away."""
    path = tmp_path / "state.safetensors"
    first = run(path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert run(path).report["steps"] == first.report["steps"], "to the second: it was not run again"


@pytest.mark.slow
def test_other_weights_before_the_stage_are_refused(tmp_path):
    """The state is relative to the base order; another one, found with other threads, makes it meaningless."""
    path = tmp_path / "state.safetensors"
    run(path)
    kept = tmp_path / "state.learned.safetensors"
    with safe_open(kept, framework="pt") as file:
        inputs = json.loads(file.metadata()["inputs"])
    edit(kept, inputs=json.dumps({**inputs, "start": sample_hash(zoo.build("llama"))}))
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


def test_a_sample_tells_orders_and_pruned_weights_apart():
    model = zoo.build("llama")
    hashes = {sample_hash(model)}
    weight = model.model.layers[1].mlp.up_proj.weight
    for change in (lambda: weight.flip(0), lambda: weight.flip(1), lambda: weight * (weight.abs() > weight.std())):
        with torch.no_grad():
            weight.copy_(change())
        hashes.add(sample_hash(model))
    assert len(hashes) == 4


def edit(path, **texts: str | None) -> None:
    """Replaces texts of a state, or removes them."""
    with safe_open(path, framework="pt") as file:
        stored = {**file.metadata(), **texts}
    save_file(load_file(path), path, {name: text for name, text in stored.items() if text is not None})


def test_every_byte_of_a_state_counts(tmp_path):
    path = tmp_path / "state.safetensors"
    state = StateFile(path, MINE)
    tensors = {"a": torch.arange(3), "b": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.tensor(7.0)}
    state.write(tensors, history=[1, 2])
    found, values = state.read()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert values["history"] == [1, 2]
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(OutputError):
            state.read()
