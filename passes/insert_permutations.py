"""Inserts each site's permutation: a gather of the activation that its linears read, and of their weights' columns.

``W x = W[:, index] x[index]``: the graph computes what it did, and every permutation stands where it can be moved from.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, fx

from permtriton.passes.graph import (
    PERMUTE,
    SITE,
    Constants,
    call_before,
    input_dim,
    parameter_nodes,
    products,
    wrap,
)
from permtriton.plan import Plan, Site


def insert_permutations(
    graph_module: fx.GraphModule, *, plan: Plan, indices: Mapping[str, Tensor], block_size: int | None = None
) -> fx.GraphModule:
    """Puts ``permtriton::permute`` before the linears of every site whose space is in ``indices``.

    Args:
        graph_module: the traced model.
        plan: of that model.
        indices: space name -> unit index, int64 ``[units]``.
        block_size: what the indices must keep to, where they are block permutations.
    """
    constants, weights = Constants(graph_module), parameter_nodes(graph_module)
    for site in plan.sites:
        if site.space.name in indices and not site.space.frozen:
            index = constants.index(site.expand(indices[site.space.name]), runs_of(site, block_size))
            for name in site.linears:
                _permute_linear(weights[f"{name}.weight"], site, index)
    return graph_module


def runs_of(site: Site, block_size: int | None = None) -> list[int]:
    """Returns the sizes of the runs of input channels inside which a site's permutation must stay: heads, or blocks."""
    segments = torch.tensor(site.space.segments)
    segment_of = torch.repeat_interleave(torch.arange(segments.numel()), segments)[site.units]
    starts = (segment_of.diff() != 0) | (site.units.diff() < 0)  # another head, or another copy of the same one
    edges = [0, *(starts.nonzero().flatten() + 1).tolist(), site.channels]
    runs = [end - start for start, end in pairwise(edges)]
    if block_size is None:
        return runs
    return [min(block_size, run - offset) for run in runs for offset in range(0, run, block_size)]


def _permute_linear(weight: fx.Node, site: Site, index: fx.Node) -> None:
    calls = list(products(weight))
    wrap(weight, PERMUTE, (index, input_dim(weight)))
    for call, position in calls:
        activation = call.args[position]
        assert isinstance(activation, fx.Node)
        call.update_arg(position, _permuted(activation, index, site, call))


def _permuted(activation: fx.Node, index: fx.Node, site: Site, before: fx.Node) -> fx.Node:
    """The activation in the site's order; linears that read the same node share one gather."""
    for user in activation.users:
        if user.target is PERMUTE and user.meta.get(SITE) == site.name and user.args[1] is index:
            return user
    permuted = call_before(before, PERMUTE, (activation, index), activation.meta["val"])
    permuted.meta[SITE] = site.name
    return permuted
