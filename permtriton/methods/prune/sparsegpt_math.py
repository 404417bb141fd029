"""SparseGPT's weight update: each row's kept weights compensate for its pruned ones (Frantar and Alistarh, 2023)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from permtriton.errors import CalibrationError
from permtriton.kernels.sparsegpt_block import sparsegpt_block
from permtriton.util.sparsity import NMPattern

DAMPING = 0.01  # fraction of the mean diagonal, as published
COLUMNS_AT_ONCE = 128  # columns between two updates of all later columns, as published; rounded down to whole groups


def damped(hessian: Tensor) -> Tensor:
    """Returns ``H`` with 1% of its mean diagonal added to the diagonal.

    For a channel that was never active, the sum is this damping, so its weights score lowest at any scale of inputs.
    """
    hessian = hessian.clone()
    hessian.diagonal().add_(DAMPING * hessian.diagonal().mean())
    return hessian


class Curvature:
    """The Hessian of a site's inputs, and what follows from it, computed once for all linears that read the site.

    Attributes:
        damped: the damped Hessian, float32 ``[channels, channels]``.
        dead: bool ``[channels]``, True where a channel was never active.
    """

    def __init__(self, hessian: Tensor, site: str = "a layer") -> None:
        self._site, self.damped, self.dead = site, damped(hessian), hessian.diagonal() == 0

    @cached_property
    def inverse(self) -> Tensor:
        """The inverse of the damped Hessian, float32 ``[channels, channels]``."""
        with _inverting(self._site):
            return torch.cholesky_inverse(torch.linalg.cholesky(self.damped))

    @cached_property
    def factor(self) -> Tensor:
        """The upper Cholesky factor of the inverse."""
        with _inverting(self._site):
            return torch.linalg.cholesky(self.inverse, upper=True)

    def inverse_diagonal(self) -> Tensor:
        """Returns the diagonal of the inverse, float32 ``[channels]`` on the CPU: the denominators of the OBS score."""
        return self.inverse.diagonal().clone().cpu()  # a view would keep the whole inverse


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
