"""The verifier names the pass and the node of every deliberate error."""

import functools
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, fx

from permtriton.errors import VerificationError
from permtriton.passes.cancel_permutations import cancel_permutations
from permtriton.passes.fuse_permutations import fuse_permutations
from permtriton.passes.graph import NORM_PERMUTE, PERMUTE, SITE, Constants, index_value, module_path, parameter_nodes
from permtriton.passes.insert_permutations import insert_permutations
from permtriton.passes.pipeline import permutation_passes, run_passes
from permtriton.passes.weight_folds import moves_of

from .graphs import compiled, planned, private


def damaged(function: Callable, damage: Callable[[fx.GraphModule], None]) -> Callable:
    """A pass of the same name whose result is damaged."""

    @functools.wraps(function)
    def broken(graph_module: fx.GraphModule, **options: object) -> fx.GraphModule:
        graph_module = function(graph_module, **options)
        damage(graph_module)
        return graph_module

    return broken


def broken_run(name: str, layout: str, function: Callable, damage: Callable) -> str:
    """Permutes a graph with one pass damaged and returns the verifier's message."""
    _, plan, graph_module = private(name, layout)
    passes = list(permutation_passes(moves_of(plan, compiled(name, layout).indices)))
    (place,) = [n for n, each in enumerate(passes) if function in (each, getattr(each, "func", None))]
    passes[place] = partial(damaged(function, damage), **getattr(passes[place], "keywords", {}))
    with pytest.raises(VerificationError, match=f"^pass {function.__name__}: ") as caught:
        run_passes(graph_module, passes)
    assert "this is a bug in permtriton" in str(caught.value)
    return str(caught.value)


def undo(graph_module: fx.GraphModule, parameter: str) -> None:
    """Takes the last permutation of a parameter away."""
    node = parameter_nodes(graph_module).get(parameter)
    while True:
        (user,) = node.users
        if "permtriton" not in user.meta:
            break
        node = user
    assert node.target is PERMUTE
    node.replace_all_uses_with(node.args[0])


def node_in(graph_module: fx.GraphModule, message: str) -> fx.Node:
    name = re.search(r"node (\w+)", message)[1]
    return next(node for node in graph_module.graph.nodes if node.name == name)


@pytest.mark.parametrize(
    ("producer", "layout"),
    [("mlp.gate_proj.weight", "portable"), ("mlp.gate_proj.weight", "fused"), ("self_attn.v_proj.weight", "fused")],
)
def test_a_producer_that_is_not_folded(producer, layout):
    damage = partial(undo, parameter=f"model.layers.1.{producer}")
    message = broken_run("llama", layout, fuse_permutations, damage)
    assert "joins channels that were not joined before the pass" in message
    node = node_in(planned("llama", layout)[2], message)
    assert module_path(node).startswith(f"model.layers.1.{producer.partition('.')[0]}")


def buffer_of(graph_module: fx.GraphModule, node: fx.Node) -> Tensor:
    """An index's own buffer, of which the graph module gets its own copy."""
    name = str(node.target)
    setattr(graph_module, name, getattr(graph_module, name).clone())
    return getattr(graph_module, name)


def activation_permutes(graph_module: fx.GraphModule, site: str) -> list[fx.Node]:
    return [node for node in graph_module.graph.nodes if str(node.meta.get(SITE, "")).endswith(site)]


def test_an_index_that_is_no_bijection():
    def repeat(graph_module: fx.GraphModule) -> None:
        index = buffer_of(graph_module, activation_permutes(graph_module, "1.mlp.down_proj")[0].args[1])
        index[0] = index[1]

    message = broken_run("llama", "portable", insert_permutations, repeat)
    assert "joined before the pass are not joined any more" in message


def test_a_permutation_that_is_dropped_before_its_linear():
    """One that stays there; any other is folded or goes into a norm, whatever was inserted."""

    def drop(graph_module: fx.GraphModule) -> None:
        (node,) = activation_permutes(graph_module, "0.self_attn.o_proj")
        node.replace_all_uses_with(node.args[0])

    message = broken_run("llama", "free", insert_permutations, drop)
    assert "joins channels that were not joined before the pass" in message
    assert module_path(node_in(planned("llama", "free")[2], message)).startswith("model.layers.0.self_attn")


def other_norm_index(graph_module: fx.GraphModule, module: str) -> None:
    node = next(n for n in graph_module.graph.nodes if n.target is NORM_PERMUTE and module_path(n) == module)
    wrong = index_value(node.args[3]).flip(0)
    node.update_arg(3, Constants(graph_module).index(wrong))


@pytest.mark.parametrize(
    ("name", "module"), [("llama", "model.layers.1.input_layernorm"), ("gpt2", "transformer.h.1.ln_1")]
)
@pytest.mark.slow
def test_a_norm_that_writes_another_order(name, module):
    damage = partial(other_norm_index, module=module)
    message = broken_run(name, "fused", fuse_permutations, damage)
    assert "joins channels that were not joined before the pass" in message


def test_a_product_that_is_lost():
    """Channels that were joined are apart, and a weight is no longer read."""
    (product,) = [
        node.name
        for node in planned("llama", "fused")[2].graph.nodes
        if module_path(node) == "model.layers.1.mlp" and node.target is torch.ops.aten.mul.Tensor
    ]

    def lose(graph_module: fx.GraphModule) -> None:
        node = next(n for n in graph_module.graph.nodes if n.name == product)
        node.replace_all_uses_with(node.args[1])

    message = broken_run("llama", "fused", cancel_permutations, lose)
    assert re.search("only one of the graphs .* reads model.layers.1.mlp.(gate|up)_proj.weight", message)


def test_a_residual_that_is_lost():
    added = [
        node
        for node in planned("llama", "fused")[2].graph.nodes
        if module_path(node) == "model.layers.1" and node.target is torch.ops.aten.add.Tensor
    ]

    def lose(graph_module: fx.GraphModule) -> None:
        node = next(n for n in graph_module.graph.nodes if n.name == added[0].name)
        node.replace_all_uses_with(node.args[1])

    message = broken_run("llama", "fused", cancel_permutations, lose)
    assert f"the channels that node {added[0].name} joined before the pass are not joined" in message
