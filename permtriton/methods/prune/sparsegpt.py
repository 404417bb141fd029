"""Step ``sparsegpt``: each row's kept weights make up for its pruned ones in closed form (Frantar and Alistarh, 2023).

The linears change layer by layer; their Hessians come from the model as pruned so far.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from permtriton.kernels.nm_mask import top_n_mask
from permtriton.kernels.sparsegpt_block import sparsegpt_block
from permtriton.methods.layer_updates import update_layers
from permtriton.methods.measure.importance import importance_of
from permtriton.methods.measure.statistics import Curvature
from permtriton.methods.run import Run
from permtriton.methods.sizes import Memory, ModelSizes
from permtriton.methods.step import Stage, Step
from permtriton.model.nm_checks import check_kept, zeros_in_groups
from permtriton.passes.plan import linear_module, weight_in_out
from permtriton.util.option import option
from permtriton.util.sparsity import NMPattern

COLUMNS_AT_ONCE = 128  # columns between two updates of all later columns, as published; rounded down to whole groups
CANCELLED_SHARE = 1e-3  # share of the groups in which an update may cancel a kept weight exactly


@dataclass(frozen=True)
class SparseGPT(Step):
    """Options of the step ``sparsegpt``, which prunes linears and updates their kept weights in closed form."""

    name: ClassVar[str] = "sparsegpt"
    prefix: ClassVar[str] = "sparsegpt"
    summary: ClassVar[str] = "pruning that updates the kept weights in closed form (SparseGPT): minutes"
    stage: ClassVar[Stage] = Stage.PRUNE
    importance: ClassVar[str] = "obs"
    keeps_values: ClassVar[bool] = False
    shards: ClassVar[bool] = False

    mask: Literal["own", "keep"] = option(
        "own", "own (SparseGPT chooses the mask as it goes) or keep (the importance chooses it)."
    )

    def uses_importance(self) -> bool:
        return self.mask == "keep"

    def memory(self, sizes: ModelSizes) -> Memory:
        return sizes.layer_by_layer

    def passes(self, sizes: ModelSizes) -> float:
        return 3

    def state_bytes(self, sizes: ModelSizes) -> int:
        return sizes.finished_layers

    def run(self, run: Run) -> None:
        update_layers(run, self.name, partial(self._update, run))

    def _update(self, run: Run, curvature: Curvature, name: str) -> None:
        """Prunes and updates a linear by the Hessian of its inputs."""
        weight_view, pattern, mask = weight_in_out(linear_module(run.model, name)), run.plan.patterns[name], None
        weight = weight_view.to(curvature.damped.device)
        if self.mask == "keep":
            statistic = run.statistics[curvature.site].to(weight.device)
            mask = top_n_mask(importance_of(run.config.importance, weight, statistic).scores(weight), pattern).T
        zeros = zeros_in_groups(weight * ~curvature.dead.unsqueeze(1), pattern)
        new_weight = sparsegpt(weight.T, curvature, pattern, mask)
        check_kept(name, new_weight.T, zeros, pattern, CANCELLED_SHARE)
        weight_view.copy_(new_weight.T).add_(0.0)  # the sum turns -0.0 into 0.0


@torch.no_grad()
def sparsegpt(weight: Tensor, curvature: Curvature, pattern: NMPattern, mask: Tensor | None) -> Tensor:
    """Prunes a weight ``[out_features, in_features]`` to N:M and updates what is kept, channel by channel.

    Args:
        curvature: curvature of the linear's inputs, measured in the model as pruned so far.
        mask: bool, True where a weight is kept; None chooses a mask group by group, by the OBS score of the weights as
            updated so far.

    Returns:
        The new weight, float32, zero where pruned (a zero may be negative).
    """
    # Channels first: what belongs to one channel, or to one group, is then contiguous.
    w = weight.t().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    upper = curvature.factor
    w[curvature.dead] = 0
    width = COLUMNS_AT_ONCE // pattern.group * pattern.group
    for start in range(0, len(w), width):
        end = min(start + width, len(w))
        keep = None if mask is None else mask[:, start:end].t()
        w[start:end], errors = sparsegpt_block(w[start:end], upper[start:end, start:end], keep, pattern)
        w[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    return w.t()
