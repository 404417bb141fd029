"""Inserts the N:M mask of every pruned weight (eq. 8-9): the one approximate pass."""

from collections.abc import Mapping

import torch
from torch import fx

from permtriton.importance import Importance
from permtriton.passes.graph import NM_MASK, PERMUTE, Constants, input_dim, parameter_nodes, wrap
from permtriton.passes.insert_permutations import runs_of
from permtriton.permutation import identity
from permtriton.plan import Plan, Site
from permtriton.sparsity import NMPattern

aten = torch.ops.aten


def insert_masks(
    graph_module: fx.GraphModule, *, plan: Plan, importances: Mapping[str, Importance], pattern: NMPattern
) -> fx.GraphModule:
    """Puts ``permtriton::nm_mask`` behind every pruned weight, grouped in the order of its site's permutation.

    A weight that `insert_permutations` permutes is masked before its gather: the mask takes the same index.

    Args:
        graph_module: the model's graph, with or without permutations.
        plan: of the model.
        importances: of every pruned linear, by name, in the order of the weights as they are stored.
        pattern: what is kept.
    """
    constants, weights = Constants(graph_module), parameter_nodes(graph_module)
    for site, name in plan.linears():
        _mask(weights[f"{name}.weight"], constants, site, importances[name], pattern)
    return graph_module


def _mask(weight: fx.Node, constants: Constants, site: Site, importance: Importance, pattern: NMPattern) -> None:
    runs = [site.channels] if site.space.frozen else runs_of(site)
    permutation = next((u for u in weight.users if u.target is PERMUTE), None)
    index = permutation.args[1] if permutation else constants.index(identity(site.channels), runs)
    factors = [
        None if factor is None else constants.tensor(factor, "permtriton_factor")
        for factor in (importance.scale, importance.row, importance.column)
    ]
    soft = constants.tensor(importance.scale.new_empty(0), "permtriton_soft")
    arguments = (*factors, importance.power, index, soft, runs, pattern.kept, pattern.group, True)
    if input_dim(weight) == 1:
        wrap(weight, NM_MASK, arguments)
    else:
        transposed = wrap(weight, aten.t.default, (), weight.meta["val"].t())
        masked = wrap(transposed, NM_MASK, arguments)
        wrap(masked, aten.t.default, (), weight.meta["val"])
