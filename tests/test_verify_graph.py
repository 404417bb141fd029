"""The verifier names the pass and the node of every deliberate error."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, fx

from permtriton.errors import VerificationError
from permtriton.model.checks import TOLERANCE
from permtriton.passes.cancel_permutations import cancel_permutations
from permtriton.passes.edits import moves_of
from permtriton.passes.fuse_permutations import fuse_permutations
from permtriton.passes.graph import (
    NORM_PERMUTE,
    PERMUTE,
    SITE,
    SPARSE_LINEAR,
    Constants,
    absorb_folds,
    index_value,
    module_path,
    parameter_nodes,
    wrap,
)
from permtriton.passes.insert_permutations import insert_permutations
from permtriton.passes.lower import lower
from permtriton.passes.pipeline import (
    Pass,
    PassResult,
    permutation_passes,
    pruning_passes,
    run_passes,
)

from . import zoo
from .graphs import (
    BATCH,
    compiled,
    moved_importances,
    planned,
    private,
)


def damaged(function: Callable, damage: Callable[[fx.GraphModule], None]) -> Callable:
    """A pass of the same name whose result is damaged."""

    @functools.wraps(function)
    def broken(graph_module: fx.GraphModule, **options: object) -> fx.GraphModule:
        graph_module = function(graph_module, **options)
        damage(graph_module)
        return graph_module

    return broken


def damaged_run(step: Pass, function: Callable, damage: Callable) -> Callable:
    return partial(damaged(function, damage), **(step.run.keywords if isinstance(step.run, partial) else {}))


def broken_run(name: str, layout: str, function: Callable, damage: Callable, *, numbers: bool = True) -> str:
    """Runs the compiler with one pass damaged and returns the verifier's message."""
    model, plan, graph_module = private(name, layout)
    indices, batches = compiled(name, layout).indices, [BATCH] if numbers else ()

    def with_damage(passes: Sequence[Pass]) -> list[Pass]:
        return [replace(p, run=damaged_run(p, function, damage)) if p.name == function.__name__ else p for p in passes]

    def run_all() -> None:
        permuted = run_passes(graph_module, with_damage(permutation_passes(moves_of(plan, indices))), batches)
        zoo.fold(model, plan, indices)
        importances = moved_importances(plan, model, indices, compiled(name, layout).importances)
        run_passes(absorb_folds(permuted), with_damage(pruning_passes(plan, importances)), batches)

    with pytest.raises(VerificationError, match=f"^pass {function.__name__}: ") as caught:
        run_all()
    assert "this is a bug of permtriton" in str(caught.value)
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
    name = re.search(r"node (?:whose values differ is )?(\w+)", message)[1]
    return next(node for node in graph_module.graph.nodes if node.name == name)


PRODUCERS = {
    "mlp.gate_proj.weight": "mlp",
    "mlp.up_proj.weight": "mlp",
    "self_attn.v_proj.weight": "self_attn",
}


@pytest.mark.parametrize("layout", ["portable", "fused"])
@pytest.mark.parametrize("numbers", [True, False])
@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.slow(
    but=["mlp.gate_proj.weight-True-portable", "mlp.gate_proj.weight-False-fused", "self_attn.v_proj.weight-True-fused"]
)
def test_a_producer_that_is_not_folded(producer, numbers, layout):
    damage = partial(undo, parameter=f"model.layers.1.{producer}")
    message = broken_run("llama", layout, fuse_permutations, damage, numbers=numbers)
    assert "joins channels that were not joined before the pass" in message
    node = node_in(planned("llama", layout)[2], message)
    assert module_path(node).startswith(f"model.layers.1.{PRODUCERS[producer]}")


@pytest.mark.parametrize("parameter", ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_a_part_of_the_stream_that_is_not_folded(parameter):
    message = broken_run("llama", "portable", fuse_permutations, partial(undo, parameter=parameter))
    assert "joins channels that were not joined before the pass" in message


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


@pytest.mark.parametrize("numbers", [True, False])
def test_a_permutation_that_is_dropped_before_its_linear(numbers):
    """One that stays there; any other is folded or goes into a norm, whatever was inserted."""

    def drop(graph_module: fx.GraphModule) -> None:
        (node,) = activation_permutes(graph_module, "0.self_attn.o_proj")
        node.replace_all_uses_with(node.args[0])

    message = broken_run("llama", "free", insert_permutations, drop, numbers=numbers)
    assert "joins channels that were not joined before the pass" in message
    assert module_path(node_in(planned("llama", "free")[2], message)).startswith("model.layers.0.self_attn")


def other_norm_index(graph_module: fx.GraphModule, module: str) -> None:
    node = next(n for n in graph_module.graph.nodes if n.target is NORM_PERMUTE and module_path(n) == module)
    wrong = index_value(node.args[3]).flip(0)
    node.update_arg(3, Constants(graph_module).index(wrong))


@pytest.mark.parametrize("numbers", [True, False])
@pytest.mark.parametrize(
    ("name", "module"), [("llama", "model.layers.1.input_layernorm"), ("gpt2", "transformer.h.1.ln_1")]
)
def test_a_norm_that_writes_another_order(name, module, numbers):
    damage = partial(other_norm_index, module=module)
    message = broken_run(name, "fused", fuse_permutations, damage, numbers=numbers)
    assert "joins channels that were not joined before the pass" in message


def product_of(graph_module: fx.GraphModule, linear: str) -> fx.Node:
    calls = [node for node in graph_module.graph.nodes if module_path(node) == linear]
    return next(node for node in calls if node.target in (torch.ops.aten.linear.default, SPARSE_LINEAR))


def scale_output(graph_module: fx.GraphModule, linear: str, factor: float) -> None:
    wrap(product_of(graph_module, linear), torch.ops.aten.mul.Tensor, (factor,))


@pytest.mark.parametrize("factor", [1.01, float("nan")])
@pytest.mark.parametrize("function", [insert_permutations, fuse_permutations, cancel_permutations, lower])
@pytest.mark.slow(but=["insert_permutations-nan", "cancel_permutations-1.01", "fuse_permutations-nan", "lower-1.01"])
def test_numbers_that_are_wrong(function, factor):
    """The channels are right, so only outputs differ; the first node whose values differ in both graphs is named."""
    linear = "model.layers.1.mlp.up_proj"
    message = broken_run("llama", "fused", function, partial(scale_output, linear=linear, factor=factor))
    assert re.search(r"outputs differ by [\d.e+nan-]+ of their size, more than 1e-05", message)
    (reader,) = product_of(planned("llama", "fused")[2], linear).users
    assert message.split("first node whose values differ is ")[1].startswith(f"{reader.name}, or one before it. ")


def test_a_graph_may_round_as_much_as_it_does_by_itself(monkeypatch):
    """As where it amplifies rounding: without any tolerance, only the graph's own noise is allowed."""
    monkeypatch.setitem(TOLERANCE, torch.float64, 0.0)
    _, plan, graph_module = private("llama", "fused")
    results: list[PassResult] = []
    passes = permutation_passes(moves_of(plan, compiled("llama", "fused").indices))
    run_passes(graph_module, passes, [BATCH], results.append)
    assert 0 < max(result.difference or 0 for result in results) < 1e-6
    slightly = partial(scale_output, linear="model.layers.1.mlp.up_proj", factor=1 + 1e-3)
    assert "outputs differ" in broken_run("llama", "fused", fuse_permutations, slightly)


def test_wrong_numbers_are_not_seen_without_weights():
    """Errors of structure are named without values: the outputs of a model on meta cannot be compared."""
    graph_module = planned("llama", "fused")[2]

    def scale(graph_module: fx.GraphModule) -> fx.GraphModule:
        scale_output(graph_module, "lm_head", 2.0)
        return graph_module

    run_passes(graph_module, [Pass(scale)])
    for exact in (True, False):
        with pytest.raises(VerificationError, match=r"pass scale: outputs differ by .* values differ is the output"):
            run_passes(graph_module, [Pass(scale, exact=exact)], [BATCH])


@pytest.mark.parametrize("numbers", [True, False])
def test_a_product_that_is_lost(numbers):
    """Channels that were joined are apart, and a weight is no longer read."""
    (product,) = [
        node.name
        for node in planned("llama", "fused")[2].graph.nodes
        if module_path(node) == "model.layers.1.mlp" and node.target is torch.ops.aten.mul.Tensor
    ]

    def lose(graph_module: fx.GraphModule) -> None:
        node = next(n for n in graph_module.graph.nodes if n.name == product)
        node.replace_all_uses_with(node.args[1])

    message = broken_run("llama", "fused", cancel_permutations, lose, numbers=numbers)
    assert re.search("only one of the graphs .* reads model.layers.1.mlp.(gate|up)_proj.weight", message)


@pytest.mark.parametrize("numbers", [True, False])
def test_a_residual_that_is_lost(numbers):
    added = [
        node
        for node in planned("llama", "fused")[2].graph.nodes
        if module_path(node) == "model.layers.1" and node.target is torch.ops.aten.add.Tensor
    ]

    def lose(graph_module: fx.GraphModule) -> None:
        node = next(n for n in graph_module.graph.nodes if n.name == added[0].name)
        node.replace_all_uses_with(node.args[1])

    message = broken_run("llama", "fused", cancel_permutations, lose, numbers=numbers)
    assert f"the channels that node {added[0].name} joined before the pass are not joined" in message
