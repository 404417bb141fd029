"""Step ``mask``: the weights that an N:M mask of the importance drops are set to 0, the others keep their values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.methods.measure.postconditions import check_retained, total_importance
from permtriton.methods.run import Run
from permtriton.methods.step import Stage, Step
from permtriton.model.nm_checks import check_kept, zeros_in_groups
from permtriton.passes.plan import Plan, linear_module, weight_in_out
from permtriton.util import ranks


@dataclass(frozen=True)
class Mask(Step):
    """The step ``mask``, which sets the weights of the lowest importance in each group to 0; it has no options."""

    name: ClassVar[str] = "mask"
    prefix: ClassVar[str] = "mask"
    summary: ClassVar[str] = "the weights of the lowest importance are set to 0: seconds"
    stage: ClassVar[Stage] = Stage.PRUNE

    def run(self, run: Run) -> None:
        importances = run.importances()
        mask_weights(run.model, run.plan, importances)
        check_retained(run.retained_importance, total_importance(run.model, run.plan, importances))
        run.check_promise()


@torch.no_grad()
def mask_weights(model: nn.Module, plan: Plan, importances: Mapping[str, ImportanceFactors]) -> None:
    """Sets the weights that the masks drop to 0.0, and checks that every group keeps N."""
    for _, name in plan.linears():
        weight, pattern = weight_in_out(linear_module(model, name)), plan.patterns[name]
        mask = top_n_mask(importances[name].scores(weight), pattern)
        zeros = zeros_in_groups(weight, pattern)
        weight.masked_fill_(~mask, 0).add_(0.0)  # the sum turns -0.0 into 0.0
        check_kept(name, weight, zeros, pattern)
    ranks.send_from_first(linear_module(model, name).get_parameter("weight") for _, name in plan.linears())
