from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from permtriton.kernels.importance import ImportanceFactors
from permtriton.methods.measure.importance import retained
from permtriton.methods.order.heuristic import heuristic_index, space_scores
from permtriton.passes.plan import ChannelSpace, Site
from permtriton.util.permutation import is_permutation
from permtriton.util.sparsity import NMPattern

TWO_FOUR = NMPattern(2, 4)
PATTERNS = [TWO_FOUR, NMPattern(4, 8), NMPattern(1, 4), NMPattern(3, 4), NMPattern(1, 2)]


def scores_of(channels: int, rows: int, seed: int = 0) -> Tensor:
    """Squared normals times a scale per channel: some weights and some channels matter far more than others."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(channels, 1, generator=generator).exp()
    return torch.randn(channels, rows, generator=generator).square() * scale


def find(scores: Tensor, pattern: NMPattern = TWO_FOUR, segments: tuple[int, ...] | None = None) -> Tensor:
    space = ChannelSpace("space", segments or (scores.shape[0],), ())
    return heuristic_index(space, scores, pattern, lambda steps=1, note="": None)


def kept_by_hand(scores: Tensor, index: Tensor, pattern: NMPattern) -> float:
    total = 0.0
    for row in scores.T.tolist():
        ordered = [row[channel] for channel in index.tolist()]
        for start in range(0, len(ordered), pattern.group):
            total += sum(sorted(ordered[start : start + pattern.group])[-pattern.kept :])
    return total


def optimum_of_eight(scores: Tensor) -> float:
    """The most that 2:4 can retain of eight channels, by trying all 35 ways to halve them."""
    found = []
    for rest in combinations(range(1, 8), 3):
        first = [0, *rest]
        index = torch.tensor(first + [c for c in range(8) if c not in first])
        found.append(kept_by_hand(scores, index, TWO_FOUR))
    assert len(found) == 35
    return max(found)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_retained_counts_what_the_mask_keeps(pattern):
    scores, index = scores_of(16, 5), torch.randperm(16, generator=torch.Generator().manual_seed(1))
    assert retained(scores, index, pattern) == pytest.approx(kept_by_hand(scores, index, pattern), rel=1e-6)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("channels", [16, 48])
@pytest.mark.parametrize("seed", range(3))
def test_is_a_permutation_that_never_retains_less_than_the_given_order(pattern, channels, seed):
    scores = scores_of(channels, 12, seed)
    index = find(scores, pattern)
    assert index.dtype == torch.int64
    assert is_permutation(index)
    given = retained(scores, torch.arange(channels), pattern)
    assert retained(scores, index, pattern) >= given
    assert channels == 16 or retained(scores, index, pattern) > 1.01 * given


def test_near_the_best_of_all_orders():
    """Never much less than the best order retains, and on average more than half of its gain over the given order."""
    parts, closed = [], []
    for seed in range(20):
        scores = scores_of(8, 6, seed)
        given = kept_by_hand(scores, torch.arange(8), TWO_FOUR)
        found, best = kept_by_hand(scores, find(scores), TWO_FOUR), optimum_of_eight(scores)
        assert given <= found <= best * (1 + 1e-9)
        parts.append(found / best)
        closed.append((found - given) / (best - given))
    assert min(parts) > 0.97
    assert sum(closed) / len(closed) > 0.5
    assert max(parts) > 1 - 1e-9


def test_finds_a_planted_order():
    """Each group of the planted order keeps all it has in every row; the heuristic gets most of that back."""
    generator = torch.Generator().manual_seed(0)
    groups, rows = 8, 64
    planted = torch.rand(groups, 4, rows, generator=generator).argsort(1) < 2
    scores = (planted.float() + 0.01 * torch.rand(groups, 4, rows, generator=generator)).flatten(0, 1)
    shuffled = scores[torch.randperm(groups * 4, generator=generator)]
    everything = retained(scores, torch.arange(groups * 4), TWO_FOUR)
    before = retained(shuffled, torch.arange(groups * 4), TWO_FOUR)
    after = retained(shuffled, find(shuffled), TWO_FOUR)
    assert after - before > 0.3 * (everything - before)


def test_no_exchange_of_one_slot_is_left_out():
    """At the end no swap of two channels at the same place of their groups gains more than the stopping rule allows."""
    scores = scores_of(16, 8, 1)
    index = find(scores)
    assert not torch.equal(index, torch.arange(16))
    reached = retained(scores, index, TWO_FOUR)
    for first, second in combinations(range(16), 2):
        if first % 4 == second % 4:
            swapped = index.clone()
            swapped[[first, second]] = index[[second, first]]
            assert retained(scores, swapped, TWO_FOUR) <= reached * (1 + 1e-4)


@pytest.mark.parametrize("segments", [(8, 8, 8), (16, 4, 12), (4, 4)])
def test_channels_stay_in_their_segment(segments):
    scores = scores_of(sum(segments), 9)
    index = find(scores, segments=segments)
    owner = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(segments))
    assert is_permutation(index)
    assert torch.equal(owner[index], owner)
    start = 0
    for size in segments:
        assert torch.equal(index[start : start + size] - start, find(scores[start : start + size]))
        start += size


@pytest.mark.parametrize("scores", [torch.ones(16, 3), torch.zeros(16, 3), torch.eye(4).repeat(4, 1)])
def test_keeps_the_given_order_where_nothing_is_gained(scores):
    assert torch.equal(find(scores), torch.arange(16))


class Linears(nn.Module):
    """Two linears on one site of 8 channels, and one on a site where channels share units."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a, self.b, self.tied = nn.Linear(8, 6), nn.Linear(8, 3), nn.Linear(16, 5)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)


@pytest.fixture
def sites() -> list[Site]:
    space = ChannelSpace("space", (4, 4), ())
    units = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7])
    return [Site("ab", ("a", "b"), 8, torch.arange(8), space), Site("tied", ("tied",), 16, units, space)]


def test_space_scores_sample_rows_of_large_linears_evenly(sites):
    model = Linears()
    importances = {name: ImportanceFactors(1, torch.ones(8)) for name in ("a", "b")}
    found = space_scores(model, sites[:1], importances, max_rows=6)
    assert found.shape == (8, 6)
    rows = model.a.weight.detach().abs()[[0, 2, 5]]  # three of six, from the first to the last
    torch.testing.assert_close(found[:, :3], (rows / rows.mean()).T)
