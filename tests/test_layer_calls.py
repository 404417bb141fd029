"""Layers run with the arguments that were recorded, and a chain ends where these depend on what runs before."""

from typing import Any

import pytest
import torch
from torch import nn

from permtriton.data.samples import Samples
from permtriton.passes.plan import layer_modules
from permtriton.running.layer_calls import LayerCalls, find_chains, record_calls

from . import zoo
from .updating import Pruned, tiny


@torch.no_grad()
def outputs(model: nn.Module, layers: list[nn.Module], ids: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of a model's layers when it runs as a whole."""
    found: list[torch.Tensor] = []
    handles = [layer.register_forward_hook(lambda _layer, _inputs, output: found.append(output)) for layer in layers]
    model(ids)
    for handle in handles:
        handle.remove()
    return [output[0] if isinstance(output, tuple) else output for output in found]


def chains(pruned: Pruned, layers: dict[str, nn.Module]) -> list[list[str]]:
    return find_chains(pruned.model, layers, pruned.ids[:1], pruned.weights.values())


def recorded_chain(
    model: nn.Module, layers: dict[Any, nn.Module], samples: Samples
) -> tuple[dict[Any, LayerCalls], torch.Tensor]:
    """The calls of a chain's layers, one per sample, and what the first layer reads."""
    calls = {name: LayerCalls(layer, model.device) for name, layer in layers.items()}
    return calls, torch.cat([record_calls(model, calls, sample) for sample in samples.split(1)])


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
    calls, hidden = recorded_chain(model, layers, Samples.of(ids))
    for number, expected in enumerate(outputs(model, list(layers.values()), ids)):
        calls[number].try_together(hidden)
        parts = torch.arange(len(hidden)).split(2)
        hidden = torch.cat([calls[number](hidden[rows], rows) for rows in parts])
        torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-4)  # two samples at once, in place of five
