import pytest
import torch
from torch import Tensor

from permtriton.kernels import nm_mask as nm_mask_file
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import nm_mask, nm_mask_backward, top_n_mask
from permtriton.util.sparsity import NMPattern

from .kernel_inputs import TWO_FOUR, block_index, factors_of, rng

PATTERNS = [NMPattern(kept, group) for kept, group in ((2, 4), (4, 8), (1, 4), (3, 4), (8, 16), (1, 2))]
FORMS = ["power 1", "power 2", "row and column"]


def matrix_of(index: Tensor) -> Tensor:
    matrix = torch.zeros(index.numel(), index.numel(), dtype=torch.float64)
    matrix[index, torch.arange(index.numel())] = 1
    return matrix


def weight_of(rows: int, channels: int, dtype: torch.dtype = torch.float32, column_major: bool = False) -> Tensor:
    weight = (torch.randint(-8, 9, (rows, channels), generator=rng(rows + channels)) / 8).to(dtype)
    return weight.T.contiguous().T if column_major else weight


def dense_scores(weight: Tensor, factors: ImportanceFactors) -> Tensor:
    scores = weight.double().abs() ** factors.power * factors.scale.double()
    return scores if factors.row is None else scores * (factors.row.double().view(-1, 1) + factors.column.double())


def dense_mask(scores: Tensor, pattern: NMPattern) -> Tensor:
    """Sorts every group of every row by hand; equal scores are sorted by channel."""
    mask = torch.zeros_like(scores)
    for o, values in enumerate(scores.tolist()):
        for start in range(0, len(values), pattern.group):
            order = sorted(range(start, start + pattern.group), key=lambda c: (-values[c], c))
            mask[o, order[: pattern.kept]] = 1
    return mask


@pytest.mark.parametrize("pattern", [*PATTERNS, NMPattern(2, 3), NMPattern(31, 32)], ids=str)
def test_exact_count_in_every_group(pattern):
    group = pattern.group
    scores = torch.randint(0, 4, (3 * group, 50), generator=rng()).float()
    mask = top_n_mask(scores, pattern)
    assert mask.dtype == torch.bool
    assert mask.unflatten(0, (3, group)).sum(1).eq(pattern.kept).all()
    assert torch.equal(mask.T.double(), dense_mask(scores.T.double(), pattern))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(
    ("form", "dtype", "column_major"),
    [
        *((form, torch.float32, False) for form in FORMS),
        *((FORMS[0], torch.bfloat16, True), (FORMS[-1], torch.float64, True)),
    ],
)
def test_forward_equals_dense_matrices(pattern, form, dtype, column_major):
    group = pattern.group
    sizes = [2 * group, group, 2 * group]
    rows, channels = 9, sum(sizes)
    weight = weight_of(rows, channels, dtype, column_major)
    factors = factors_of(form, rows, channels, torch.float32)
    index = block_index(sizes)
    found = nm_mask(weight, factors, index, sizes, pattern)
    matrix = matrix_of(index)
    mask = dense_mask(dense_scores(weight, factors) @ matrix, pattern)
    assert found.dtype == dtype
    assert torch.equal(found.double(), weight.double() * (mask @ matrix.T))
    assert mask.unflatten(1, (-1, group)).sum(2).eq(pattern.kept).all()


def dense_gradient(weight: Tensor, factors: ImportanceFactors, index: Tensor, sizes: list[int], grad: Tensor) -> Tensor:
    """Autograd through ``W * (M_soft P^T)`` with dense matrices, at the hard P."""
    matrix = matrix_of(index).requires_grad_()
    scores = (dense_scores(weight, factors) @ matrix).unflatten(1, (-1, 4))
    (weight.double() * (scores.softmax(2).flatten(1) @ matrix.T)).backward(grad.double())
    blocks, start = [], 0
    for size in sizes:
        blocks.append(matrix.grad[start : start + size, start : start + size].reshape(-1))
        start += size
    return torch.cat(blocks)


@pytest.mark.parametrize("sizes", [[8, 8, 8], [8, 4, 12, 8]])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("column_major", [False, True])
def test_gradient_equals_autograd_through_dense_matrices(sizes, form, column_major):
    rows, channels = 11, sum(sizes)
    weight = torch.randn(rows, channels, generator=rng(1), dtype=torch.float64)
    weight = weight.T.contiguous().T if column_major else weight
    factors, index = factors_of(form, rows, channels, torch.float64), block_index(sizes, 5)
    grad = torch.randn(rows, channels, generator=rng(2), dtype=torch.float64)
    found = nm_mask_backward(grad, weight, factors, index, sizes, 4)
    expected = dense_gradient(weight, factors, index, sizes, grad)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("tile", [1, 100, 200, 1 << 19])
@pytest.mark.parametrize("column_major", [False, True])
def test_the_size_of_a_tile_changes_nothing(tile, column_major, monkeypatch):
    """One block in a tile, some, or all: blocks of one size next to each other share tiles, others do not."""
    monkeypatch.setattr(nm_mask_file, "TILE", tile)
    sizes = [8, 8, 8, 4, 4, 12, 8]
    rows, channels = 7, sum(sizes)
    weight = weight_of(rows, channels, torch.float64, column_major)
    factors, index = factors_of("row and column", rows, channels, torch.float64), block_index(sizes)
    grad = torch.randn(rows, channels, generator=rng(2), dtype=torch.float64)
    matrix = matrix_of(index)
    mask = dense_mask(dense_scores(weight, factors) @ matrix, TWO_FOUR)
    assert torch.equal(nm_mask(weight, factors, index, sizes, TWO_FOUR), weight * (mask @ matrix.T))
    found = nm_mask_backward(grad, weight, factors, index, sizes, 4)
    torch.testing.assert_close(found, dense_gradient(weight, factors, index, sizes, grad), atol=1e-11, rtol=1e-10)


def test_a_mask_step_along_the_gradient_lowers_a_linear_loss():
    """The sign and the orientation of dP: swapping the pair that it favours must lower ``sum(G * W_eff)``."""
    weight = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.4, 0.3, 0.2, 0.1]])
    grad, factors = -torch.ones(1, 8), ImportanceFactors(1, torch.ones(8))
    grad_matrix = nm_mask_backward(grad, weight, factors, torch.arange(8), [8], 4).view(8, 8)
    swap = torch.tensor([0, 1, 4, 3, 2, 5, 6, 7])

    def loss(index: Tensor) -> Tensor:
        return (grad * nm_mask(weight, factors, index, [8], TWO_FOUR)).sum()

    step = matrix_of(swap).float() - torch.eye(8)
    assert (grad_matrix * step).sum() < 0
    assert loss(swap) < loss(torch.arange(8))


@pytest.mark.parametrize("dead", ["weight group", "all weights", "statistics of scattered channels", "all statistics"])
def test_zeros_give_finite_gradients(dead):
    weight, scale = torch.randn(32, 16, generator=rng(1)), torch.rand(16, generator=rng(2)) + 0.5
    if dead == "weight group":
        weight[:, 4:8] = 0
    elif dead == "all weights":
        weight[:] = 0
    elif dead == "statistics of scattered channels":
        scale[::4] = 0
    else:
        scale[:] = 0
    grad = torch.randn(32, 16, generator=rng(3))
    found = nm_mask_backward(grad, weight, ImportanceFactors(1, scale), torch.arange(16), [16], 4)
    assert found.isfinite().all()
