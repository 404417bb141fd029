"""Inputs of the kernel tests, interpreted ones included, and the check that an assignment is optimal."""

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.kernels.packing import pack, packed_shapes
from permtriton.model.modules import SparseLinear
from permtriton.util.sparsity import NMPattern

TWO_FOUR = NMPattern(2, 4)
PATTERNS = [
    NMPattern(kept, group)
    for kept, group in ((2, 4), (4, 8), (1, 2), (1, 4), (3, 4), (2, 3), (5, 6), (8, 16), (7, 17), (3, 32), (31, 32))
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
KERNEL_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VIEWS = [  # of a matrix of six rows, as layouts of activations
    lambda x: x.mT.contiguous().mT,
    lambda x: x[:, ::2],
    lambda x: x[::2],
    lambda x: x[0],
    lambda x: x.unflatten(0, (2, 3)).transpose(0, 1),
    lambda x: x[:1].expand_as(x),
]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def index_of(channels: int, seed: int = 0) -> Tensor:
    return torch.randperm(channels, generator=rng(seed))


def block_index(sizes: list[int], seed: int = 0) -> Tensor:
    """A permutation that moves channels inside the blocks only."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return torch.cat([start + index_of(size, seed + start) for start, size in zip(starts, sizes, strict=True)])


def factors_of(form: str, rows: int, channels: int, dtype: torch.dtype = torch.float32) -> ImportanceFactors:
    """Factors in eighths: exact in every dtype, and with many ties."""
    scale, row, column = (
        torch.randint(1, 9, (n,), generator=rng(n + k)).to(dtype) / 8 for k, n in enumerate((channels, rows, channels))
    )
    return {
        "power 1": ImportanceFactors(1, scale),
        "power 2": ImportanceFactors(2, scale),
        "row and column": ImportanceFactors(1, scale, row, column),
    }[form]


def sparse(rows: int, groups: int, pattern: NMPattern = TWO_FOUR, dtype: torch.dtype = torch.float32) -> Tensor:
    """An N:M weight ``[rows, groups * group]``; about a fifth of its groups hold fewer than ``kept``."""
    weight = torch.randn(rows, groups * pattern.group, generator=rng(rows * groups)).to(dtype)
    keep = top_n_mask(weight.abs().t().contiguous(), pattern).t()
    keep &= torch.rand(weight.shape, generator=rng(1)) > 0.2 / pattern.kept
    return torch.where(keep, weight, torch.zeros((), dtype=dtype)).contiguous()


def compressed(weight: Tensor) -> Tensor:
    """Stands in for cuSPARSELt's form: the values, then positions in the space that its metadata takes."""
    values, positions = pack(weight, TWO_FOUR)
    filler = positions.repeat(1, 2).flatten().view(weight.dtype)[: values.numel() // 8]
    return torch.cat([values.flatten(), filler])


def logits_of(size: int, blocks: int = 3, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Tensor:
    return (torch.randn(blocks, size, size, generator=rng(size), dtype=torch.float64) * spread).to(dtype)


def scores_of(size: int, blocks: int = 4) -> Tensor:
    return torch.randn(blocks, size, size, generator=rng(size))


def adversarial(size: int) -> Tensor:
    """Score matrices on which greedy or float-careless solvers go wrong."""
    line = torch.arange(1.0, size + 1)
    product = line.outer(line)
    trap = torch.full((size, size), -1e4)
    trap.diagonal().fill_(1.0)
    trap.diagonal(1).fill_(1.5)
    trap[-1, 0] = -1e5
    noise = scores_of(size, 1)[0]
    mixed = noise * 10.0 ** torch.randint(-20, 20, (size, size), generator=rng(size))
    offset = noise.mul(8).round() + 2.0**20
    return torch.stack(
        (product, -product, -(line.view(-1, 1) - line).abs(), trap, noise * 1e30, noise * 1e-30,
         torch.eye(size).flip(0), offset, mixed)
    )  # fmt: skip


def total(score: Tensor, index: Tensor) -> Tensor:
    """The total score of an assignment, which gives column j row ``index[j]``."""
    return score.double().gather(1, index.long().unsqueeze(1)).sum((1, 2))


def best(score: Tensor) -> Tensor:
    """The largest totals, by scipy."""
    totals = [block[linear_sum_assignment(block, maximize=True)].sum() for block in score.double().numpy()]
    return torch.tensor(np.array(totals))


def check_assignment(score: Tensor, index: Tensor) -> Tensor:
    """Asserts that ``index`` holds a permutation of each block, with the largest total; returns it."""
    assert index.dtype == torch.int32
    assert index.shape == score.shape[:2]
    assert torch.equal(index.sort(1).values, torch.arange(score.shape[1], dtype=torch.int32).expand_as(index))
    torch.testing.assert_close(total(score, index), best(score), rtol=1e-12, atol=0)
    return index


def poison(monkeypatch) -> None:
    """Sets every bit of allocated memory: values that a kernel does not write stay NaN, or -1 for integers."""
    empty = torch.empty

    def poisoned(*arguments, **options) -> Tensor:
        made = empty(*arguments, **options)
        if type(made) is Tensor:  # torch.library.opcheck makes fake ones, too
            made.untyped_storage().fill_(255)
        return made

    monkeypatch.setattr(torch, "empty", poisoned)


def empty_packed(layer: SparseLinear, pattern: NMPattern) -> SparseLinear:
    """Brings a layer into the packed state with empty buffers, for a state dict to fill."""
    shapes = packed_shapes(layer.out_features, layer.in_features, pattern)
    values = layer.weight.new_empty(shapes[0], requires_grad=False)
    return layer.set_packed(pattern, values, torch.empty(shapes[1], dtype=torch.uint8, device=values.device))
