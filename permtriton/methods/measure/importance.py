"""Importance of weights, kept as factors: no score matrix of a weight's size is stored.

Every score has the form ``S = |W|^power * scale_C * (row_O + column_C)``, so a few vectors describe a linear
(**add a score here**, and its name in `permtriton.config`):

* magnitude: ``|W|``;
* Wanda: ``|W| * ||X_j||_2``;
* RIA: ``(|W| / column sum + |W| / row sum) * ||X_j||_2^a`` with ``a = 0.5``;
* OBS (SparseGPT): ``W^2 / diag(H^-1)_j`` with the damped ``H = X^T X``.

``||X_j||^2`` is the sum over tokens of the squares of input channel j, divided by the number of sequences.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.config import ImportanceMethod
from permtriton.kernels.importance import ImportanceFactors
from permtriton.passes.plan import Plan, linear_module, weight_in_out
from permtriton.util.sparsity import NMPattern

RIA_ACTIVATION_POWER = 0.5
TINY = 1e-20  # a column or row of zeros scores zero, not NaN


def reads_activations(method: ImportanceMethod) -> bool:
    return method != "magnitude"


def inverts_hessians(method: ImportanceMethod) -> bool:
    """Returns whether calibration measures Hessians, one layer after another, for this score."""
    return method == "obs"


def importance_of(method: ImportanceMethod, weight_CO: Tensor, statistic: Tensor) -> ImportanceFactors:
    """Returns the importance of one linear's weights, ``[in_features, out_features]``.

    The statistic is float32 ``[in_features]``: ``diag(H^-1)`` for ``obs``, ``||X_j||`` otherwise.
    """
    if method == "magnitude":
        return ImportanceFactors(1, torch.ones_like(statistic))
    if method == "wanda":
        return ImportanceFactors(1, statistic)
    if method == "obs":
        return ImportanceFactors(2, statistic.reciprocal())
    assert method == "ria", method
    row, column = (weight_CO.abs().sum(dim, dtype=torch.float32).clamp_min(TINY).reciprocal() for dim in (0, 1))
    return ImportanceFactors(1, statistic.pow(RIA_ACTIVATION_POWER), row, column)


def importances_of(
    model: nn.Module, plan: Plan, method: ImportanceMethod, statistics: Mapping[str, Tensor]
) -> dict[str, ImportanceFactors]:
    """Returns linear name -> importance, for every pruned linear; ``statistics``: site -> its statistic."""
    return {
        name: importance_of(method, weight_in_out(linear_module(model, name)), statistics[site.name])
        for site, name in plan.linears()
    }


def magnitudes(model: PreTrainedModel, plan: Plan) -> dict[str, ImportanceFactors]:
    """Returns linear name -> importance by magnitude, which needs no statistics."""
    return {name: ImportanceFactors(1, torch.ones(site.channels, device=model.device)) for site, name in plan.linears()}


def retained(scores: Tensor, index: Tensor, pattern: NMPattern) -> float:
    """Returns the total importance that an N:M mask keeps in the order ``index``; scores are ``[channels, rows]``."""
    places = scores[index].unflatten(0, (-1, pattern.group)).unbind(1)
    return float(sum(place.sum(dtype=torch.float64) for place in islice(descending(places), pattern.kept)))


def descending(values: Sequence[Tensor]) -> Iterator[Tensor]:
    """Sorts equally shaped tensors elementwise: yields the tensor of the largest values first, the smallest last.

    For a few large tensors, bubble sort's maxima and minima are much faster than ``torch.topk`` over short rows.
    """
    while values:
        highest, remaining = values[0], []
        for value in values[1:]:
            remaining.append(torch.minimum(highest, value))
            highest = torch.maximum(highest, value)
        yield highest
        values = remaining
