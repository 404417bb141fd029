"""Prunes weights in place: by a mask, or by SparseGPT, which also updates what is kept."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.config import CompileConfig
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.model.checks import check_kept, zeros_in_groups
from permtriton.model.plan import Plan, Site, linear_module, weight_in_out
from permtriton.progress import Progress
from permtriton.prune.importance import importance_of
from permtriton.prune.layer_inputs import layer_by_layer
from permtriton.prune.sparsegpt import sparsegpt
from permtriton.prune.statistics import hessians
from permtriton.sparsity import NMPattern

CANCELLED = 1e-3  # share of the groups in which an update may cancel a kept weight exactly


@torch.no_grad()
def mask_weights(
    model: nn.Module, plan: Plan, importances: Mapping[str, ImportanceFactors], pattern: NMPattern
) -> None:
    """Sets the weights that the N:M masks drop to 0.0.

    Args:
        model: Dense model, its channels in their final order; changed in place.
        plan: The model's plan.
        importances: Linear name -> importance, for every pruned linear, in the final order.
        pattern: N:M pattern.

    Raises:
        VerificationError: A weight keeps more or fewer values than the pattern says.
    """
    for _, name in plan.linears():
        weight = weight_in_out(linear_module(model, name))
        mask = top_n_mask(importances[name].scores(weight), pattern)
        zeros = zeros_in_groups(weight, pattern)
        weight.masked_fill_(~mask, 0).add_(0.0)  # the sum turns -0.0 into 0.0
        check_kept(name, weight, zeros, pattern)


@torch.no_grad()
def update_weights(
    model: PreTrainedModel,
    plan: Plan,
    statistics: Mapping[str, Tensor],
    ids: Tensor,
    batch: int,
    config: CompileConfig,
    progress: Progress,
) -> None:
    """Prunes and updates the weights layer by layer with SparseGPT; Hessians come from the model as pruned so far.

    Args:
        model: Dense model, its channels in their final order; changed in place.
        plan: The model's plan.
        statistics: Site name -> statistic, from which the masks follow where ``update_mask`` is ``keep``.
        ids: Calibration sequences, int64 ``[samples, tokens]``.
        batch: Sequences per forward pass.
        config: Options: the pattern, the importance and ``update_mask``.
        progress: Progress reporter.

    Raises:
        CalibrationError: An activation is NaN or infinite, or a Hessian cannot be inverted.
        VerificationError: A weight keeps more or fewer values than the pattern says.
    """
    with progress.stage("update", (ids.shape[0] + 1) * len(plan.layers())) as advance:
        for layer in layer_by_layer(model, plan, ids, batch, changing=True):
            layer_hessians = hessians(model, layer, advance)
            for site in layer.sites:
                masks = _masks(model, site, statistics[site.name], config) if config.update_mask == "keep" else {}
                for name in site.linears:
                    weight = weight_in_out(linear_module(model, name))
                    mask = masks[name].T if name in masks else None
                    hessian = layer_hessians[site.name]
                    zeros = zeros_in_groups(weight * (hessian.diagonal() != 0).unsqueeze(1), config.sparsity)
                    updated = sparsegpt(weight.T, hessian, config.sparsity, mask, name)
                    check_kept(name, updated.T, zeros, config.sparsity, CANCELLED)
                    weight.copy_(updated.T).add_(0.0)  # the sum turns -0.0 into 0.0
            advance()


def _masks(model: nn.Module, site: Site, statistic: Tensor, config: CompileConfig) -> dict[str, Tensor]:
    masks = {}
    for name in site.linears:
        weight = weight_in_out(linear_module(model, name))
        masks[name] = top_n_mask(importance_of(config.importance, weight, statistic).scores(weight), config.sparsity)
    return masks
