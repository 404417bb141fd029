"""Checks that a model has the importance and the loss that were measured when its order or its weights were chosen.

Equal outputs do not prove that the chosen order was applied: the inverse permutation, a fold applied twice or
statistics of another order give a consistent model that is pruned badly. Two quantities are therefore measured when an
order is chosen, and again on the model in this order: the importance that the masks retain, and the loss.
"""

from collections.abc import Mapping

import torch
from torch import nn

from permtriton.errors import VerificationError
from permtriton.kernels.importance import ImportanceFactors
from permtriton.passes.plan import Plan, linear_module, weight_in_out

RETAINED_TOLERANCE = 1e-3  # relative: a few scores may tie, and row sums round differently in another order
LOSS_TOLERANCE = 1e-4  # relative: sums over channels round differently in another order; 100 times that in 16 bits


def total_importance(model: nn.Module, plan: Plan, importances: Mapping[str, ImportanceFactors]) -> dict[str, float]:
    """Returns linear -> sum of its weights' scores. Pruned weights score 0, so after masking, only kept ones count."""
    weights = {name: weight_in_out(linear_module(model, name)) for _, name in plan.linears()}
    return {name: float(importances[name].scores(w).sum(dtype=torch.float64)) for name, w in weights.items()}


def check_retained(promised: Mapping[str, float], kept: Mapping[str, float]) -> None:
    """Compares the importance that a mask should retain with what it does retain, in every linear."""
    for name, expected in promised.items():
        if not abs(kept[name] - expected) <= RETAINED_TOLERANCE * abs(expected):
            raise VerificationError(
                f"{name}: the mask should retain an importance of {expected:.6g} in the chosen channel order and "
                f"retains {kept[name]:.6g}: the order or the mask was not applied as it was found. Nothing was saved; "
                "this is a bug in permtriton, please report it"
            )


def check_no_worse(start: float, end: float, stage: str) -> None:
    """Checks that the order or the weights that were kept are no worse than those that the stage began with."""
    if not end <= start:
        raise VerificationError(
            f"{stage} began with a loss of {start:.6g} and kept one of {end:.6g}, although it must never end worse. "
            "Nothing was saved; this is a bug in permtriton, please report it"
        )


def check_loss(
    measured: float, loss: float, dtype: torch.dtype, moment: str = "calibration, when the order was chosen"
) -> None:
    """Compares ``measured``, the loss that a stage measured of its result, with ``loss``, measured on the model now."""
    tolerance = LOSS_TOLERANCE * (1 if dtype.itemsize >= 4 else 100)
    if not abs(loss - measured) <= tolerance * measured + 4 * torch.finfo(torch.float32).eps:
        raise VerificationError(
            f"the loss ({moment}) was {measured:.6g} and is {loss:.6g} in the pruned model: what was found was not "
            "applied as it was measured. Nothing was saved; this is a bug in permtriton, please report it"
        )
