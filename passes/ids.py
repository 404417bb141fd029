"""Tensors of channel ids: where they repeat, and hashes of what channels meet."""

import numpy as np
from torch import Tensor


def unexpanded(ids: Tensor, keep: int = -1) -> Tensor:
    """Returns a view that has size 1 along the dimensions in which a tensor is expanded, except for ``keep``."""
    for dim in range(ids.ndim):
        if dim != keep and ids.shape[dim] > 1 and ids.stride(dim) == 0:
            ids = ids.narrow(dim, 0, 1)
    return ids


def both_unexpanded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns views that have size 1 along the dimensions in which both tensors are expanded."""
    for dim in range(a.ndim):
        if a.shape[dim] > 1 and a.stride(dim) == 0 == b.stride(dim):
            a, b = a.narrow(dim, 0, 1), b.narrow(dim, 0, 1)
    return a, b


def differs(ids: Tensor) -> list[bool]:
    """Returns for each dimension whether ids may differ along it; they do not where it is expanded."""
    return [size > 1 and stride != 0 for size, stride in zip(ids.shape, ids.stride(), strict=True)]


def mix(values: np.ndarray) -> np.ndarray:
    """Returns a 64-bit hash of each integer (the finalizer of splitmix64), uint64."""
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def numbered(values: np.ndarray) -> np.ndarray:
    """Returns for each element how many equal ones stand before it, int64."""
    order = np.argsort(values, kind="stable")
    new = np.diff(values[order], prepend=values[order][:1] - 1) != 0
    positions = np.arange(values.size)
    result = np.empty(values.size, np.int64)
    result[order] = positions - np.maximum.accumulate(np.where(new, positions, 0))
    return result
