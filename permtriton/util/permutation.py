"""Permutations of channels, as indices.

The convention, stated once: a permutation is an int64 tensor ``index`` of shape ``[C]`` with

    y[..., j] = x[..., index[j]]        and, for a weight,        W_perm[:, j] = W[:, index[j]].

The matrix of the same permutation has ``P[index[j], j] = 1``, so that ``y = x P`` and ``W_perm = W P``.
"""

import torch
from torch import Tensor


def identity(channels: int) -> Tensor:
    """Returns the index that moves nothing, int64 ``[channels]``."""
    return torch.arange(channels)


def inverse(index: Tensor) -> Tensor:
    """Returns the index that undoes ``index``: ``x[index][inverse(index)] == x``."""
    return torch.empty_like(index).scatter_(0, index, torch.arange(index.numel(), device=index.device))


def compose(first: Tensor, second: Tensor) -> Tensor:
    """Returns the index of applying ``first``, then ``second``: ``x[first][second] == x[compose(first, second)]``."""
    return first[second]


def epoch_order(sequences: int, seed: int, epoch: int) -> Tensor:
    """Returns an epoch's order of the sequences, which only ``seed`` and ``epoch`` decide: a resumed run repeats it."""
    return torch.randperm(sequences, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def index_dtype(channels: int) -> torch.dtype:
    """Returns the dtype in which an index of ``channels`` is stored; DDP could not send buffers of dtype int16."""
    return torch.uint8 if channels <= 1 << 8 else torch.int32


def is_permutation(index: Tensor) -> bool:
    """Whether ``index``, int64 ``[C]``, holds each of 0 to C-1 exactly once."""
    expected = torch.arange(index.numel(), device=index.device)
    return index.dtype == torch.int64 and torch.equal(index.sort().values, expected)


def moved(index: Tensor) -> int:
    """Returns the number of channels that ``index`` moves to another position."""
    return int((index != torch.arange(index.numel(), device=index.device)).sum())
