"""The gradient of a permutation is held to putting every channel at every position and pruning again."""

import pytest
import torch
from torch import Tensor

from permtriton.kernels import placement_gradient as file
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import nm_mask, top_n_mask
from permtriton.kernels.placement_gradient import placement_gradient
from permtriton.kernels.swap_gains import RankOneCurvature, swap_gains, swap_terms
from permtriton.util.sparsity import NMPattern

from .kernel_inputs import TWO_FOUR, block_index, rng

PATTERNS = [NMPattern(kept, group) for kept, group in ((2, 4), (4, 8), (1, 4), (3, 4), (1, 2), (2, 3))]
FORMS = ["wanda", "ria", "squares"]


class Problem:
    """A linear with all that the gradient of its blocks follows from; scores without ties."""

    def __init__(
        self, sizes: list[int], rows: int = 11, pattern: NMPattern = TWO_FOUR, form: str = "wanda",
        dtype: torch.dtype = torch.float64, stored: torch.dtype = torch.float64,
    ) -> None:  # fmt: skip
        channels, random = sum(sizes), rng(sum(sizes) + rows)
        made = (torch.randn(rows, channels, generator=random, dtype=torch.float64).to(stored) for _ in range(2))
        self.weight, self.grad = (each.to(dtype) for each in made)
        factors = [torch.rand(count, generator=random).add(0.5) for count in (channels, rows, channels)]
        wide = [each.to(torch.promote_types(dtype, torch.float32)) for each in factors]
        self.importance = ImportanceFactors(2 if form == "squares" else 1, *(wide if form == "ria" else wide[:1]))
        self.index, self.sizes, self.pattern = block_index(sizes), sizes, pattern
        self.curvature = RankOneCurvature(*(torch.rand(n, generator=random) for n in (rows, channels)))

    def found(self) -> Tensor:
        return placement_gradient(
            self.grad, self.weight, self.importance, self.index, self.sizes, self.pattern, self.curvature
        )

    def blocks(self) -> list[Tensor]:
        parts = self.found().split([size * size for size in self.sizes])
        return [part.view(size, size) for part, size in zip(parts, self.sizes, strict=True)]

    def cost(self, kept: Tensor, channels: Tensor) -> float:
        """What the loss is of some channels ``[group]`` with a mask ``[group, O]``: to first order, and the flips."""
        weight, grad = self.weight.t()[channels].double(), self.grad.t()[channels].double()
        rise = self.curvature.row.double() * self.curvature.column[channels].double().unsqueeze(1) * weight.square()
        return float((kept * weight * grad).sum() + ((kept != self.present()[channels]) * rise).sum())

    def present(self) -> Tensor:
        """The mask ``[C, O]``, in base order, that the present order gives."""
        mask = torch.empty(self.weight.t().shape, dtype=torch.bool)
        mask[self.index] = top_n_mask(self.importance.scores(self.weight.t())[self.index], self.pattern)
        return mask

    def tried(self) -> list[Tensor]:
        """Every channel of a block at every position: the loss, less that where it is never kept there."""
        scores, group, blocks, start = self.importance.scores(self.weight.t()), self.pattern.group, [], 0
        for size in self.sizes:
            block = torch.zeros(size, size, dtype=torch.float64)
            for channel in range(size):
                for position in range(size):
                    first, place = start + position // group * group, position % group
                    members = self.index[first : first + group].clone()
                    members[place] = start + channel
                    there = scores[members]
                    absent = there.clone()
                    absent[place] = -1
                    masks = [top_n_mask(each, self.pattern) for each in (there, absent)]
                    taken, left = (self.cost(mask, members) for mask in masks)
                    block[channel, position] = taken - left
            blocks.append(block)
            start += size
        return blocks


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    atol = tolerance * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=atol)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow(but=["wanda-2:4", "ria-1:4", "squares-2:3"])
def test_it_is_what_trying_every_placement_gives(pattern, form):
    group = pattern.group
    problem = Problem([3 * group, 3 * group, 2 * group], 5, pattern, form)
    for found, expected in zip(problem.blocks(), problem.tried(), strict=True):
        assert float(expected.abs().max()) > 0.1
        assert_near(found, expected)


def test_the_gains_of_swaps_follow_from_it():
    problem = Problem([32])
    (found,) = problem.blocks()
    at = found[problem.index]  # channels by position
    own = at.diagonal()
    gains = own.unsqueeze(1) + own - at - at.t()
    given = problem.weight, problem.importance, problem.grad, problem.index, TWO_FOUR, problem.curvature
    terms = swap_terms(*given)
    across = torch.arange(32).div(4, rounding_mode="floor")
    pairs = across.unsqueeze(1) != across
    assert_near(gains[pairs], swap_gains(terms, terms)[pairs])


def test_of_parts_with_shares_of_the_curvature_it_is_the_sum():
    problem = Problem([16, 8])
    whole, total, gradient, row = problem.found(), 0, problem.grad, problem.curvature.row
    for share in (0.25, 0.75):
        part = torch.randn(gradient.shape, generator=rng(5), dtype=torch.float64) * (1 if share < 0.5 else -1)
        problem.grad = share * gradient + part
        problem.curvature = RankOneCurvature(row * share, problem.curvature.column)
        total = total + problem.found()
    assert_near(total, whole, 1e-6)


def test_a_step_along_it_lowers_a_linear_loss():
    """The sign and the orientation: swapping the pair that it favours must lower ``sum(G * W_eff)``."""
    weight = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.4, 0.3, 0.2, 0.1]])
    grad, factors, flat = -torch.ones(1, 8), ImportanceFactors(1, torch.ones(8)), RankOneCurvature(*torch.zeros(2, 8))
    flat = RankOneCurvature(torch.zeros(1), torch.zeros(8))
    gradient = placement_gradient(grad, weight, factors, torch.arange(8), [8], TWO_FOUR, flat).view(8, 8)
    swap = torch.tensor([0, 1, 4, 3, 2, 5, 6, 7])

    def loss(index: Tensor) -> Tensor:
        return (grad * nm_mask(weight, factors, index, [8], TWO_FOUR)).sum()

    change = gradient[swap, torch.arange(8)].sum() - gradient.diagonal().sum()
    assert change < 0
    assert loss(swap) - loss(torch.arange(8)) == pytest.approx(float(change))


@pytest.mark.parametrize("tile", [1, 300, 1 << 18])
def test_tiles_threads_and_strides_make_no_difference(tile, monkeypatch):
    problem = Problem([8, 8, 8, 4, 12, 8], rows=37)
    expected = problem.found()
    monkeypatch.setattr(file, "COMPARED", tile)
    monkeypatch.setattr(file, "AT_ONCE", tile)
    monkeypatch.setattr(file, "ROWS_AT_ONCE", 10)
    problem.weight, problem.grad = problem.weight.t().contiguous().t(), problem.grad.repeat(2, 2)[:37, :48]
    torch.set_num_threads(3)
    try:
        found = problem.found()
    finally:
        torch.set_num_threads(1)
    assert_near(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_weights(dtype):
    exact, narrow = (Problem([16, 8], 300, form="ria", dtype=each, stored=dtype) for each in (torch.float64, dtype))
    assert narrow.found().dtype == torch.float32
    assert_near(narrow.found(), exact.found(), 1e-4)


def test_a_dead_layer_and_no_rows():
    problem = Problem([8], rows=0)
    assert torch.equal(problem.found(), torch.zeros(64, dtype=torch.float64))
    problem = Problem([8])
    problem.weight.zero_()
    assert torch.equal(problem.found(), torch.zeros(64, dtype=torch.float64))
