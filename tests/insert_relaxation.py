"""An oracle for the learner: the graph in which the masks' order comes from logits (eq. 2-9).

logits -> ``sinkhorn`` -> ``assignment`` -> ``nm_mask``. What is trained is the model itself with the same masks:
both must have the same loss and the same gradients.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from permtriton.kernels import assignment, sinkhorn  # noqa: F401 (registers the operators)
from permtriton.methods.order.relaxation import Relaxation, SiteBlocks
from permtriton.passes.graph import NM_MASK, OURS, Constants, parameter_nodes
from permtriton.passes.plan import ChannelSpace, Plan

aten = torch.ops.aten
INDEX_ARGUMENT, SOFT_ARGUMENT, SIZES_ARGUMENT = 5, 6, 7  # of permtriton::nm_mask


def insert_relaxation(
    graph_module: fx.GraphModule, *, plan: Plan, spaces: Sequence[ChannelSpace], relaxation: Relaxation, tau: float
) -> fx.GraphModule:
    """Returns the learning graph: the masks' order comes from logits, and gradients reach them.

    Args:
        graph_module: the model's graph in base order, with masks inserted and no permutations.
        plan: of the model.
        spaces: those that learn.
        relaxation: of ``spaces``; its parameters become buffers of the graph, shared.
        tau: temperature.
    """
    constants, weights = Constants(graph_module), parameter_nodes(graph_module)
    first = next(n for n in graph_module.graph.nodes if n.op == "call_function")
    call = _caller(first)
    soft, hard = _relaxed(graph_module, constants, relaxation, tau, call)
    for site in plan.sites:
        if not any(site.space is space for space in spaces):
            continue
        blocks = SiteBlocks(relaxation, site)
        flat, index = _gathered(constants, blocks, soft, hard, call)
        for name in site.linears:
            mask = _mask_of(weights[f"{name}.weight"])
            mask.update_arg(INDEX_ARGUMENT, index)
            mask.update_arg(SOFT_ARGUMENT, flat)
            mask.update_arg(SIZES_ARGUMENT, blocks.sizes)
    return graph_module


def _caller(before: fx.Node) -> Callable[..., fx.Node]:
    """Inserts operators before ``before``, with what their results look like."""

    def call(target: Any, *arguments: Any) -> fx.Node:
        with before.graph.inserting_before(before):
            node = before.graph.call_function(target, arguments)
        values = fx.node.map_arg(arguments, lambda n: tree_map_only(Tensor, _on_meta, n.meta["val"]))
        node.meta = {"val": target(*values), OURS: True}
        return node

    return call


def _on_meta(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="meta")


def _relaxed(
    graph_module: fx.GraphModule, constants: Constants, relaxation: Relaxation, tau: float, call: Callable[..., fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Returns the soft and the hard permutations, one node per block size."""
    scale = constants.tensor(relaxation.scale, "permtriton_scale")
    soft, hard = [], []
    for owners, weight in zip(relaxation.owners, relaxation.weights, strict=True):
        owner = constants.tensor(owners, "permtriton_owner")
        sized = call(aten.view.default, call(aten.index_select.default, scale, 0, owner), [-1, 1, 1])
        logits = call(aten.mul.Tensor, sized, constants.tensor(weight, "permtriton_logits"))
        if relaxation.clamp:
            logits = call(aten.clamp.default, logits, -relaxation.clamp, relaxation.clamp)
        scaled = call(torch.ops.permtriton.sinkhorn.default, logits, tau, relaxation.rounds)
        soft.append(call(operator.getitem, scaled, 0))
        hard.append(call(torch.ops.permtriton.assignment.default, call(aten.detach.default, soft[-1])))
    return soft, hard


def _gathered(
    constants: Constants, blocks: SiteBlocks, soft: list[fx.Node], hard: list[fx.Node], call: Callable[..., fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """A site's soft blocks, flat, and its hard index, both in channel order."""
    flat, index, start = [], [], 0
    for place, rows in blocks.parts:
        size = soft[place].meta["val"].shape[-1]
        chosen = constants.tensor(torch.tensor(rows, device=constants.device), "permtriton_rows")
        starts = start + size * torch.arange(len(rows), device=constants.device).unsqueeze(1)
        start += size * len(rows)
        flat.append(call(aten.reshape.default, call(aten.index_select.default, soft[place], 0, chosen), [-1]))
        inside = call(aten.index_select.default, hard[place], 0, chosen)
        placed = call(aten.add.Tensor, inside, constants.tensor(starts, "permtriton_starts"))
        index.append(call(aten.reshape.default, placed, [-1]))
    return call(aten.cat.default, flat), call(aten.cat.default, index)


def _mask_of(weight: fx.Node) -> fx.Node:
    node = weight
    while node.target is not NM_MASK:
        (node,) = node.users
    return node
