"""SparseGPT's weight update: the kept weights of each row make up for the ones that go (Frantar and Alistarh, 2023)."""

from collections.abc import Callable

import torch
from torch import Tensor

from permtriton.errors import CalibrationError
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.sparsity import NMPattern

DAMPING = 0.01  # of the mean diagonal, as published
COLUMNS_AT_ONCE = 128  # lazy updates, as published; rounded to a multiple of the group


def damped(hessian: Tensor) -> Tensor:
    """Returns ``H`` with 1% of its mean diagonal added, and ones where a channel was never active."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal.add_(DAMPING * diagonal.mean())
    return hessian


def inverse(hessian: Tensor, name: str) -> Tensor:
    """Returns ``(H + damping)^-1`` of the layer called ``name``.

    Raises:
        CalibrationError: the Hessian is singular all the same.
    """
    try:
        return torch.cholesky_inverse(torch.linalg.cholesky(damped(hessian)))
    except torch.linalg.LinAlgError as error:
        raise CalibrationError(
            f"{name}: the Hessian of its inputs cannot be inverted: give more --samples, or choose another "
            "--importance and no --weight-update"
        ) from error


def inverse_diagonal(hessian: Tensor, name: str = "a layer") -> Tensor:
    """Returns ``diag((H + damping)^-1)``, float32 ``[channels]``, the denominator of the OBS score."""
    return inverse(hessian, name).diagonal().clone()


@torch.no_grad()
def sparsegpt(
    weight: Tensor, hessian: Tensor, pattern: NMPattern, mask: Tensor | None, name: str = "a layer"
) -> Tensor:
    """Prunes a weight to N:M and updates what is kept, column by column.

    Args:
        weight: ``[out_features, in_features]``, in the final channel order.
        hessian: float32 ``[in_features, in_features]``, of the model as pruned so far.
        pattern: what to keep.
        mask: bool ``[out_features, in_features]`` to keep to, or None to choose group by group by the OBS score.
        name: of the layer, for errors.

    Returns:
        The new weight, float32, zero where pruned (a zero may be negative).
    """
    w = weight.float().clone()
    w[:, hessian.diagonal() == 0] = 0
    upper = torch.linalg.cholesky(inverse(hessian, name), upper=True)
    step = COLUMNS_AT_ONCE // pattern.group * pattern.group
    choose = _chooser(pattern, mask)
    for start in range(0, w.shape[1], step):
        end = min(start + step, w.shape[1])
        errors = torch.zeros_like(w[:, start:end])
        local = upper[start:end, start:end]
        block = w[:, start:end]
        for column in range(end - start):
            if column % pattern.group == 0:
                group = slice(column, column + pattern.group)
                keep = choose(start + column, block[:, group], local.diagonal()[group])
            value = block[:, column]
            kept = value * keep[:, column % pattern.group]
            error = (value - kept) / local[column, column]
            block[:, column:] -= torch.outer(error, local[column, column:])
            block[:, column] = kept
            errors[:, column] = error
        w[:, end:] -= errors @ upper[start:end, end:]
    return w


def _chooser(pattern: NMPattern, mask: Tensor | None) -> Callable[[int, Tensor, Tensor], Tensor]:
    if mask is not None:
        return lambda start, weights, diagonal: mask[:, start : start + pattern.group]
    return lambda start, weights, diagonal: top_n_mask((weights / diagonal).square().T, pattern.kept, pattern.group).T
