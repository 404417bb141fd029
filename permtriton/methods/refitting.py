"""Refitting: exact weights for a mask, layer by layer, that make up for what the layers before have lost.

Two activations run through the layers: ``X_p`` of the model as pruned so far, which is what a linear will read, and
``X_d`` of the dense model, which is what its outputs should come from. For each linear, with ``H = X_p X_p^T +
damping`` and the share ``a`` of dense targets, the weight ``V`` should give ``(1 - a) W X_p + a W X_d`` on ``X_p``.
Without a mask, the best weight is

    W* = W + a W (X_d - X_p) X_p^T H^-1

and any other one is worse by ``tr((V - W*) H (V - W*)^T)``. SparseGPT, started from ``W*``, chooses the mask; conjugate
gradients then find the exact minimum on it. Dense targets: GPTAQ (arXiv 2504.02692); least squares on a mask: ALPS
(arXiv 2406.07831).
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton import ranks
from permtriton.data.samples import Samples
from permtriton.methods.obs import damped, inverse, sparsegpt
from permtriton.methods.promises import check_no_worse
from permtriton.methods.statistics import Moments, moments
from permtriton.methods.weights import CANCELLED
from permtriton.model.checks import check_kept, zeros_in_groups
from permtriton.model.plan import Plan, Site, linear_module, weight_in_out
from permtriton.progress import Progress
from permtriton.running.layer_calls import Empty
from permtriton.running.layer_inputs import layer_by_layer
from permtriton.sparsity import NMPattern


@dataclass(frozen=True)
class Fit:
    """How a weight is fitted.

    Attributes:
        dense_share: share ``a`` of the dense model's inputs in the targets, 0 to 1.
        iterations: most rounds of conjugate gradients.
        tolerance: residual, relative to the first one, that ends them.
    """

    dense_share: float = 0.75
    iterations: int = 30
    tolerance: float = 1e-3


@dataclass(frozen=True)
class Fitted:
    """A pruned weight and its error, relative to the size of the targets.

    Attributes:
        weight: ``[out_features, in_features]``, in the dtype that was asked for.
        start: error of SparseGPT's weight.
        end: error of this one, at most ``start``.
    """

    weight: Tensor
    start: float
    end: float


@torch.no_grad()
def fit_weight(weight: Tensor, moment: Moments, pattern: NMPattern, fit: Fit, name: str = "a layer") -> Fitted:
    """Prunes a weight to N:M and fits what is kept; a row that would end worse than SparseGPT's keeps SparseGPT's.

    Args:
        weight: ``[out_features, in_features]``, dense, in the final channel order.
        moment: moments of its inputs.
        pattern: N:M pattern.
        fit: options.
        name: name of the layer, for errors.

    Raises:
        CalibrationError: The damped Hessian is singular.
    """
    hessian, target = damped(moment.hessian), best_weight(weight.float(), moment, fit.dense_share, name)
    start = sparsegpt(target, moment.hessian, pattern, None, name)
    found = least_squares(start, target, hessian, fit).to(weight.dtype)
    start = start.to(weight.dtype)
    errors = [row_errors(each, target, hessian) for each in (start, found)]
    found = torch.where((errors[1] < errors[0]).unsqueeze(1), found, start)
    size = row_errors(torch.zeros_like(target), target, hessian).sum().clamp_min(torch.finfo(torch.float32).tiny)
    after = torch.where(errors[1] < errors[0], errors[1], errors[0])
    return Fitted(found, float(errors[0].sum() / size), float(after.sum() / size))


def best_weight(weight: Tensor, moment: Moments, dense_share: float, name: str = "a layer") -> Tensor:
    """Returns ``W*``, float32 ``[out_features, in_features]``: what gives the targets best without a mask.

    Args:
        weight: dense, float32 ``[out_features, in_features]``.
        moment: moments of its inputs.
        dense_share: share of the dense model's inputs in the targets.
        name: name of the layer, for errors.

    Raises:
        CalibrationError: The damped Hessian is singular.
    """
    if not dense_share or moment.shift is None:
        return weight
    return weight + dense_share * (weight @ moment.shift) @ inverse(moment.hessian, name)


def least_squares(start: Tensor, target: Tensor, hessian: Tensor, fit: Fit) -> Tensor:
    """Minimises ``tr((V - W*) H (V - W*)^T)`` over the weights that are not zero, by conjugate gradients in each row.

    Args:
        start: ``[out_features, in_features]``, zero where pruned.
        target: ``W*``, of the same shape.
        hessian: ``H``, damped, ``[in_features, in_features]``.
        fit: options.

    Returns:
        ``V``, float32 ``[out_features, in_features]``.
    """
    found, mask, scale = start.clone(), start != 0, hessian.diagonal()
    residual = (target - start) @ hessian * mask
    direction = residual / scale
    size = (residual * direction).sum(1, keepdim=True)
    enough = fit.tolerance**2 * size.sum()
    tiny = torch.finfo(size.dtype).tiny
    for _ in range(fit.iterations):
        if size.sum() <= enough:
            break
        change = direction @ hessian * mask
        step = size / (direction * change).sum(1, keepdim=True).clamp_min(tiny)
        found += step * direction
        residual -= step * change
        scaled = residual / scale
        before, size = size, (residual * scaled).sum(1, keepdim=True)
        direction = scaled + size / before.clamp_min(tiny) * direction
    return found


def row_errors(weight: Tensor, target: Tensor, hessian: Tensor) -> Tensor:
    """Returns ``(V - W*) H (V - W*)^T`` of each row, float32 ``[out_features]``; arguments as of `least_squares`."""
    difference = weight.float() - target
    return (difference @ hessian * difference).sum(1)


@torch.no_grad()
def refit(
    model: PreTrainedModel,
    plan: Plan,
    dense_weights: Mapping[str, Tensor],
    samples: Samples,
    batch: int,
    pattern: NMPattern,
    fit: Fit,
    progress: Progress,
    empty: Empty = torch.empty,
    by_site: bool = True,
) -> list[dict[str, Any]]:
    share, report = ranks.own_rows(len(samples)).numel(), []
    turns = [_turns(sites) if by_site else [sites] for sites in plan.layers()]
    dense = _Dense(model, plan, dense_weights)
    count = sum(map(len, turns))
    with progress.stage("refit", (2 * share + 1) * count) as advance:
        pruned_layers = layer_by_layer(model, plan, samples, batch, changing=True, empty=empty)
        dense_layers = layer_by_layer(model, plan, samples, batch, changing=True, empty=empty, within=dense.running)
        for groups, layer, reference in zip(turns, pruned_layers, dense_layers, strict=True):
            for sites in groups:
                found = moments(model, replace(reference, sites=sites), replace(layer, sites=sites), advance)
                linears = [(name, found[site.name]) for site in sites for name in site.linears]
                report += ranks.deal(linears, lambda linear: _fit(model, *linear, pattern, fit))
                ranks.send_dealt([linear_module(model, name).get_parameter("weight") for name, _ in linears])
                advance()
    return report


def _fit(model: nn.Module, name: str, moment: Moments, pattern: NMPattern, fit: Fit) -> dict[str, Any]:
    weight = weight_in_out(linear_module(model, name))
    zeros = zeros_in_groups(weight * (moment.hessian.diagonal() != 0).unsqueeze(1), pattern)
    fitted = fit_weight(weight.T, moment, pattern, fit, name)
    check_kept(name, fitted.weight.T, zeros, pattern, CANCELLED)
    check_no_worse(fitted.start, fitted.end, f"refitting {name}")
    weight.copy_(fitted.weight.T).add_(0.0)  # the sum turns -0.0 into 0.0
    return {"linear": name, "start": fitted.start, "end": fitted.end}


def _turns(sites: list[Site]) -> list[list[Site]]:
    """Returns a layer's sites in turns, each with the inputs of the ones before it as pruned; experts share a turn."""
    turns: dict[str, list[Site]] = {}
    for site in sites:
        turns.setdefault(re.sub(r"\d+", "", site.name), []).append(site)
    return list(turns.values())


class _Dense:
    """The weights before pruning, which take the place of the present ones while the dense model runs."""

    def __init__(self, model: nn.Module, plan: Plan, weights: Mapping[str, Tensor]) -> None:
        self._model = model
        self._weights = {
            id(linear_module(model, name).get_parameter("weight")): weights[name] for _, name in plan.linears()
        }

    @contextmanager
    def running(self, layer: str) -> Iterator[None]:
        """Inside the context, a layer (or the model, if "") has the dense weights."""
        own = [each for each in self._model.get_submodule(layer).parameters() if id(each) in self._weights]
        before = [each.data for each in own]
        try:
            for each in own:
                each.data = self._weights[id(each)].to(each.device)
            yield
        finally:
            for each, values in zip(own, before, strict=True):
                each.data = values
