"""Which linears stay dense, where a share of the prunable weights may: whose masks raise the loss most per weight.

Where the outputs of row o of a linear are off by ``e_o``, the loss rises to second order by ``f_o e_o / 2``: ``f_o`` is
the Fisher information of the outputs (`permtriton.methods.measure.fisher`). For ``e_o``, squared scores of what a mask
drops in the present order are summed: OBS's where it is the importance, else Wanda's, whatever importance decides the
mask. Such a score stands for the error that its weight leaves in an output when it is dropped alone. What an update of
the kept weights mends later is not known yet, so that the costs rank linears, and predict no loss. Both factors are
sums over tokens: the second linears of experts, which read few, count for less than they should.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.model.experts import stacked_name
from permtriton.passes.plan import Plan, linear_module, weight_in_out
from permtriton.util.sparsity import NMPattern

DENSE_SHARE = "dense share"  # the stage


def costliest(
    model: nn.Module,
    plan: Plan,
    importances: Mapping[str, ImportanceFactors],
    errors: Mapping[str, ImportanceFactors],
    rows: Mapping[str, Tensor],
    share: float,
) -> list[str]:
    """Returns the linears that stay dense, by name: together at most a share of the prunable weights.

    They are taken one after another, the costliest first; one that would exceed the share is passed over, and so is the
    last one that would be pruned. Experts that one parameter holds go together.

    Args:
        importances: of every linear of the plan, by name, which decide its mask.
        errors: likewise, scores in the unit of an output, in which what the mask drops is counted.
        rows: how much the loss feels each row, float32 ``[out_features]``, by name.
        share: between 0 and 1.
    """
    sizes: dict[str, int] = {}
    costs: dict[str, float] = {}
    held: dict[str, list[str]] = {}
    for _, name in plan.linears():
        weight_CO = weight_in_out(linear_module(model, name))
        stack = stacked_name(model, name)
        parameter = stack[0] if stack else name
        sizes[parameter] = sizes.get(parameter, 0) + weight_CO.numel()
        costs[parameter] = costs.get(parameter, 0.0) + _cost(
            weight_CO, importances[name], errors[name], rows[name], plan.patterns[name]
        )
        held.setdefault(parameter, []).append(name)
    left, dense = share * sum(sizes.values()), list[str]()
    for parameter in sorted(costs, key=lambda each: costs[each] / sizes[each], reverse=True):
        if sizes[parameter] <= left and len(dense) < len(sizes) - 1:
            dense.append(parameter)
            left -= sizes[parameter]
    return [name for parameter in dense for name in held[parameter]]


def _cost(
    weight_CO: Tensor, importance: ImportanceFactors, error: ImportanceFactors, rows_O: Tensor, pattern: NMPattern
) -> float:
    mask_CO = top_n_mask(importance.scores(weight_CO), pattern)
    dropped_CO = error.scores(weight_CO).pow(2 / error.power) * ~mask_CO
    return float(dropped_CO.sum(0) @ rows_O)
