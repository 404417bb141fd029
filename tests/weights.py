"""Random N:M weights for tests."""

import torch
from torch import Tensor

from permtriton.kernels.nm_mask import top_n_mask
from permtriton.kernels.packing import pack

PATTERNS = [(2, 4), (4, 8), (1, 2), (1, 4), (3, 4), (2, 3), (5, 6), (8, 16), (7, 17), (3, 32), (31, 32)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def index_of(channels: int, seed: int = 0) -> Tensor:
    return torch.randperm(channels, generator=rng(seed))


def sparse(rows: int, groups: int, kept: int, group: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An N:M weight ``[rows, groups * group]``; about a fifth of its groups hold fewer than ``kept``."""
    weight = torch.randn(rows, groups * group, generator=rng(rows * groups)).to(dtype)
    keep = top_n_mask(weight.abs().t().contiguous(), kept, group).t()
    keep &= torch.rand(weight.shape, generator=rng(1)) > 0.2 / kept
    return torch.where(keep, weight, torch.zeros((), dtype=dtype)).contiguous()


def compressed(weight: Tensor) -> Tensor:
    """In the place of cuSPARSELt's form: the values, then as much as its metadata takes, of where the values stand."""
    values, positions = pack(weight, 2, 4)
    filler = positions.repeat(1, 2).flatten().view(weight.dtype)[: values.numel() // 8]
    return torch.cat([values.flatten(), filler])
