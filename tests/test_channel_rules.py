"""The rules of permtriton's own operators, in graphs that passes have rewritten, and the unions that verify a pass."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from permtriton import NMPattern, config_from
from permtriton.driver.pipeline import compile_model
from permtriton.kernels import nm_mask, norm_permute, permute, sparse_linear  # noqa: F401 (registers the operators)
from permtriton.passes import channel_rules
from permtriton.passes.channels import Channels
from permtriton.passes.provenance import Provenance, channel_unions, propagate
from permtriton.passes.trace import export_program, unlifted
from permtriton.util.permutation import inverse

from . import zoo
from .zoo import find_plan

IN, WIDE, OUT = 12, 16, 8
INDEX = torch.randperm(WIDE, generator=torch.Generator().manual_seed(0))
OPS = torch.ops.permtriton


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(IN, WIDE)
        self.gate = nn.Linear(WIDE, WIDE, bias=False)
        self.up = nn.Linear(WIDE, WIDE)
        self.down = nn.Linear(WIDE, OUT)
        self.norm = nn.RMSNorm(WIDE, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x))
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def graph_of(net: nn.Module | None = None) -> fx.GraphModule:
    net = net or Mlp()
    return unlifted(export_program(net, torch.randn(2, 3, IN)), net)


def node_named(graph_module: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in graph_module.graph.nodes if name in (node.name, node.target))


def index_node(graph_module: fx.GraphModule, index: Tensor = INDEX) -> fx.Node:
    name = f"permtriton_index_{len(list(graph_module.buffers()))}"
    graph_module.register_buffer(name, index)
    with graph_module.graph.inserting_before(next(iter(graph_module.graph.nodes))):
        return graph_module.graph.get_attr(name)


def insert(graph_module: fx.GraphModule, name: str, op: Callable[..., Any], arguments: Sequence[Any] = ()) -> fx.Node:
    """Inserts ``op(node, *arguments)`` between the node ``name`` and all its readers."""
    node = node_named(graph_module, name)
    with graph_module.graph.inserting_after(node):
        new = graph_module.graph.call_function(op, (node, *arguments))
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new


def permuted(*places: tuple[str, int]) -> fx.GraphModule:
    """The graph with parameters (or activations) permuted by `INDEX` along a dimension."""
    graph_module = graph_of()
    index = index_node(graph_module)
    for name, dim in places:
        insert(graph_module, name, OPS.permute.default, (index, dim))
    graph_module.graph.lint()
    return graph_module


def found(graph_module: fx.GraphModule) -> Provenance:
    return propagate(graph_module, [], 0)


BEFORE = channel_unions(graph_of())


def joins_as_before(graph_module: fx.GraphModule) -> bool:
    after = channel_unions(graph_module)
    return after.first_new(BEFORE) is None and BEFORE.first_new(after) is None


FOLD = (("gate.weight", 0), ("up.weight", 0), ("up.bias", 0), ("down.weight", 1))


# -- unions ------------------------------------------------------------------------------------------------------------


def test_a_fold_into_all_producers_and_readers_joins_the_same_channels():
    assert joins_as_before(permuted(*FOLD))


@pytest.mark.parametrize(
    ("left_out", "node"),
    [("gate.weight", "mul"), ("up.weight", "linear_2"), ("up.bias", "linear_2"), ("down.weight", "linear_3")],
)
def test_a_fold_that_leaves_one_out_is_named_at_the_node_that_joins(left_out, node):
    after = channel_unions(permuted(*(place for place in FOLD if place[0] != left_out)))
    assert after.first_new(BEFORE) == node


def test_a_join_that_is_lost_is_a_difference():
    graph_module = graph_of()
    multiply = node_named(graph_module, "mul")
    multiply.args = (multiply.args[1], multiply.args[1])
    assert BEFORE.first_new(channel_unions(graph_module)) == "mul"


# -- permute -----------------------------------------------------------------------------------------------------------


def test_two_permutations_of_a_parameter_compose():
    graph_module = permuted(*FOLD)
    other = index_node(graph_module, inverse(INDEX))
    for name, dim in FOLD:
        insert(graph_module, next(iter(node_named(graph_module, name).users)).name, OPS.permute.default, (other, dim))
    assert joins_as_before(graph_module)


def test_a_transposed_weight_is_permuted_along_its_present_dimension():
    class Transposed(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.enter.weight) @ self.up.weight.t()

    graph_module = graph_of(Transposed())
    before = found(graph_module)
    transposed = next(iter(node_named(graph_module, "up.weight").users)).name
    insert(graph_module, transposed, OPS.permute.default, (index_node(graph_module), 0))
    after = found(graph_module)
    assert (before.axes["up.weight", 1] == before.axes["enter.weight", 0]).all()
    assert (after.axes["up.weight", 1][INDEX.numpy()] == after.axes["enter.weight", 0]).all()


def test_a_permutation_by_a_computed_index_is_a_barrier():
    graph_module = graph_of()
    insert(graph_module, "mul", OPS.permute.default, (node_named(graph_module, "x"), -1))
    assert any("permtriton.permute" in barrier for barrier in found(graph_module).barriers)


# -- masks, packed weights, norms --------------------------------------------------------------------------------------


def test_a_masked_weight_is_the_weight():
    graph_module = permuted(*FOLD)
    last = next(iter(node_named(graph_module, "down.weight").users)).name
    insert(graph_module, last, OPS.nm_mask.default, (None,) * 3 + (1, None, [WIDE], 2, 4))
    assert joins_as_before(graph_module)
    assert found(graph_module).barriers == []


@pytest.mark.parametrize("gathers", [False, True])
def test_a_packed_linear_is_its_linear(gathers):
    graph_module = permuted(("down.weight", 1), *([] if gathers else FOLD[:3]))
    linear = node_named(graph_module, "linear_3")
    x, weight, bias = linear.args
    index = index_node(graph_module) if gathers else None
    with graph_module.graph.inserting_before(linear):
        packed = graph_module.graph.call_function(OPS.pack.default, (weight, 2, 4))
        parts = [graph_module.graph.call_function(operator.getitem, (packed, i)) for i in (0, 1)]
        new = graph_module.graph.call_function(
            OPS.sparse_linear.default, (x, *parts, bias, index, WIDE, 2, 4), name="packed"
        )
    new.meta["val"] = linear.meta["val"]
    linear.replace_all_uses_with(new)
    graph_module.graph.erase_node(linear)
    assert joins_as_before(graph_module)
    products = found(graph_module).linears["down.weight"]
    assert (products.nodes, products.sources) == ([new], [x])
    if gathers:
        new.args = (*new.args[:4], None, *new.args[5:])
        assert channel_unions(graph_module).first_new(BEFORE) == new.name


@pytest.mark.parametrize(("columns", "node"), [(("gate.weight", "up.weight"), None), (("up.weight",), "linear_1")])
def test_a_norm_that_permutes_moves_the_columns_behind_it(columns, node):
    graph_module = permuted(*((name, 1) for name in columns))
    norm = node_named(graph_module, "rms_norm")
    index = next(n for n in graph_module.graph.nodes if str(n.target).startswith("permtriton_index"))
    with graph_module.graph.inserting_before(norm):
        arguments = (norm.args[0], norm.args[2], None, index, "rms", 1e-6, 0.0)
        new = graph_module.graph.call_function(OPS.norm_permute.default, arguments)
    new.meta["val"] = norm.meta["val"]
    norm.replace_all_uses_with(new)
    graph_module.graph.erase_node(norm)
    assert channel_unions(graph_module).first_new(BEFORE) == node
    assert joins_as_before(graph_module) == (node is None)
    assert len(set(found(graph_module).contexts[found(graph_module).axes["norm.weight", 0]])) == 1


# -- in place ----------------------------------------------------------------------------------------------------------

FALCONS = {  # both write one branch's output into the other's
    "7B": {},
    "40B": {"multi_query": False, "new_decoder_architecture": True, "num_kv_heads": zoo.KEY_VALUE_HEADS},
}


@pytest.mark.parametrize("form", FALCONS)
@pytest.mark.slow
def test_falcon_compiles_though_it_adds_in_place(form):
    model = zoo.build("falcon", **FALCONS[form])
    config = config_from({"layout": "fused"}, "heuristic,mask")
    compiled = compile_model(model, None, config, ids=zoo.token_ids(2, 8))
    assert set(compiled.report["sparsity_by_layer"].values()) == {0.5}
    assert compiled.report["proof"]["fold_difference"] < 1e-4


# -- taking positions --------------------------------------------------------------------------------------------------


def taken(positions: Any) -> fx.GraphModule:
    class Takes(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.enter(x).unflatten(-1, (4, WIDE // 4))
            return self.down(heads[:, :, positions].flatten(-2).repeat(1, 1, 4 // len(positions)))

    return graph_of(Takes())


@pytest.mark.parametrize("positions", [[-1], [2], [1, 0], [2, 0, 3, 1]])
def test_constant_positions_are_those_channels(positions):
    provenance = found(taken(positions))
    assert provenance.barriers == []
    rows = provenance.axes["enter.weight", 0].reshape(4, -1)
    expected = np.concatenate([rows[p] for p in positions] * (4 // len(positions)))
    assert (provenance.axes["down.weight", 1] == expected).all()


def test_computed_positions_are_a_barrier():
    class Takes(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.enter(x)[:, :, self.enter(x)[0, 0].argsort()])

    assert any("aten.index.Tensor" in barrier for barrier in found(graph_of(Takes())).barriers)


def test_positions_that_a_node_changes_are_a_barrier():
    graph_module = taken([2])
    copy = node_named(graph_module, "lift_fresh_copy")
    with graph_module.graph.inserting_after(copy):
        added = graph_module.graph.call_function(torch.ops.aten.add_.Scalar, (copy, 1))
    added.meta["val"] = copy.meta["val"]
    assert any("aten.index.Tensor" in barrier for barrier in found(graph_module).barriers)


@pytest.mark.parametrize("form", FALCONS)
@pytest.mark.slow
def test_falcon_has_no_barrier(form):
    plan = find_plan(zoo.build("falcon", **FALCONS[form]), NMPattern(2, 4))
    assert plan.barriers == []
    attends = [site for site in plan.sites if site.name.endswith("self_attention.dense")]
    heads = zoo.KEY_VALUE_HEADS if form == "40B" else 1
    assert [site.space.segments for site in attends] == [(zoo.HEAD_DIM,) * heads] * zoo.LAYERS
    assert {site.copies for site in attends} == {zoo.HEADS // heads}


# -- the tables --------------------------------------------------------------------------------------------------------


def test_ids_in_overlapping_views_are_counted_once():
    channels = Channels(graph_of())
    weight = channel_rules.ParameterValue("up.weight", (WIDE, WIDE), (0, 1), (None, None))
    channels.separate(channels.axis(weight, 0).unfold(0, 4, 2), "")
    assert sorted(channels.context_changes[-1].ids) == channels.axis(weight, 0).tolist()
