"""The gains of swaps are held to swapping the channels, pruning again and comparing the pruned weights."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from permtriton.kernels import swap_gains as file
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.kernels.swap_gains import RankOneCurvature, SwapTerms, swap_gains, swap_terms
from permtriton.util.sparsity import NMPattern

from .kernel_inputs import TWO_FOUR, factors_of, index_of, rng

PATTERNS = [NMPattern(kept, group) for kept, group in ((2, 4), (4, 8), (1, 4), (3, 4), (2, 8), (1, 2), (2, 3), (8, 16))]
ROWS = 23


def weight_of(kind: str, rows: int, channels: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random weights, or small integers, among which many scores are equal, with a dead channel or all equal."""
    if kind == "random":
        return torch.randn(rows, channels, generator=rng(channels), dtype=torch.float64).to(dtype)
    if kind == "equal":
        return torch.ones(rows, channels, dtype=dtype)
    weight = torch.randint(-2, 3, (rows, channels), generator=rng(channels)).to(dtype)
    weight[:, 1::5] = 0
    return weight


def gradient_of(rows: int, channels: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, channels, generator=rng(7), dtype=torch.float64).to(dtype)


def terms_of(
    channels: int, kind: str = "ties", rows: int = ROWS, pattern: NMPattern = TWO_FOUR,
    dtype: torch.dtype = torch.float64, form: str = "power 1",
) -> SwapTerms:  # fmt: skip
    weight, gradient = weight_of(kind, rows, channels, dtype), gradient_of(rows, channels, dtype)
    factors = factors_of(form, rows, channels, torch.promote_types(dtype, torch.float32))
    curvature = curvature_of(rows, channels, factors.scale.dtype)
    return swap_terms(weight, factors, gradient, index_of(channels), pattern, curvature)


def pruned(weight: Tensor, factors: ImportanceFactors, index: Tensor, pattern: NMPattern) -> Tensor:
    """W_eff in base order."""
    mask = torch.empty(weight.shape, dtype=torch.bool)
    mask[:, index] = top_n_mask(factors.scores(weight.t())[index], pattern).t()
    return weight * mask


def true_gains(
    weight: Tensor, factors: ImportanceFactors, gradient: Tensor, index: Tensor, pattern: NMPattern
) -> Tensor:
    """The gains of all pairs by doing every swap; 0 inside groups."""
    channels = index.numel()
    before, gains = pruned(weight, factors, index, pattern), torch.zeros(channels, channels, dtype=torch.float64)
    for i in range(channels):
        for j in range(i // pattern.group * pattern.group + pattern.group, channels):
            swapped = index.clone()
            swapped[i], swapped[j] = index[j], index[i]
            gains[i, j] = gains[j, i] = -(gradient * (pruned(weight, factors, swapped, pattern) - before)).sum()
    return gains


def flipped(
    weight: Tensor, factors: ImportanceFactors, curvature: RankOneCurvature, index: Tensor, pattern: NMPattern
) -> Tensor:
    """``row_O * column_C * w^2`` summed over the weights that each swap prunes or brings back; 0 inside groups."""
    channels = index.numel()
    before, rises = pruned(weight, factors, index, pattern) != 0, torch.zeros(channels, channels, dtype=torch.float64)
    cost = curvature.row.double().outer(curvature.column.double()) * weight.double().square()
    for i in range(channels):
        for j in range(i // pattern.group * pattern.group + pattern.group, channels):
            swapped = index.clone()
            swapped[i], swapped[j] = index[j], index[i]
            flips = (pruned(weight, factors, swapped, pattern) != 0) != before
            rises[i, j] = rises[j, i] = cost[flips].sum()
    return rises


def curvature_of(rows: int, channels: int, dtype: torch.dtype = torch.float64) -> RankOneCurvature:
    return RankOneCurvature(
        *(torch.rand(size, generator=rng(size), dtype=torch.float64).to(dtype) for size in (rows, channels))
    )


def across_groups(gains: Tensor, group: int) -> Tensor:
    """The gains with 0 inside groups."""
    number = torch.arange(gains.shape[-1]) // group
    return gains.masked_fill(number.unsqueeze(1) == number, 0)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    largest = expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize(
    ("form", "kind", "pattern"),
    [
        ("power 1", "random", TWO_FOUR),
        ("row and column", "equal", TWO_FOUR),
        ("row and column", "ties", NMPattern(8, 16)),
    ],
)
def test_gains_are_what_swapping_and_pruning_again_gives(pattern, kind, form):
    """Less what every flipped weight costs."""
    channels = (2 if pattern.group > 8 else 3) * pattern.group
    weight, gradient = weight_of(kind, ROWS, channels), gradient_of(ROWS, channels)
    factors, index = factors_of(form, ROWS, channels, torch.float64), index_of(channels)
    curvature = curvature_of(ROWS, channels)
    terms = swap_terms(weight, factors, gradient, index, pattern, curvature)
    gains = true_gains(weight, factors, gradient, index, pattern)
    rises = flipped(weight, factors, curvature, index, pattern)
    assert gains.abs().max() > 0
    assert rises.max() > 0
    assert_near(across_groups(swap_gains(terms, terms), pattern.group), gains - rises, 1e-9)


def test_curvature_in_float32_tiles_and_strides(monkeypatch):
    weight, gradient, index = weight_of("ties", ROWS, 40), gradient_of(ROWS, 40), index_of(40)
    factors, curvature = factors_of("row and column", ROWS, 40, torch.float64), curvature_of(ROWS, 40)
    wide = swap_terms(weight, factors, gradient, index, TWO_FOUR, curvature)
    monkeypatch.setattr(file, "TILE", 13 * ROWS)
    tiled = swap_terms(weight.t().contiguous().t(), factors, gradient, index, TWO_FOUR, curvature)
    for part, whole in zip(tiled.tensors(), wide.tensors(), strict=True):
        assert_near(part, whole, 1e-12)
    narrow = swap_terms(
        weight.float(), factors_of("row and column", ROWS, 40), gradient.float(), index, TWO_FOUR,
        curvature_of(ROWS, 40, torch.float32),
    )  # fmt: skip
    expected = across_groups(swap_gains(wide, wide), 4)
    assert_near(across_groups(swap_gains(narrow, narrow), 4), expected, 1e-5)


def test_strides_and_tiles_make_no_difference(monkeypatch):
    weight, gradient, index = weight_of("ties", ROWS, 40), gradient_of(ROWS, 40), index_of(40)
    factors = factors_of("row and column", ROWS, 40, torch.float64)
    order = index, TWO_FOUR, curvature_of(ROWS, 40)
    expected = swap_terms(weight, factors, gradient, *order)
    gains = swap_gains(expected, expected)
    monkeypatch.setattr(file, "TILE", 13 * ROWS)
    apart = gradient.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]
    found = swap_terms(weight.t().contiguous().t(), factors, apart, *order)
    strided = swap_terms(weight, factors, gradient.t().contiguous().t(), *order)
    for part, strided_part, whole in zip(found.tensors(), strided.tensors(), expected.tensors(), strict=True):
        assert_near(part, whole, 1e-12)
        assert_near(strided_part, whole, 1e-12)
    turned = SwapTerms(*(part.t().contiguous().t() for part in expected.tensors()[:4]), expected.own)
    assert_near(swap_gains(turned, turned), gains, 1e-12)


@pytest.mark.parametrize("layout", ["rows", "positions"])
def test_of_positions(layout):
    terms = terms_of(24)
    whole = swap_gains(terms, terms)
    if layout == "positions":
        terms = SwapTerms(*(part.t().contiguous().t() for part in terms.tensors()[:4]), terms.own)
    chosen = torch.tensor([5, 17, 2])
    some, run = terms.of_positions(chosen), terms.of_positions(slice(4, 12))
    assert torch.equal(some.scores, terms.scores[chosen])
    assert torch.equal(some.own, terms.own[chosen])
    assert some.scores.stride(0 if layout == "positions" else 1) == 1
    assert run.threshold.data_ptr() == terms.threshold[4].data_ptr()
    found = swap_gains(some, run)
    assert found.shape == (3, 8)
    assert_near(found, whole[chosen, 4:12], 1e-12)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_threads_share_the_tiles_and_leave_no_trace(mode, monkeypatch):
    expected = swap_gains(terms_of(48), terms_of(48))
    monkeypatch.setattr(file, "TILE", 5 * ROWS)
    torch.set_num_threads(3)
    try:
        with mode():
            terms = terms_of(48)
            found = swap_gains(terms, terms)
        with ThreadPoolExecutor(1) as pool:
            assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(1)
    assert_near(found, expected, 1e-12)
