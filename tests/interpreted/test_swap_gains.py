import pytest
import torch

from permtriton.kernels import swap_gains as file
from permtriton.kernels.swap_gains import RankOneCurvature, SwapTerms, swap_gains_reference, swap_terms

from ..kernel_inputs import TWO_FOUR, factors_of, index_of, rng

TOLERANCE = 1e-5


def terms_of(channels: int, rows: int) -> SwapTerms:
    """Weights in integers, so that many scores are equal."""
    weight = torch.randint(-3, 4, (rows, channels), generator=rng(channels)).float()
    gradient = torch.randn(rows, channels, generator=rng(rows))
    curvature = RankOneCurvature(*(torch.rand(size, generator=rng(size)) for size in (rows, channels)))
    return swap_terms(weight, factors_of("power 1", rows, channels), gradient, index_of(channels), TWO_FOUR, curvature)


def laid_out(terms: SwapTerms, layout: str) -> SwapTerms:
    """The terms in other strides."""
    *parts, own = terms.tensors()
    if layout == "positions":
        parts = [part.t().contiguous().t() for part in parts]
    if layout == "mixed":  # one of them differs, and the sums have gaps
        parts, own = [parts[0].t().contiguous().t(), *parts[1:]], own.repeat_interleave(2)[::2]
    return SwapTerms(*parts, own)


def check(left: SwapTerms, right: SwapTerms, layout: str = "rows") -> None:
    sides = laid_out(left, layout), laid_out(right, layout)
    found = file.swap_gains_triton(*sides)
    doubles = [SwapTerms(*(part.double() for part in side.tensors())) for side in sides]
    expected = swap_gains_reference(*doubles)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE, atol=TOLERANCE * expected.abs().max().item())


@pytest.mark.parametrize(("number", "layout"), enumerate(["rows", "positions", "mixed"]))
def test_every_configuration_and_layout(number, layout, monkeypatch):
    monkeypatch.setattr(file, "config_for", lambda op, configs, shape, dtype: configs[number])
    terms = terms_of(140, 7)
    check(terms.of_positions(slice(0, 67)), terms.of_positions(slice(9, 140)), layout)


@pytest.mark.parametrize(("left", "right", "rows"), [(64, 64, 16), (1, 1, 1), (3, 65, 2), (65, 3, 33), (32, 1, 5)])
def test_sizes(left, right, rows):
    terms = terms_of(68, rows)
    check(terms.of_positions(slice(0, left)), terms.of_positions(slice(68 - right, 68)))


@pytest.mark.parametrize(
    ("layout", "sizes", "align"),
    [("rows", (33, 70), 1), ("positions", (33, 70), 1), ("mixed", (33, 70), 1), ("positions", (48, 80), 16)],
)
def test_alignment(layout, sizes, align, monkeypatch):
    kernel, launched = file._swap_gains_kernel, {}

    class Recorded:
        def __getitem__(self, grid):
            return lambda *arguments, **options: kernel[grid](*arguments, **(launched.update(options) or options))

    monkeypatch.setattr(file, "_swap_gains_kernel", Recorded())
    terms = terms_of(96, 9)
    left, right = (terms.of_positions(index_of(96, seed)[:size]) for seed, size in zip((0, 5), sizes, strict=True))
    check(left, right, layout)
    assert launched["ALIGN"] == align


def test_no_positions_on_the_right():
    terms = terms_of(8, 4)
    assert file.swap_gains_triton(terms, terms.of_positions(slice(0, 0))).shape == (8, 0)
