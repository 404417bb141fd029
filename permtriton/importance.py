"""Importance of weights, as factors: no score matrix of a weight's size is kept.

Every score here has the form ``S = |W|^power * scale_C * (row_O + column_C)``, so a few vectors describe a linear:

* magnitude: ``|W|``;
* Wanda: ``|W| * ||X_j||_2``;
* RIA: ``(|W| / column sum + |W| / row sum) * ||X_j||_2^a`` with ``a = 0.5``;
* OBS (SparseGPT): ``W^2 / diag(H^-1)_j`` with ``H = X^T X``, damped.

``||X_j||`` is the root of the sum of squares of input channel j, averaged over sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from permtriton import config
from permtriton.kernels.nm_mask import importance_scores

RIA_ACTIVATION_POWER = 0.5
TINY = 1e-20  # a column or row of zeros scores zero, not NaN


@dataclass(frozen=True)
class Importance:
    """Factors of one linear's scores, float32.

    Attributes:
        power: exponent of ``|W|``, 1 or 2.
        scale: ``[in_features]``.
        row: ``[out_features]``, or None.
        column: ``[in_features]``, given together with ``row``.
    """

    power: int
    scale: Tensor
    row: Tensor | None = None
    column: Tensor | None = None

    def scores(self, weight_CO: Tensor) -> Tensor:
        """Returns the scores of a weight ``[in_features, out_features]``, float32 of the same shape."""
        return importance_scores(weight_CO, self.scale, self.row, self.column, self.power)


def importance_of(method: config.Importance, weight_CO: Tensor, statistic: Tensor) -> Importance:
    """Returns the factors of one linear.

    Args:
        method: the score.
        weight_CO: ``[in_features, out_features]``.
        statistic: float32 ``[in_features]``: ``diag(H^-1)`` for ``obs``, ``||X_j||`` otherwise.
    """
    if method == "magnitude":
        return Importance(1, torch.ones_like(statistic))
    if method == "wanda":
        return Importance(1, statistic)
    if method == "obs":
        return Importance(2, statistic.reciprocal())
    column_sums = weight_CO.abs().sum(1, dtype=torch.float32)
    row_sums = weight_CO.abs().sum(0, dtype=torch.float32)
    return Importance(
        1,
        statistic.pow(RIA_ACTIVATION_POWER),
        row_sums.clamp_min(TINY).reciprocal(),
        column_sums.clamp_min(TINY).reciprocal(),
    )
