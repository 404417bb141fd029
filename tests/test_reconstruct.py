"""Reconstruction trains each layer on the dense layer's output, or leaves it as it is and says so."""

import json
from dataclasses import asdict

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertModel

from permtriton import NMPattern, find_plan
from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError
from permtriton.methods.train import reconstruction as module
from permtriton.methods.train.reconstruction import squared_loss
from permtriton.methods.train.trainer import split
from permtriton.model.experts import unstacked_experts
from permtriton.passes.plan import layer_modules
from permtriton.running.layer_calls import find_chains, record_chain
from permtriton.running.store import MEMORY

from . import zoo
from .updating import STEPS, Pruned, Recording, equal, facts, interrupt, only_kept_weights_change, tiny

FAMILIES = ["gpt2", "gemma2", "opt", "falcon", "gpt_neox", "bert", "mistral"]


@pytest.mark.parametrize("kind", ["cosine", "squared"])
def test_each_layer_comes_closer_and_so_do_the_outputs(kind):
    pruned, progress = tiny(), Recording()
    before = pruned.loss()
    with only_kept_weights_change(pruned):
        result = pruned.reconstruct(progress, loss=kind)
    assert [entry["name"] for entry in result.parts] == ["model.layers.0", "model.layers.1"]
    assert all(entry["end"] < 0.9 * entry["start"] for entry in result.parts)
    assert result.left == {}
    assert pruned.moved() == set(pruned.weights)
    assert pruned.loss() < before
    assert progress.steps == [0, *[1] * (2 * 3 * STEPS)]
    assert progress.total == 2 * 3 * STEPS
    json.dumps(asdict(result), allow_nan=False)


@torch.no_grad()
def outputs(model: nn.Module, layers: list[nn.Module], ids: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of a model's layers when it runs as a whole."""
    found: list[torch.Tensor] = []
    handles = [layer.register_forward_hook(lambda _layer, _inputs, output: found.append(output)) for layer in layers]
    model(ids)
    for handle in handles:
        handle.remove()
    return [output[0] if isinstance(output, tuple) else output for output in found]


def test_inputs_come_from_the_pruned_layers_and_targets_from_the_dense_ones():
    """The reported losses are those of the layers when the model runs as a whole."""
    pruned = tiny()
    layers, held_out = list(pruned.model.model.layers), pruned.ids[split(10, 0)[1]].inputs["input_ids"]
    with module._swapped(pruned.weights, pruned.dense, MEMORY):
        targets = outputs(pruned.model, layers, held_out)
    start = float(squared_loss(outputs(pruned.model, layers, held_out)[0], targets[0]))
    result = pruned.reconstruct(loss="squared")
    assert start == pytest.approx(result.parts[0]["start"], rel=1e-4)
    end = outputs(pruned.model, layers, held_out)
    for entry, found, target in zip(result.parts, end, targets, strict=True):
        assert float(squared_loss(found, target)) == pytest.approx(entry["end"], rel=1e-4)


def test_a_window_of_mlp_trains_attention_and_mlp_apart():
    pruned = tiny()
    with only_kept_weights_change(pruned):
        result = pruned.reconstruct(window="mlp")
    parts = [{name.split(".")[3] for name in entry["linears"]} for entry in result.parts]
    assert parts == [{"self_attn"}, {"mlp"}] * 2
    assert result.parts[1]["start"] == pytest.approx(result.parts[0]["end"], rel=1e-4)
    assert pruned.moved() == set(pruned.weights)


def test_a_harmful_learning_rate_keeps_the_start():
    pruned = tiny()
    with only_kept_weights_change(pruned):
        result = pruned.reconstruct(learning_rate=3.0)
    assert [entry["kept"] for entry in result.parts] == [0, 0]
    assert not pruned.moved()


def test_micro_batches_do_not_change_the_result():
    pruned = tiny()
    pruned.reconstruct(micro_batch_size=4)
    expected = pruned.trained_weights()
    pruned.reset().reconstruct(micro_batch_size=1)
    for name, weight in pruned.weights.items():
        torch.testing.assert_close(weight.detach(), expected[name], rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slow(but=["gpt2", "gemma2", "bert"])
def test_families_of_models(name):
    """Calls of layers differ: positional arguments, masks, tuples, two kinds of layers."""
    pruned = Pruned(*zoo.planned(name), zoo.token_ids(10, 12))
    with only_kept_weights_change(pruned):
        result = pruned.reconstruct(epochs=1, learning_rate=1e-3)
    assert result.left == {}
    assert len(result.parts) == zoo.LAYERS
    assert all(entry["end"] < entry["start"] for entry in result.parts)
    assert pruned.moved() == set(pruned.weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    pruned = tiny(dtype)
    with only_kept_weights_change(pruned):
        result = pruned.reconstruct(learning_rate=1e-3)
    assert all(entry["end"] < entry["start"] for entry in result.parts)
    assert pruned.moved() == set(pruned.weights)


@pytest.mark.slow
def test_experts():
    model, plan = zoo.planned("qwen3_moe")
    with unstacked_experts(model):
        pruned = Pruned(model, plan, zoo.token_ids(10, 12))
        with only_kept_weights_change(pruned):
            result = pruned.reconstruct(epochs=1, learning_rate=1e-3)
        assert all(entry["end"] < entry["start"] for entry in result.parts)
        assert pruned.moved() == set(pruned.weights)


def test_layers_that_share_weights_are_left():
    torch.manual_seed(0)
    sizes = {**zoo.SIZES, "embedding_size": 32}
    model = AlbertModel(AlbertConfig(**sizes)).eval()
    zoo.randomize(model)
    pruned, progress = Pruned(model, ids=zoo.token_ids(10, 12)), Recording()
    result = pruned.reconstruct(progress)
    assert result.parts == []
    assert any("2 times" in line for line in progress.lines)
    assert "encoder.embedding_hidden_mapping_in" in result.left
    assert not pruned.moved()


def test_a_weight_of_two_layers_is_left_and_the_rest_is_trained():
    model = zoo.tiny_llama()
    zoo.randomize(model)
    first, second = (layer.mlp.up_proj for layer in model.model.layers)
    second.weight = first.weight
    pruned = Pruned(model)
    with only_kept_weights_change(pruned):
        result = pruned.reconstruct()
    assert list(result.left) == ["model.layers.0.mlp.up_proj"]
    assert pruned.moved() == set(pruned.weights) - {"model.layers.0.mlp.up_proj"}


def chains(pruned: Pruned, layers: dict[str, nn.Module]) -> list[list[str]]:
    found, problems = find_chains(pruned.model, layers, pruned.ids[:1], pruned.weights.values())
    assert problems == {}
    return found


@pytest.mark.slow
def test_a_chain_ends_where_hidden_states_change_between_layers():
    pruned = tiny(layers=3)
    layers = dict(zip("abc", layer_modules(pruned.model, pruned.plan), strict=True))
    assert chains(pruned, layers) == [["a", "b", "c"]]

    class Scaled(nn.Module):
        def forward(self, hidden_states, **named):
            return layers["b"](2 * hidden_states, **named)

    pruned.model.model.layers[1] = Scaled()
    assert chains(pruned, layers) == [["a"], ["b", "c"]]


def test_a_chain_ends_where_an_argument_depends_on_weights():
    pruned = tiny(layers=3)
    layers = dict(zip("abc", layer_modules(pruned.model, pruned.plan), strict=True))

    class Leaning(nn.Module):
        def forward(self, hidden_states, **named):
            cos, sin = named.pop("position_embeddings")
            return layers["c"](hidden_states, position_embeddings=(cos + hidden_states.mean(), sin), **named)

    pruned.model.model.layers[2] = Leaning()
    assert chains(pruned, layers) == [["a", "b"], ["c"]]


@pytest.mark.parametrize("name", ["llama_eager", "gemma2", "falcon"])
def test_recorded_layers_compute_what_the_model_does(name):
    model, plan = zoo.planned(name)
    ids = zoo.token_ids(5, 12)
    layers = dict(enumerate(layer_modules(model, plan)))
    calls, hidden = record_chain(model, layers, Samples.of(ids))
    for number, expected in enumerate(outputs(model, list(layers.values()), ids)):
        calls[number].try_together(hidden)
        hidden = calls[number].run(hidden, 2)
        torch.testing.assert_close(hidden, expected)


def test_an_interrupt_leaves_the_model_consistent():
    pruned = tiny()
    with only_kept_weights_change(pruned), pytest.raises(KeyboardInterrupt):
        pruned.reconstruct(Recording(3 * STEPS + 3, interrupt))
    assert not equal(pruned.trained_weights(), pruned.before)


def test_a_loss_that_is_not_finite_is_a_clear_error():
    pruned = tiny()
    pruned.dense["model.layers.1.mlp.up_proj"].fill_(torch.nan)
    before = facts(pruned.model)
    with pytest.raises(CalibrationError, match=r"model.layers.1: the loss .*`dtype=float32`"):
        pruned.reconstruct()
    assert facts(pruned.model) == before
    assert all(weight.isfinite().all() for weight in pruned.weights.values()), "dense weights were taken out again"


@pytest.mark.slow
def test_fused_layout():
    model = zoo.tiny_llama()
    zoo.randomize(model)
    plan = find_plan(model, NMPattern(2, 4), layout="fused")
    zoo.fold(model, plan, zoo.random_indices(plan))
    pruned = Pruned(model, plan)
    with only_kept_weights_change(pruned):
        result = pruned.reconstruct()
    assert all(entry["end"] < entry["start"] for entry in result.parts)
    before = pruned.loss()
    with only_kept_weights_change(pruned):
        pruned.distill()
    assert pruned.loss() < before
