"""SparseGPT's weight update: each row's kept weights compensate for its pruned ones (Frantar and Alistarh, 2023)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from permtriton.errors import CalibrationError
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.sparsity import NMPattern

DAMPING = 0.01  # fraction of the mean diagonal, as published
COLUMNS_AT_ONCE = 128  # columns between updates of all later ones, as published; rounded down to whole groups


def damped(hessian: Tensor) -> Tensor:
    """Returns ``H`` with 1% of its mean diagonal added, and ones where a channel was never active."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal.add_(DAMPING * diagonal.mean())
    return hessian


@dataclass(frozen=True)
class Curvature:
    """A site's Hessian, and what is computed of it once for all linears that read the site.

    Attributes:
        dead: bool ``[channels]``, True where a channel was never active.
        damped: the damped Hessian, float32 ``[channels, channels]``, as are the others.
        inverse: its inverse.
        factor: upper Cholesky factor of the inverse.
    """

    dead: Tensor
    damped: Tensor
    inverse: Tensor
    factor: Tensor

    @classmethod
    def of(cls, hessian: Tensor, name: str = "a layer") -> "Curvature":
        """Returns the curvature of a Hessian, float32 ``[channels, channels]``; ``name`` is for the error.

        Raises:
            CalibrationError: The damped Hessian is singular.
        """
        try:
            full = damped(hessian)
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(full))
            return cls(hessian.diagonal() == 0, full, inverse, torch.linalg.cholesky(inverse, upper=True))
        except torch.linalg.LinAlgError as error:
            raise _singular(name) from error


def curvatures(hessians: Mapping[str, Tensor]) -> Callable[[str], Curvature]:
    """Returns a function of a site's name that gives its curvature, and computes it again only for another site."""
    return lru_cache(maxsize=1)(lambda site: Curvature.of(hessians[site], site))


def inverse_diagonal(hessian: Tensor, name: str = "a layer") -> Tensor:
    """Returns ``diag((H + damping)^-1)``, float32 ``[channels]``, the denominator of the OBS score.

    Raises:
        CalibrationError: The damped Hessian is singular; the error has the layer's ``name``.
    """
    try:
        return torch.cholesky_inverse(torch.linalg.cholesky(damped(hessian))).diagonal().clone()
    except torch.linalg.LinAlgError as error:
        raise _singular(name) from error


def _singular(name: str) -> CalibrationError:
    return CalibrationError(
        f"{name}: the Hessian of its inputs cannot be inverted: raise --samples, or choose another --importance "
        "and prune with the step mask"
    )


@torch.no_grad()
def sparsegpt(weight: Tensor, curvature: Curvature, pattern: NMPattern, mask: Tensor | None) -> Tensor:
    """Prunes a weight to N:M and updates what is kept, column by column.

    Args:
        weight: ``[out_features, in_features]``, in the final channel order.
        curvature: of its inputs, from the model as pruned so far.
        mask: bool ``[out_features, in_features]``, True where a weight is kept; None chooses a mask group by group,
            by the OBS score of the weights as updated so far.

    Returns:
        The new weight, float32 ``[out_features, in_features]``, zero where pruned (a zero may be negative).
    """
    w, upper = weight.float().clone(), curvature.factor
    w[:, curvature.dead] = 0
    width = COLUMNS_AT_ONCE // pattern.group * pattern.group
    choose = _chooser(pattern, mask)
    for start in range(0, w.shape[1], width):
        end = min(start + width, w.shape[1])
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
    """Returns the function (first column of a group, its weights, diagonal of its factor) -> bool mask of the group."""
    if mask is not None:
        return lambda start, weights, diagonal: mask[:, start : start + pattern.group]
    return lambda start, weights, diagonal: top_n_mask((weights / diagonal).square().T, pattern).T
