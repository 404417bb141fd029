"""The gains that a search adds up over linears are what really swapping units does to the masked weights."""

import functools
from itertools import combinations

import pytest
import torch
from torch import Tensor

from permtriton import NMPattern
from permtriton.kernels.swap_gains import swap_gains
from permtriton.methods.order.searched import Searcher, disjoint, swapped
from permtriton.passes.plan import ChannelSpace

from . import zoo
from .expert_stacks import unstacked
from .kernel_inputs import rng
from .searching import Problem, planted
from .zoo import find_plan


@functools.cache
def problem(name: str, layout: str, pattern: NMPattern) -> Problem:
    """In float64. All sizes are multiples of 8, so that one plan does for all patterns."""
    model, plan = unstacked(name) if name in zoo.MIXTURES else zoo.planned(name)
    if layout == "fused":
        plan = find_plan(model, NMPattern(2, 4), layout=layout)
    model = model.double()
    return Problem(model, plan, zoo.token_ids(4, 9), pattern)


def pairs_of(space: ChannelSpace, group: int, seed: int) -> list[tuple[int, int]]:
    """Some pairs of unit positions of one segment, in different groups."""
    pairs, start = [], 0
    for size in space.segments:
        positions = range(start, start + size)
        inside = [pair for pair in combinations(positions, 2) if pair[0] // group != pair[1] // group]
        pairs += [inside[int(n)] for n in torch.randperm(len(inside), generator=rng(seed))[:6]]
        start += size
    return pairs


def weights_of(masks) -> list[Tensor]:
    return [linear.out_in(linear.parameter).clone() for linear in masks._linears]


def total_gains(masks, space: ChannelSpace, indices: dict[str, Tensor], damping: float) -> Tensor:
    return sum(swap_gains(terms, terms) for terms in masks.terms(space, indices, damping))


@pytest.mark.parametrize(
    ("name", "layout", "pattern"),
    [
        ("llama", "fused", NMPattern(2, 4)),
        pytest.param("gpt2", "portable", NMPattern(4, 8), marks=pytest.mark.slow),
        pytest.param("mixtral", "portable", NMPattern(2, 4), marks=pytest.mark.slow),
    ],
)
def test_gains_are_what_swapping_does(name, layout, pattern):
    """To first order exactly; with damping, less the curvature of exactly the weights that flip."""
    given, damping = problem(name, layout, pattern), 0.7
    indices = zoo.random_indices(given.plan)
    copies, checked = set(), 0
    with given.masked() as masks:
        masks.set(indices)
        masks.take_gradients()
        before = weights_of(masks)
        for space in given.spaces[:4]:
            plain = total_gains(masks, space, indices, 0.0)
            damped = total_gains(masks, space, indices, damping)
            assert plain.dtype == torch.float64
            scale, rise_scale = plain.abs().max(), (damped - plain).abs().max()
            copies |= {site.copies for site in given.plan.sites_of(space)}
            for one, other in pairs_of(space, pattern.group, space.units):
                pair = torch.tensor([one]), torch.tensor([other]), torch.ones(1)
                masks.set(swapped(indices, {space.name: pair}))
                change, rise = 0.0, 0.0
                for linear, old in zip(masks._linears, before, strict=True):
                    delta = linear.out_in(linear.parameter) - old
                    change += float((linear.total * delta).sum())
                    row, column = linear.curvature.row, linear.curvature.column
                    flipped = delta.square()  # a weight flips between its value and 0
                    rise += float((flipped * row.double().outer(column.double())).sum())
                checked += change != 0
                assert abs(plain[one, other] + change) <= 1e-9 * scale
                assert abs(damped[one, other] + change + damping * rise) <= 1e-6 * (scale + rise_scale)
        masks.drop_gradients()
    assert checked > 20
    assert copies == {"llama": {1, 2}, "falcon": {1, 4}, "mixtral": {1, 2}}.get(name, {1})


@pytest.mark.parametrize("damping", [1e-2, 4.0])
@pytest.mark.slow
def test_what_a_round_predicts_is_the_sum_over_its_swaps(damping):
    """Swaps that touch different groups and spaces add up exactly, to first order and second order of the diagonal."""
    given = planted(torch.float64)
    indices = {space.name: torch.arange(space.units) for space in given.spaces}
    with given.masked() as masks:
        masks.set(indices)
        masks.take_gradients()
        before = weights_of(masks)
        searcher = Searcher(masks, given.spaces)
        swaps = searcher.swaps(indices, damping)
        gain = torch.cat([gain for *_, gain in swaps.values()])
        assert gain.numel() > 3
        assert (gain > 0).all()
        masks.set(swapped(indices, swaps))
        expected = 0.0
        for linear, old in zip(masks._linears, before, strict=True):
            delta = linear.out_in(linear.parameter) - old
            row, column = linear.curvature.row, linear.curvature.column
            rise = delta.square() * row.double().outer(column.double())
            expected -= float((linear.total * delta).sum() + damping * rise.sum())
    assert gain.sum().item() == pytest.approx(expected, rel=1e-5)


def greedy(left: Tensor, right: Tensor, gain: Tensor, group: int) -> list[int]:
    taken, used = [], set()
    for number in sorted(range(gain.numel()), key=lambda n: -gain[n].item()):
        ends = {int(left[number]) // group, int(right[number]) // group}
        if not ends & used:
            taken.append(number)
            used |= ends
    return taken


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_disjoint_is_the_greedy_choice(seed, ties):
    group, positions, count = 4, 48, [1, 7, 60, 300][seed % 4]
    left, right = torch.randint(0, positions, (2, count), generator=rng(seed))
    apart = left // group != right // group
    left, right = left[apart], right[apart]
    gain = torch.rand(left.numel(), generator=rng(seed + 100))
    gain = (gain * 5).floor() if ties else gain
    found = disjoint(left, right, gain, group)
    assert found.tolist() == greedy(left, right, gain, group)
    groups = torch.cat((left[found], right[found])) // group
    assert groups.unique().numel() == groups.numel(), "each group once"


def test_disjoint_of_nothing_is_nothing():
    nothing = torch.empty(0, dtype=torch.int64)
    assert disjoint(nothing, nothing, torch.empty(0), 4).tolist() == []
