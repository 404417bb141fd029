"""Refitting: exact weights for a mask, layer by layer, that make up for what the layers before have lost.

Two activations run through the layers: ``X_p`` of the model as pruned so far, which is what a linear will read, and
``X_d`` of the dense model, which is what its outputs should come from. A linear that writes into the residual stream
may also make up for what the stream lacks already, ``R_d - R_p``, with ``R`` what its output is added to. For each
linear, with ``H = X_p X_p^T + damping``, the weight ``V`` should give ``W X_p + a W (X_d - X_p) + b (R_d - R_p)`` on
``X_p``. Without a mask, the best weight is

    W* = W + (a W (X_d - X_p) + b (R_d - R_p)) X_p^T H^-1

and any other one is worse by ``tr((V - W*) H (V - W*)^T)``. SparseGPT, started from ``W*``, chooses a mask; conjugate
gradients then find the minimum on it; and pruned weights take the place of kept ones while that lowers the error
(`permtriton.methods.prune.exchange`). Last, with ``K = E[g g^T]`` of the gradients of the linear's outputs, the same
weights minimise ``tr(K (V - W*) H (V - W*)^T)``: rows that the loss feels together make up for each other.

Dense targets: GPTAQ (arXiv 2504.02692); those of the residual stream: LoaQ (arXiv 2509.06297); ``K``: YAQA (arXiv
2505.22988), all for quantization; least squares on a mask: ALPS (arXiv 2406.07831).
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.methods.measure.postconditions import check_no_worse
from permtriton.methods.measure.statistics import Moments, SiteInputs, dense_inputs, moments
from permtriton.methods.options import FIT_AFTER_EXCHANGE, Refitting
from permtriton.methods.prune.exchange import exchanged
from permtriton.methods.prune.obs import Curvature, curvatures, sparsegpt
from permtriton.methods.prune.weights import CANCELLED_SHARE, weights_of_sites
from permtriton.model.checks import check_kept, zeros_in_groups
from permtriton.passes.plan import Plan, linear_module, sequential_groups, weight_in_out
from permtriton.running import ranks
from permtriton.running.layer_inputs import Within, layer_by_layer
from permtriton.running.mixed_precision import exact_products
from permtriton.running.state import FinishedLayers
from permtriton.running.store import MEMORY, Store
from permtriton.util.progress import Progress
from permtriton.util.sparsity import NMPattern


@torch.no_grad()
def refit(
    model: PreTrainedModel,
    plan: Plan,
    dense_weights: Mapping[str, Tensor],
    samples: Samples,
    batch: int,
    options: Refitting,
    progress: Progress,
    state: FinishedLayers | None = None,
    store: Store = MEMORY,
    *,
    gradients: Mapping[str, Tensor] = MappingProxyType({}),
    low_memory: bool = False,
) -> list[dict[str, Any]]:
    """Prunes the model and fits the kept weights, layer by layer and inside a layer site by site.

    Args:
        model: dense model, its channels in their final order; changed in place.
        dense_weights: name of each pruned linear -> its weight now, as the dense model has it, in a tensor of its own.
        state: files that keep the finished layers, to continue after the last one; None keeps no state.
        gradients: name -> gradients of the dense model's outputs, ``[tokens, out_features]``, for the linears whose
            outputs are weighed by them.
        low_memory: whether the dense model runs a layer once per turn of sites, to keep the inputs of one turn only,
            and the pruned one computes every product again whenever a layer runs.

    Returns:
        For each linear its ``name``, the error of SparseGPT's weight (``start``) and of the new one (``end``), which is
        the squared distance from the best unpruned weight's outputs in their metric, relative to the square of those,
        and ``seconds``.

    Raises:
        CalibrationError: an activation is NaN or infinite, or a Hessian cannot be inverted.
        VerificationError: a weight keeps more or fewer values than the pattern says, or is worse than SparseGPT's.
        OutputError: the state belongs to another run, is damaged, or cannot be written.
    """
    if options.residual_targets and not any(site.residual_reader for site in plan.sites):
        progress.say(
            "refit: no pruned linear of this model adds its output to the residual stream as it is; each is fitted to "
            "its own outputs alone"
        )
    share = ranks.own_rows(len(samples)).numel()
    parts: list[dict[str, Any]] = []
    turns = [sequential_groups(sites) for sites in plan.layers()]
    dense = _values_within(model, plan, dense_weights)
    count = sum(map(len, turns))
    # To host memory and back, a GPU moves outputs more slowly than it computes them.
    keep = None if low_memory or store.onloads else store.moved
    with progress.stage("refit", (share + 1) * count + share * (count if low_memory else len(turns))) as advance:
        pruned_layers = layer_by_layer(model, plan, samples, batch, changing=True, store=store, keep=keep)
        dense_layers = layer_by_layer(model, plan, samples, batch, changing=False, store=store, within=dense)
        for number, (groups, layer, reference) in enumerate(zip(turns, pruned_layers, dense_layers, strict=True)):
            both = max(layer.parts, reference.parts, key=len)
            weights = weights_of_sites(model, reference.sites)
            finished = None if state is None else state.restore(number, weights, plan.patterns)
            if finished is not None:
                parts += finished
                for rows in both:
                    reference.run(rows)
                advance((share + 1) * len(groups) + share * (len(groups) if low_memory else 1))
                continue
            first = len(parts)
            targets: SiteInputs = {}
            for sites in groups:
                if low_memory or sites is groups[0]:
                    watched = sites if low_memory else reference.sites
                    targets = dense_inputs(model, replace(reference, sites=watched, parts=both), advance, store)
                site_moments = moments(model, replace(layer, sites=sites, parts=both), targets, advance)
                curvature = curvatures({site: moment.hessian for site, moment in site_moments.items()})
                linears = [
                    (name, site.name, site_moments[site.name], curvature) for site in sites for name in site.linears
                ]
                parts += ranks.deal(
                    linears, lambda linear: _fit(model, plan.patterns, *linear, options, gradients.get(linear[0]))
                )
                ranks.send_dealt([linear_module(model, name).get_parameter("weight") for name, *_ in linears])
                layer.settle(sites)
                del site_moments, curvature, linears  # before the next turn takes as much
                advance()
            if state is not None:
                state.keep(number, weights, plan.patterns, parts[first:])
    return parts


def _fit(
    model: nn.Module,
    patterns: Mapping[str, NMPattern],
    name: str,
    site: str,
    moment: Moments,
    curvature: Callable[[str], Curvature],
    options: Refitting,
    gradients: Tensor | None = None,
) -> dict[str, Any]:
    """Prunes and fits the weight of one linear, and returns what `refit` does of it."""
    started = time.perf_counter()
    stored, of_inputs, pattern = weight_in_out(linear_module(model, name)), curvature(site), patterns[name]
    weight = stored.to(of_inputs.damped.device)
    zeros = zeros_in_groups(weight * ~of_inputs.dead.unsqueeze(1), pattern)
    with exact_products():
        target = best_weight(weight.T.float(), moment, of_inputs, options)
    start = sparsegpt(target, of_inputs, pattern, None)
    fitted = least_squares(start, target, of_inputs.damped, options.iterations)
    if options.iterations:
        fitted = better_mask(fitted, target, of_inputs, pattern, options.exchanges)
    start, fitted = start.to(weight.dtype), fitted.to(weight.dtype)
    fitted, metric = better_rows(fitted, start, target, of_inputs.damped), None
    if gradients is not None and options.iterations:
        metric = metric_of(gradients.to(weight.device))
    error = partial(error_of, target=target, hessian=of_inputs.damped, metric=metric)
    before, candidates = error(start), [(fitted, error(fitted))]
    if metric is not None:
        coupled = coupled_least_squares(fitted.float(), target, of_inputs.damped, metric, options.metric_rounds)
        coupled = coupled.to(weight.dtype)
        candidates = [(coupled, error(coupled)), *candidates, (start, before)]
    best, after = min(candidates, key=lambda candidate: candidate[1])
    weight = best.T + 0.0  # the sum turns -0.0 into 0.0
    check_kept(name, weight, zeros, pattern, CANCELLED_SHARE)
    stored.copy_(weight)
    size = max(error(torch.zeros_like(target)), torch.finfo(torch.float32).tiny)
    check_no_worse(before / size, after / size, f"refitting {name}")
    return {"name": name, "start": before / size, "end": after / size, "seconds": time.perf_counter() - started}


def best_weight(weight: Tensor, moment: Moments, curvature: Curvature, options: Refitting) -> Tensor:
    """Returns ``W*``, float32 ``[out_features, in_features]``: what gives the targets best without a mask.

    Args:
        weight: dense, float32 ``[out_features, in_features]``.
        options: with the shares ``a`` and ``b`` of the dense model in the targets.
    """
    if moment.shift is None or not (options.dense_targets or options.residual_targets):
        return weight
    lacking = options.dense_targets * (weight @ moment.shift)
    if moment.residual_shift is not None:
        lacking += options.residual_targets * moment.residual_shift
    return weight + lacking @ curvature.inverse


def least_squares(start: Tensor, target: Tensor, hessian: Tensor, iterations: int) -> Tensor:
    """Minimises ``tr((V - W*) H (V - W*)^T)`` over the weights that are not zero, by conjugate gradients in each row.

    The number of rounds is fixed: a residual that ends them would let rounding decide a whole round.

    Args:
        start: ``[out_features, in_features]``, zero where pruned.
        target: ``W*``, of the same shape.
        hessian: ``H``, damped, ``[in_features, in_features]``.

    Returns:
        ``V``, float32 ``[out_features, in_features]``.
    """
    return _conjugate_gradients(
        start,
        target,
        lambda difference: difference @ hessian,
        hessian.diagonal(),
        lambda products: products.sum(1, keepdim=True),
        iterations,
    )


def coupled_least_squares(start: Tensor, target: Tensor, hessian: Tensor, metric: Tensor, iterations: int) -> Tensor:
    """Minimises ``tr(K (V - W*) H (V - W*)^T)`` over the weights that are not zero, by conjugate gradients.

    Arguments are those of `least_squares`, and the metric ``K`` of the outputs, ``[out_features, out_features]``.
    """
    return _conjugate_gradients(
        start,
        target,
        lambda difference: metric @ (difference @ hessian),
        metric.diagonal().unsqueeze(1) * hessian.diagonal(),
        Tensor.sum,
        iterations,
    )


def _conjugate_gradients(
    start: Tensor,
    target: Tensor,
    product: Callable[[Tensor], Tensor],
    scale: Tensor,
    total: Callable[[Tensor], Tensor],
    iterations: int,
) -> Tensor:
    """Returns the weight after some rounds from ``start``, which stays zero where it is.

    Args:
        product: multiplies by the matrix of the quadratic, into a tensor of its own.
        scale: diagonal of that matrix, by which directions are divided.
        total: sums products of single weights, of each problem that is solved on its own.
    """
    weight = start.clone(memory_format=torch.contiguous_format)
    mask = (weight != 0).to(weight.dtype)  # products with booleans are slower
    residual = product(target - weight).mul_(mask)
    direction = residual / scale
    scaled, products = torch.empty_like(direction), torch.empty_like(direction)
    size = total(torch.mul(residual, direction, out=products))
    tiny = torch.finfo(size.dtype).tiny
    for _ in range(iterations):
        change = product(direction).mul_(mask)
        step = size / total(torch.mul(direction, change, out=products)).clamp_min(tiny)
        weight += torch.mul(step, direction, out=products)
        residual -= change.mul_(step)
        torch.div(residual, scale, out=scaled)
        before, size = size, total(torch.mul(residual, scaled, out=products))
        direction.mul_(size / before.clamp_min(tiny)).add_(scaled)
    return weight


def metric_of(gradients: Tensor) -> Tensor:
    """Returns ``K / mean(diag K) + I`` with ``K = E[g g^T]``, float32 ``[out_features, out_features]``.

    The identity stands for what a few thousand tokens do not show of ``K``.

    Args:
        gradients: ``g``, ``[tokens, out_features]``.
    """
    gradients = gradients.float()
    metric = gradients.T @ gradients
    metric /= metric.diagonal().mean().clamp_min(torch.finfo(metric.dtype).tiny)
    metric.diagonal().add_(1)
    return metric


def better_mask(weight: Tensor, target: Tensor, curvature: Curvature, pattern: NMPattern, rounds: int) -> Tensor:
    """Returns a weight whose mask is at least as good in every row: pruned weights take the place of kept ones.

    After each round, the weights are fitted to the new mask. A row whose error does not fall keeps the old one, and
    tries half as many exchanges next time.

    Args:
        weight: ``V``, float32 ``[out_features, in_features]``, fitted to its mask.
        target: ``W*``, of the same shape.
    """
    hessian, share = curvature.damped, torch.ones(len(weight), device=weight.device)
    difference = weight - target
    gradient = difference @ hessian
    errors = (gradient * difference).sum(1)
    for _ in range(rounds):
        tried = exchanged(weight, gradient, curvature, pattern, share)
        tried = least_squares(tried, target, hessian, FIT_AFTER_EXCHANGE)
        difference = tried - target
        changed = difference @ hessian
        tried_errors = (changed * difference).sum(1)
        better = (tried_errors < errors).unsqueeze(1)
        if not bool(better.any()):
            break
        weight, gradient = torch.where(better, tried, weight), torch.where(better, changed, gradient)
        errors, share = torch.where(better[:, 0], tried_errors, errors), torch.where(better[:, 0], share, share / 2)
    return weight


def better_rows(fitted: Tensor, start: Tensor, target: Tensor, hessian: Tensor) -> Tensor:
    """Returns ``fitted`` with the rows of ``start`` that have no larger error: rounding or overflow may spoil a fit."""
    errors = [row_errors(each, target, hessian) for each in (fitted, start)]
    return torch.where((errors[0] < errors[1]).unsqueeze(1), fitted, start)


def row_errors(weight: Tensor, target: Tensor, hessian: Tensor) -> Tensor:
    """Returns ``(V - W*) H (V - W*)^T`` of each row, float32 ``[out_features]``; arguments as of `least_squares`.

    The same weight has the same errors, bit for bit, however it lies in memory.
    """
    difference = weight.float().contiguous() - target
    with exact_products():
        return (difference @ hessian * difference).sum(1)


def error_of(weight: Tensor, target: Tensor, hessian: Tensor, metric: Tensor | None) -> float:
    """Returns ``tr(K (V - W*) H (V - W*)^T)``, infinite where it overflows; ``K`` is the identity without a metric."""
    if metric is None:
        error = row_errors(weight, target, hessian).sum()
    else:
        difference = weight.float().contiguous() - target
        with exact_products():
            error = (metric @ (difference @ hessian) * difference).sum()
    return float(error) if bool(error.isfinite()) else math.inf


def _values_within(model: nn.Module, plan: Plan, values: Mapping[str, Tensor]) -> Within:
    """Returns a context for `layer_by_layer`: inside, a layer's weights (the model's, for "") have other values.

    A layer runs in the context many times: its values are brought to its device once, until another layer runs.
    """
    of = {id(linear_module(model, name).get_parameter("weight")): values[name] for _, name in plan.linears()}
    here: dict[int, Tensor] = {}  # those of the layer that ran last, on its device

    @contextmanager
    def within(layer: str) -> Iterator[None]:
        own = [each for each in model.get_submodule(layer).parameters() if id(each) in of]
        before = [each.data for each in own]
        try:
            if here.keys() != {id(each) for each in own}:
                here.clear()
                here.update({id(each): of[id(each)].to(each.device) for each in own})
            for each in own:
                each.data = here[id(each)]
            yield
        finally:
            for each, value in zip(own, before, strict=True):
                each.data = value

    return within
