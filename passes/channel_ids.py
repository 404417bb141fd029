"""Tensors of channel ids: where ids repeat, and hashes of the values that channels are combined with."""

import numpy as np
import torch
from torch import Tensor


def unexpanded(ids: Tensor, keep: int = -1) -> Tensor:
    """Returns a view of ``ids`` that has size 1 along every expanded dimension (of stride 0) except ``keep``."""
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


def differs(ids: Tensor, dim: int) -> bool:
    """Whether ids may differ along a dimension; they cannot if it has size 1 or is expanded."""
    return ids.shape[dim] > 1 and ids.stride(dim) != 0


def differing_dims(ids: Tensor) -> set[int]:
    """Returns the dimensions along which ids may differ, counted from the last, -1, as in broadcasting."""
    return {dim for dim in range(-ids.ndim, 0) if differs(ids, dim)}


def of_several_axes(ids: Tensor, dim: int, starts: np.ndarray) -> bool:
    """Whether positions along a dimension differ only because they hold the channels of different parameters.

    Args:
        ids: Ids that are all channels.
        dim: The dimension, such as tokens: a class token and image patches hold channels of two parameters.
        starts: First id of every axis, in order.
    """
    rows = unexpanded(ids, keep=dim % ids.ndim).movedim(dim, 0).flatten(1)
    owners = torch.from_numpy(np.searchsorted(starts, rows.numpy(), side="right"))
    if not bool((owners == owners[:, :1]).all()):
        return False
    return rows.unique(dim=0).shape[0] == owners[:, 0].unique().numel()


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


def values_of(ids: Tensor) -> Tensor:
    """Returns int64 numbers that identify the values; those of one channel differ, except along expanded dimensions."""
    compact = unexpanded(ids)
    number = numbered(compact.reshape(-1).numpy()).reshape(compact.shape)
    values = torch.from_numpy(compact.numpy() ^ mix(number).view(np.int64))
    return torch.where(compact > 0, values, compact).expand(ids.shape)
