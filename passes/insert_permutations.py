"""Inserts each site's permutation: a gather of the activation that its linears read, and of their weights' columns.

The graph still computes the same, since ``W x = W[:, index] x[index]``. `fuse_permutations` then moves the gathers.
"""

from collections.abc import Sequence

from torch import fx

from permtriton.passes.graph import PERMUTE, SITE, Constants, argument, call_before, parameter_nodes, products, wrap
from permtriton.passes.weight_folds import Move


def insert_permutations(graph_module: fx.GraphModule, *, moves: Sequence[Move]) -> fx.GraphModule:
    """Inserts ``permtriton::permute`` before each linear of every site that moves, and behind its weight."""
    constants, weights = Constants(graph_module), parameter_nodes(graph_module)
    for move in moves:
        columns = {fold.parameter: fold for fold in move.columns}
        for gather in move.gathers:
            index = constants.index(gather.index)
            for name in gather.linears:
                fold, weight = columns[f"{name}.weight"], weights[f"{name}.weight"]
                for call, position in list(products(weight)):
                    activation = argument(call, position)
                    gathered = call_before(call, PERMUTE, (activation, index), activation.meta["val"])
                    gathered.meta[SITE] = gather.site
                    call.update_arg(position, gathered)
                wrap(weight, PERMUTE, (constants.index(fold.index), fold.dim))
    return graph_module
