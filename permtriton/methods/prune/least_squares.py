"""Least squares on an N:M mask: fits the kept weights, and exchanges kept weights for pruned ones.

An exchange sets the kept weight i of a row to 0 and its pruned weight j to ``t``. With ``g = (V - W*) H``, the error
``(V - W*) H (V - W*)^T`` of the row falls most for ``t = (v_i H_ij - g_j) / H_jj``, namely by

    (v_i H_ij - g_j)^2 / H_jj - v_i^2 H_ii + 2 v_i g_i

SparseGPT decides group by group from the first channel to the last, before it knows which errors the kept weights can
compensate for. Here all groups of a row exchange their best pair at once, wherever that lowers the error.
"""

import math

import torch
from torch import Tensor

from permtriton.methods.measure.statistics import Curvature
from permtriton.running.mixed_precision import exact_products
from permtriton.util.sparsity import NMPattern

FIT_AFTER_EXCHANGE = 4  # rounds of conjugate gradients after each round of exchanges
# Pairs of weights that are evaluated at once: few enough for the caches of a CPU, or for the memory of a GPU.
AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}


def least_squares(
    start: Tensor, target: Tensor, hessian: Tensor, iterations: int, metric: Tensor | None = None
) -> Tensor:
    """Minimises ``tr(K (V - W*) H (V - W*)^T)`` over the weights that are not zero, by rounds of conjugate gradients.

    The number of rounds is fixed: with a stopping rule on the residual, rounding could add or drop a whole round.

    Args:
        start: ``[out_features, in_features]``, zero where pruned; the result is zero at the same weights.
        target: ``W*``, of the same shape.
        hessian: ``H``, damped, ``[in_features, in_features]``.
        metric: ``K``, ``[out_features, out_features]``; None for the identity, with which each row is a problem of its
            own.
    """

    def product(difference: Tensor) -> Tensor:
        change = difference @ hessian
        return change if metric is None else metric @ change

    def total(products: Tensor) -> Tensor:
        return products.sum(1, keepdim=True) if metric is None else products.sum()

    # The diagonal of the quadratic form, by which directions are divided.
    scale = hessian.diagonal() if metric is None else metric.diagonal().unsqueeze(1) * hessian.diagonal()
    weight = start.clone(memory_format=torch.contiguous_format)
    inverse = (weight != 0).to(weight.dtype).div_(scale)  # 0 where pruned, so that no direction leaves the mask
    residual = product(target - weight)
    direction = residual * inverse
    preconditioned, products = torch.empty_like(direction), torch.empty_like(direction)
    norm = total(torch.mul(residual, direction, out=products))
    tiny = torch.finfo(norm.dtype).tiny
    for _ in range(iterations):
        change = product(direction)
        step = norm / total(torch.mul(direction, change, out=products)).clamp_min(tiny)
        weight.addcmul_(direction, step)
        residual.addcmul_(change, step, value=-1)
        torch.mul(residual, inverse, out=preconditioned)
        last_norm, norm = norm, total(torch.mul(residual, preconditioned, out=products))
        torch.addcmul(preconditioned, direction, norm / last_norm.clamp_min(tiny), out=direction)
    return weight


def metric_of(gradients: Tensor) -> Tensor:
    """Returns ``K / mean(diag K) + I`` with ``K = E[g g^T]`` of gradients ``[tokens, out_features]``.

    The identity regularises ``K``, which is estimated from only a few thousand tokens.
    """
    gradients = gradients.float()
    metric = gradients.T @ gradients
    metric /= metric.diagonal().mean().clamp_min(torch.finfo(metric.dtype).tiny)
    metric.diagonal().add_(1)
    return metric


def better_mask(weight: Tensor, target: Tensor, curvature: Curvature, pattern: NMPattern, rounds: int) -> Tensor:
    """Returns a weight with no larger error in any row, after rounds that exchange kept weights for pruned ones.

    Each round then fits the weights to the new mask. A row whose error does not fall keeps its old weights, and tries
    half as many exchanges in the next round.
    """
    hessian, share = curvature.damped, torch.ones(len(weight), device=weight.device)
    difference = weight - target
    gradient = difference @ hessian
    errors = (gradient * difference).sum(1)
    for _ in range(rounds):
        candidate = exchanged(weight, gradient, curvature, pattern, share)
        candidate = least_squares(candidate, target, hessian, FIT_AFTER_EXCHANGE)
        difference = candidate - target
        candidate_gradient = difference @ hessian
        candidate_errors = (candidate_gradient * difference).sum(1)
        better = (candidate_errors < errors).unsqueeze(1)
        if not bool(better.any()):
            break
        weight, gradient = torch.where(better, candidate, weight), torch.where(better, candidate_gradient, gradient)
        errors, share = torch.where(better[:, 0], candidate_errors, errors), torch.where(better[:, 0], share, share / 2)
    return weight


def better_rows(fitted: Tensor, start: Tensor, target: Tensor, hessian: Tensor) -> Tensor:
    """Returns ``fitted``, but rows of ``start`` where their error is no larger or the fit has overflowed."""
    errors = [row_errors(weight, target, hessian) for weight in (fitted, start)]
    return torch.where((errors[0] < errors[1]).unsqueeze(1), fitted, start)


def row_errors(weight: Tensor, target: Tensor, hessian: Tensor) -> Tensor:
    """Returns ``(V - W*) H (V - W*)^T`` of each row, float32 ``[out_features]``.

    The same weight has the same errors, bit for bit, in any memory layout.
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


def exchanged(weight: Tensor, gradient: Tensor, curvature: Curvature, pattern: NMPattern, share: Tensor) -> Tensor:
    """Returns a weight in which the best pair of each group has changed places, where that lowers the row's error.

    Args:
        gradient: ``g``, of the weight's shape.
        share: fraction of each row's groups with a gain that exchange, largest gains first, float32 ``[out_features]``.
    """
    rows = max(AT_ONCE.get(weight.device.type, AT_ONCE["cpu"]) // (weight.shape[1] * pattern.group), 1)
    parts = zip(weight.split(rows), gradient.split(rows), share.split(rows), strict=True)
    return torch.cat([_exchanged(*part, curvature, pattern) for part in parts])


def _exchanged(weight: Tensor, gradient: Tensor, share: Tensor, curvature: Curvature, pattern: NMPattern) -> Tensor:
    # The place in the group is the first dimension, so that operations on one place of all groups are contiguous.
    size = pattern.group
    v_MOG, g_MOG = (each.unflatten(1, (-1, size)).permute(2, 0, 1).contiguous() for each in (weight, gradient))
    h_MMG = curvature.damped.unflatten(0, (-1, size)).unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2).contiguous()
    h_MG = h_MMG.diagonal().T.contiguous()
    kept_MOG = v_MOG != 0
    free_MOG = ~kept_MOG & ~curvature.dead.view(-1, size).T.unsqueeze(1)
    step_MMOG = v_MOG.unsqueeze(1) * h_MMG.unsqueeze(2) - g_MOG  # ``t H_jj`` for each pair (i, j)
    gain_MMOG = step_MMOG.square().div_(h_MG.unsqueeze(1))
    gain_MMOG -= (v_MOG * (v_MOG * h_MG.unsqueeze(1) - 2 * g_MOG)).unsqueeze(1)
    gain_MMOG.masked_fill_(~(kept_MOG.unsqueeze(1) & free_MOG), 0)
    gain_OG, pair_OG = gain_MMOG.flatten(0, 1).max(0)
    falls_OG = gain_OG > 0
    count_O1 = (falls_OG.sum(1, keepdim=True) * share.unsqueeze(1)).ceil().long()
    least_O1 = gain_OG.sort(1, descending=True).values.gather(1, (count_O1 - 1).clamp_min(0))
    taken_OG = falls_OG & (gain_OG >= least_O1)
    out_OG, into_OG = pair_OG // size, pair_OG % size
    new_OG = step_MMOG.flatten(0, 1).gather(0, pair_OG.unsqueeze(0))[0] / h_MG.gather(0, into_OG)
    found_OGM = weight.unflatten(1, (-1, size)).clone()
    for place_OG, value_OG in ((out_OG, torch.zeros_like(new_OG)), (into_OG, new_OG)):
        place_OG1 = place_OG.unsqueeze(2)
        value_OG1 = torch.where(taken_OG, value_OG, found_OGM.gather(2, place_OG1)[..., 0]).unsqueeze(2)
        found_OGM.scatter_(2, place_OG1, value_OG1)
    return found_OGM.flatten(1)
