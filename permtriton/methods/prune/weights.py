"""Prunes weights in place: by a mask, or by SparseGPT, which also updates what is kept."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.config import CommonConfig
from permtriton.data.samples import Samples
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.methods.measure.importance import importance_of
from permtriton.methods.measure.statistics import hessians
from permtriton.methods.prune.obs import Curvature, curvatures, sparsegpt
from permtriton.model.checks import check_kept, zeros_in_groups
from permtriton.passes.plan import Plan, Site, linear_module, weight_in_out
from permtriton.running import ranks
from permtriton.running.layer_inputs import layer_by_layer
from permtriton.running.state import FinishedLayers
from permtriton.running.store import MEMORY, Store
from permtriton.util.progress import Progress
from permtriton.util.sparsity import NMPattern

CANCELLED_SHARE = 1e-3  # share of the groups in which an update may cancel a kept weight exactly


@torch.no_grad()
def mask_weights(model: nn.Module, plan: Plan, importances: Mapping[str, ImportanceFactors]) -> None:
    """Sets the weights that the N:M masks drop to 0.0.

    Args:
        model: Dense model, its channels in their final order; changed in place.
        importances: Linear name -> importance, for every pruned linear, in the final order.

    Raises:
        VerificationError: A weight keeps more or fewer values than the pattern says.
    """
    for _, name in plan.linears():
        weight, pattern = weight_in_out(linear_module(model, name)), plan.patterns[name]
        mask = top_n_mask(importances[name].scores(weight), pattern)
        zeros = zeros_in_groups(weight, pattern)
        weight.masked_fill_(~mask, 0).add_(0.0)  # the sum turns -0.0 into 0.0
        check_kept(name, weight, zeros, pattern)
    ranks.send_from_first(linear_module(model, name).get_parameter("weight") for _, name in plan.linears())


@torch.no_grad()
def update_weights(  # noqa: PLR0913
    model: PreTrainedModel,
    plan: Plan,
    statistics: Mapping[str, Tensor] | None,
    samples: Samples,
    batch: int,
    config: CommonConfig,
    progress: Progress,
    state: FinishedLayers | None = None,
    store: Store = MEMORY,
) -> None:
    """Prunes and updates the weights layer by layer with SparseGPT; Hessians come from the model as pruned so far.

    Args:
        model: Dense model, its channels in their final order; changed in place.
        statistics: Site name -> statistic, from which the masks follow; None lets SparseGPT choose them.
        state: Files that keep the finished layers, to continue after the last one; None keeps no state.

    Raises:
        CalibrationError: An activation is NaN or infinite, or a Hessian cannot be inverted.
        OutputError: The state belongs to another run, is damaged, or cannot be written.
        VerificationError: A weight keeps more or fewer values than the pattern says.
    """
    share = ranks.own_rows(len(samples)).numel()
    with progress.stage("sparsegpt", (share + 1) * len(plan.layers())) as advance:
        layers = layer_by_layer(model, plan, samples, batch, changing=True, store=store)
        for number, layer in enumerate(layers):
            weights = weights_of_sites(model, layer.sites)
            if state is not None and state.restore(number, weights, plan.patterns) is not None:
                advance(share + 1)
                continue
            curvature = curvatures(hessians(model, layer, advance))
            linears = [(name, site.name, curvature) for site in layer.sites for name in site.linears]
            ranks.deal(linears, lambda linear: _update(model, plan.patterns, *linear, statistics, config))
            ranks.send_dealt([linear_module(model, name).get_parameter("weight") for name, _, _ in linears])
            if state is not None:
                state.keep(number, weights, plan.patterns)
            advance()


def weights_of_sites(model: nn.Module, sites: Iterable[Site]) -> dict[str, Tensor]:
    """Returns linear -> its weight, ``[in_features, out_features]``, for all that read the sites."""
    return {name: weight_in_out(linear_module(model, name)) for site in sites for name in site.linears}


def _update(
    model: nn.Module,
    patterns: Mapping[str, NMPattern],
    name: str,
    site: str,
    curvature: Callable[[str], Curvature],
    statistics: Mapping[str, Tensor] | None,
    config: CommonConfig,
) -> None:
    """Prunes and updates the weight of one linear; arguments and errors as of `update_weights`."""
    stored, pattern, mask = weight_in_out(linear_module(model, name)), patterns[name], None
    of_inputs = curvature(site)
    weight = stored.to(of_inputs.damped.device)
    if statistics is not None:
        mask = top_n_mask(
            importance_of(config.importance, weight, statistics[site].to(weight.device)).scores(weight), pattern
        ).T
    zeros = zeros_in_groups(weight * ~of_inputs.dead.unsqueeze(1), pattern)
    updated = sparsegpt(weight.T, of_inputs, pattern, mask)
    check_kept(name, updated.T, zeros, pattern, CANCELLED_SHARE)
    stored.copy_(updated.T).add_(0.0)  # the sum turns -0.0 into 0.0
