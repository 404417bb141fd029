"""Lowers masked weights to packed ones, multiplied by ``permtriton::sparse_linear``.

On a GPU, PyTorch's dispatcher then runs the kernels of ``sparse_linear``, ``norm_permute`` and ``permute``; elsewhere,
it runs their references.
"""

import operator

import torch
from torch import fx

from permtriton.passes.graph import (
    NM_MASK,
    PACK,
    PERMUTE,
    SITE,
    SPARSE_LINEAR,
    WEIGHT_PRODUCTS,
    argument,
    aten,
    call_before,
    products,
)

KEPT_ARGUMENT, GROUP_ARGUMENT = 7, 8  # positions among the arguments of permtriton::nm_mask


def lower(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Replaces each product with a masked weight by ``sparse_linear`` with a packed weight.

    A gather of the activation becomes an argument of ``sparse_linear``.
    """
    for mask in [node for node in graph_module.graph.nodes if node.target is NM_MASK]:
        for call, _ in list(products(mask)):
            _pack(call, mask.args[KEPT_ARGUMENT], mask.args[GROUP_ARGUMENT])
    return graph_module


def _pack(call: fx.Node, kept: int, group: int) -> None:
    position = WEIGHT_PRODUCTS[call.target]
    activation, weight = argument(call, position), argument(call, position + 1)
    bias = call.args[0] if call.target is aten.addmm.default else call.args[2] if len(call.args) > 2 else None
    if call.target is not aten.linear.default:
        weight = call_before(call, aten.t.default, (weight,), weight.meta["val"].t())
    like = torch.empty_like(weight.meta["val"], device="meta")
    packed = call_before(call, PACK, (weight, kept, group), PACK(like, kept, group))
    parts = [call_before(call, operator.getitem, (packed, n), packed.meta["val"][n]) for n in range(2)]
    index = None
    if activation.target is PERMUTE and activation.meta.get(SITE):
        activation, index = argument(activation, 0), activation.args[1]
    arguments = (activation, *parts, bias, index, like.shape[1], kept, group)
    call.replace_all_uses_with(call_before(call, SPARSE_LINEAR, arguments, call.meta["val"]))
