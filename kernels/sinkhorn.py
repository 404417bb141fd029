"""Sinkhorn normalisation of a batch of square matrices (eq. 2-5 of the paper).

    E = exp((logits - rowmax) / tau);   S = diag(r) E diag(c)
    one round:  r = 1 / (E c),  c = 1 / (E^T r);        0 rounds: r = 1 / (E 1), c = 1, a row softmax

Shapes: ``logits``, ``soft`` ``[n, B, B]``; scales ``[rounds, n, B]`` float32. The backward pass replays the rounds from
the saved scale vectors, 2 x rounds x B float32 per block, instead of from ``rounds`` saved matrices.
Bytes moved: logits read once, soft written once, and the scales.

On a GPU `permtriton.kernels.sinkhorn_triton` runs, or the reference for float64 logits and blocks larger than 128.
"""

from typing import Any

import torch
from torch import Tensor

from permtriton.kernels.operator import operator
from permtriton.kernels.sinkhorn_triton import TINY, sinkhorn_backward_triton, sinkhorn_triton, supports


def sinkhorn_reference(logits: Tensor, tau: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (soft, row scales, column scales)."""
    e = _exponentials(logits, tau)
    n, b, _ = e.shape
    column = e.new_ones(n, b, 1)
    row = torch.bmm(e, column).clamp_min(TINY).reciprocal()
    rows, columns = e.new_empty(rounds, n, b), e.new_empty(rounds, n, b)
    for k in range(rounds):
        if k:
            row = torch.bmm(e, column).clamp_min(TINY).reciprocal()
        column = torch.bmm(e.mT, row).clamp_min(TINY).reciprocal()
        rows[k], columns[k] = row.squeeze(-1), column.squeeze(-1)
    return e.mul_(row).mul_(column.mT), rows, columns


def sinkhorn_backward_reference(grad: Tensor, logits: Tensor, rows: Tensor, columns: Tensor, tau: float) -> Tensor:
    """Returns the gradient of the logits, in their dtype, by replaying the rounds backwards.

    Works on ``S`` and on the ratios of each round's scales to the last ones: ``E`` times scales that diverge overflows.
    """
    soft = _exponentials(logits, tau)
    rounds = rows.shape[0]
    row = rows[-1].unsqueeze(-1) if rounds else soft.sum(2, keepdim=True).clamp_min(TINY).reciprocal()
    column = columns[-1].unsqueeze(-1) if rounds else torch.ones_like(row)
    soft.mul_(row).mul_(column.mT)
    result = grad.to(soft.dtype)
    weighted = result * soft
    grad_row, grad_column = weighted.sum(2, keepdim=True), weighted.sum(1).unsqueeze(-1)
    if not rounds:
        result = result - grad_row
    for k in reversed(range(rounds)):
        row_ratio, column_ratio = rows[k].unsqueeze(-1) / row, columns[k].unsqueeze(-1) / column
        grad_sum = -grad_column * column_ratio * column_ratio  # the square alone may overflow
        result = torch.baddbmm(result, row_ratio, grad_sum.mT)
        grad_row = torch.baddbmm(grad_row, soft, grad_sum)
        grad_sum = -grad_row * row_ratio * row_ratio
        before = columns[k - 1].unsqueeze(-1) / column if k else column.reciprocal()
        result = torch.baddbmm(result, grad_sum, before.mT)
        grad_column = torch.bmm(soft.mT, grad_sum)
        grad_row = torch.zeros_like(grad_row)
    return (result * soft / tau).to(logits.dtype)


def _exponentials(logits: Tensor, tau: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).contiguous()
    return ((wide - wide.amax(-1, keepdim=True)) / tau).exp_()


def _fake(logits: Tensor, tau: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scales = logits.new_empty((rounds, *logits.shape[:2]), dtype=dtype)
    return logits.new_empty(logits.shape, dtype=dtype), scales, torch.empty_like(scales)


def _gradient(grad: Tensor, *kept: Any) -> dict[str, Tensor]:
    return {"logits": sinkhorn_backward(grad, *kept)}


sinkhorn_backward = operator(
    "sinkhorn_backward",
    lambda grad, logits, *_: logits.new_empty(logits.shape),
    launcher=sinkhorn_backward_triton,
    supports=lambda grad, logits, *_: supports(logits),
)(sinkhorn_backward_reference)

_sinkhorn = operator(
    "sinkhorn",
    _fake,
    launcher=sinkhorn_triton,
    supports=lambda logits, *_: supports(logits),
    gradient=_gradient,
    keeps=("logits", 1, 2, "tau"),
)(sinkhorn_reference)


def sinkhorn(logits: Tensor, tau: float, rounds: int) -> Tensor:
    """Returns the doubly stochastic relaxation of ``logits``, float32 ``[n, B, B]``; differentiable in ``logits``.

    Args:
        logits: ``[n, B, B]``.
        tau: Temperature, positive; as it goes to 0, the result tends to a permutation matrix.
        rounds: Number of row-then-column normalisations; 0 gives a row softmax.
    """
    return _sinkhorn(logits, tau, rounds)[0]
