"""Moves each permutation of the graph as far upstream as the plan says; `apply_edits` does so in the model itself.

* ``folded``: into the rows, biases, norm vectors and embedding columns that write the channels, and into the columns of
  all other linears that read them. Nothing is left to do at run time.
* ``in_norm``: into the norm before the site, which then writes its channels in the site's order.
* ``gather``: the permutation stays before the linears, because a barrier or the residual stream is upstream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple

from torch import fx

from permtriton.passes.graph import (
    NORM_PERMUTE,
    PERMUTE,
    SITE,
    Constants,
    argument,
    call_before,
    norm_input,
    parameter_nodes,
    source_of,
    tail,
    wrap,
)
from permtriton.passes.plan import Destination
from permtriton.passes.weight_folds import Move, PermuteNorm


def fuse_permutations(graph_module: fx.GraphModule, *, moves: Sequence[Move]) -> fx.GraphModule:
    """Replaces the gathers of `insert_permutations` by edits upstream, where a move's placement allows it."""
    constants, parameters = Constants(graph_module), parameter_nodes(graph_module)
    for move in moves:
        sites = {gather.site for gather in move.gathers}
        inserted = [node for node in graph_module.graph.nodes if node.meta.get(SITE) in sites]
        for fold in move.upstream:
            if fold.parameter in parameters:
                node = parameters[fold.parameter]
                wrap(tail(node), PERMUTE, (constants.index(fold.index), fold.dim))
        if move.norm is not None:
            _into_norm(parameters, constants, move.norm, source_of(argument(inserted[0], 0)))
        if move.placement is not Destination.GATHER:
            for node in inserted:
                node.replace_all_uses_with(argument(node, 0))
    return graph_module


def _into_norm(parameters: Mapping[str, fx.Node], constants: Constants, edit: PermuteNorm, source: fx.Node) -> None:
    """Makes the norm whose output is ``source`` write its channels in a new order."""
    order, norm = constants.index(edit.index), edit.norm
    if source.target is NORM_PERMUTE:
        wrap(source, PERMUTE, (order,))
        return
    vectors = (parameters.get(f"{norm.module}.{vector}") for vector in ("weight", "bias"))
    arguments = (norm_input(source, norm.module), *vectors, order, *astuple(norm.variant))
    source.replace_all_uses_with(call_before(source, NORM_PERMUTE, arguments, source.meta["val"]))
