"""A run continues only from a whole state of the same model: anything else would end in another result in silence."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import permtriton
from permtriton import CompileConfig
from permtriton.errors import OutputError
from permtriton.model.checks import weights_hash

from . import zoo

OPTIONS = {"permutation": "learned", "epochs": 2, "batch_size": 4, "micro_batch_size": 4, "block_size": 16}
IDS = zoo.token_ids(4, 8).clamp(max=40)


def run(path, change=lambda model: None) -> permtriton.CompiledModel:
    model = zoo.build("llama")
    change(model)
    return permtriton.compile(model, None, CompileConfig.from_options(OPTIONS), ids=IDS, resume_path=path)


@torch.no_grad()
def change_an_embedding(model: nn.Module) -> None:
    """That of a token of the later sequences: what the reference sequences, the first two, give does not change."""
    token = min(set(IDS[2:].flatten().tolist()) - set(IDS[:2].flatten().tolist()))
    model.get_input_embeddings().weight[token] *= 3


@torch.no_grad()
def change_a_weight(model: nn.Module) -> None:
    model.model.layers[1].mlp.down_proj.weight[0, 0] += 1e-3


@pytest.mark.parametrize("change", [change_an_embedding, change_a_weight])
def test_a_changed_model_starts_anew(tmp_path, change):
    path = tmp_path / "state.safetensors"
    run(path)
    other, fresh = run(path, change), run(None, change)
    for mine, theirs in zip(other.report["learning"]["epochs"], fresh.report["learning"]["epochs"], strict=True):
        assert {**mine, "seconds": 0} == {**theirs, "seconds": 0}
    assert all(torch.equal(other.indices[name], fresh.indices[name]) for name in fresh.indices)


def test_the_hash_sees_every_parameter_and_buffer():
    model = zoo.build("llama")
    before = weights_hash(model)
    assert before == weights_hash(zoo.build("llama"))
    for tensor in [*model.parameters(), *model.buffers()]:
        with torch.no_grad():
            flat = tensor.view(-1)
            value = flat[-1].clone()
            flat[-1] += 1
            assert weights_hash(model) != before
            flat[-1] = value
    assert weights_hash(model) == before
    assert weights_hash(model.bfloat16()) != before


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
    "an index is missing": ({"tensors": lambda t: t.pop("index.stream")}, "index.stream"),
    "an index is too short": ({"tensors": lambda t: t.update({"index.stream": torch.arange(5)})}, "shape"),
    "an index is no permutation": (
        {"tensors": lambda t: t.update({"index.stream": torch.zeros(zoo.HIDDEN, dtype=torch.int64)})},
        "not a permutation",
    ),
    "a parameter has another shape": ({"tensors": lambda t: t.update({"parameter.0": torch.ones(1)})}, "shape"),
    "a parameter is not finite": (
        {"tensors": lambda t: t["parameter.0"].fill_(float("nan"))},
        "not finite",
    ),
    "an optimizer state is missing": ({"tensors": lambda t: t.pop("optimizer.0.exp_avg")}, "exp_avg"),
    "a tensor too many": ({"tensors": lambda t: t.update({"parameter.99": torch.ones(1)})}, "parameter.99"),
    "an epoch of 999": ({"metadata": history(lambda epochs: epochs[-1].update(epoch=999))}, "history"),
    "an epoch is missing": ({"metadata": history(lambda epochs: epochs.pop(1))}, "history"),
    "no history": ({"metadata": lambda m: m.pop("history")}, "history"),
    "a history that is no list": ({"metadata": lambda m: m.update(history="7")}, "history"),
    "an epoch kept that is not there": ({"metadata": lambda m: m.update(kept="7")}, "keeps epoch 7"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_is_refused_by_name(tmp_path, name):
    path, kept = tmp_path / "state.safetensors", tmp_path / "state.learning.safetensors"
    run(path)
    change, words = DAMAGE[name]
    damage(kept, **change)
    before = kept.read_bytes()
    with pytest.raises(OutputError, match=words) as caught:
        run(path)
    assert str(kept) in str(caught.value)
    assert "delete the file" in str(caught.value)
    assert kept.read_bytes() == before
