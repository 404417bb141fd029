"""SparseGPT's weight update: each row's kept weights compensate for its pruned ones (Frantar and Alistarh, 2023)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from permtriton.errors import CalibrationError
from permtriton.kernels.sparsegpt_block import sparsegpt_block
from permtriton.util.sparsity import NMPattern

DAMPING = 0.01  # fraction of the mean diagonal, as published
COLUMNS_AT_ONCE = 128  # columns between two updates of all later columns, as published; rounded down to whole groups


def damped(hessian: Tensor) -> Tensor:
    """Returns ``H`` with 1% of its mean diagonal added to the diagonal.

    A channel that was never active has only the damping there, so that its weights score lowest at any scale of inputs.
    """
    hessian = hessian.clone()
    hessian.diagonal().add_(DAMPING * hessian.diagonal().mean())
    return hessian


@dataclass(frozen=True)
class Curvature:
    """A site's Hessian, and the matrices computed from it once for all linears that read the site.

    Attributes:
        dead: bool ``[channels]``, True where a channel was never active.
        damped, inverse: the damped Hessian and its inverse, float32 ``[channels, channels]``.
        factor: upper Cholesky factor of the inverse.
    """

    dead: Tensor
    damped: Tensor
    inverse: Tensor
    factor: Tensor

    @classmethod
    def of(cls, hessian: Tensor, name: str = "a layer") -> "Curvature":
        with _inverting(name):
            full = damped(hessian)
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(full))
            return cls(hessian.diagonal() == 0, full, inverse, torch.linalg.cholesky(inverse, upper=True))


def curvatures(hessians: Mapping[str, Tensor]) -> Callable[[str], Curvature]:
    """Returns a function of a site's name that returns its curvature; the curvature of the last site is cached."""
    return lru_cache(maxsize=1)(lambda site: Curvature.of(hessians[site], site))


def inverse_diagonal(hessian: Tensor, name: str = "a layer") -> Tensor:
    """Returns ``diag((H + damping)^-1)``, float32 ``[channels]``, the denominator of the OBS score."""
    with _inverting(name):
        return torch.cholesky_inverse(torch.linalg.cholesky(damped(hessian))).diagonal().clone()


@contextmanager
def _inverting(name: str) -> Iterator[None]:
    try:
        yield
    except torch.linalg.LinAlgError as error:
        raise CalibrationError(
            f"{name}: the Hessian of its inputs cannot be inverted: raise `samples=`, or choose another `importance=` "
            "and prune with the step mask"
        ) from error


@torch.no_grad()
def sparsegpt(weight: Tensor, curvature: Curvature, pattern: NMPattern, mask: Tensor | None) -> Tensor:
    """Prunes a weight ``[out_features, in_features]`` to N:M and updates what is kept, channel by channel.

    Args:
        curvature: of the linear's inputs, measured in the model as pruned so far.
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
