"""Inserts each site's permutation: a gather of the activation that its linears read, and of their weights' columns.

The graph still computes the same, since ``W x = W[:, index] x[index]``. `fuse_permutations` then moves the gathers.
"""

from collections.abc import Sequence

from torch import fx

from permtriton.passes.edits import Gather, Move
from permtriton.passes.graph import PERMUTE, SITE, Constants, call_before, input_dim, parameter_nodes, products, wrap


def insert_permutations(graph_module: fx.GraphModule, *, moves: Sequence[Move]) -> fx.GraphModule:
    """Inserts ``permtriton::permute`` before the linears of every site that moves, and behind their weights."""
    constants, weights = Constants(graph_module), parameter_nodes(graph_module)
    for move in moves:
        columns = {fold.parameter: fold for fold in move.columns}
        for gather in move.gathers:
            index = constants.index(gather.index)
            for name in gather.linears:
                fold, weight = columns[f"{name}.weight"], weights[f"{name}.weight"]
                assert fold.dim == input_dim(weight)
                calls = list(products(weight))
                wrap(weight, PERMUTE, (constants.index(fold.index), fold.dim))
                for call, position in calls:
                    activation = call.args[position]
                    assert isinstance(activation, fx.Node)
                    call.update_arg(position, _gathered(activation, index, gather, call))
    return graph_module


def _gathered(activation: fx.Node, index: fx.Node, gather: Gather, call: fx.Node) -> fx.Node:
    """Returns the activation in the site's order; linears that read the same node share one gather."""
    for user in activation.users:
        if user.target is PERMUTE and user.meta.get(SITE) == gather.site and user.args[1] is index:
            return user
    permuted = call_before(call, PERMUTE, (activation, index), activation.meta["val"])
    permuted.meta[SITE] = gather.site
    return permuted
