"""Inserts the N:M mask of every pruned weight (eq. 8-9): the only approximate pass."""

from collections.abc import Mapping

from torch import fx

from permtriton.kernels.importance import ImportanceFactors
from permtriton.passes.graph import NM_MASK, Constants, aten, input_dim, parameter_nodes, wrap
from permtriton.passes.plan import Plan
from permtriton.passes.weight_folds import runs_of
from permtriton.util.permutation import identity


def insert_masks(
    graph_module: fx.GraphModule, *, plan: Plan, importances: Mapping[str, ImportanceFactors]
) -> fx.GraphModule:
    """Inserts ``permtriton::nm_mask`` behind every pruned weight."""
    constants, weights = Constants(graph_module), parameter_nodes(graph_module)
    for site, name in plan.linears():
        weight, importance, pattern = weights[f"{name}.weight"], importances[name], plan.patterns[name]
        runs = [site.channels] if site.space.frozen else list(runs_of(site))
        index = constants.index(identity(site.channels))
        factors = [
            None if factor is None else constants.tensor(factor, "permtriton_factor")
            for factor in (importance.scale, importance.row, importance.column)
        ]
        arguments = (importance.power, *factors, index, runs, pattern.kept, pattern.group)
        if input_dim(weight) == 1:
            wrap(weight, NM_MASK, arguments)
        else:
            transposed = wrap(weight, aten.t.default, (), weight.meta["val"].t())
            masked = wrap(transposed, NM_MASK, arguments)
            wrap(masked, aten.t.default, (), weight.meta["val"])
    return graph_module
