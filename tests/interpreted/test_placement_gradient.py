import pytest
import torch

from permtriton.kernels import placement_gradient as file
from permtriton.kernels.distances import distances_triton
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.placement_gradient import placement_gradient_reference
from permtriton.kernels.swap_gains import RankOneCurvature
from permtriton.util.sparsity import NMPattern

from ..kernel_inputs import KERNEL_DTYPES, TWO_FOUR, block_index, rng


def check(
    sizes: list[int], rows: int, pattern: NMPattern = TWO_FOUR, dtype: torch.dtype = torch.float32, turned: bool = True
) -> None:
    channels, random = sum(sizes), rng(rows)
    grad, weight = (torch.randn(rows, channels, generator=random).to(dtype) for _ in range(2))
    if turned:
        grad, weight = grad.t().contiguous().t(), weight.t().contiguous().t()
    factors = ImportanceFactors(1, *(torch.rand(n, generator=random) + 0.5 for n in (channels, rows, channels)))
    curvature = RankOneCurvature(*(torch.rand(n, generator=random) for n in (rows, channels)))
    index = block_index(sizes)
    found = file.placement_gradient_triton(grad, weight, factors, index, sizes, pattern, curvature)
    wide = ImportanceFactors(1, *(each.double() for each in factors.contiguous()))
    expected = placement_gradient_reference(grad.double(), weight.double(), wide, index, sizes, pattern, curvature)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("number", range(len(file.CONFIGS)))
@pytest.mark.parametrize("sizes", [[64, 64, 16], [12, 12, 8]])
def test_every_configuration(number, sizes, monkeypatch):
    monkeypatch.setattr(file, "config_for", lambda op, configs, shape, dtype: configs[number])
    check(sizes, 5)


@pytest.mark.parametrize("programs", [1, 4, 64])
def test_the_rows_are_split(programs, monkeypatch):
    constants = {**file.CONFIGS[0].constants, "PROGRAMS": programs}
    monkeypatch.setattr(file, "config_for", lambda *of: file.Config(constants, num_warps=1, num_stages=1))
    monkeypatch.setattr(file, "LEAST_ROWS", 2)
    check([16, 16], 7)


def test_tiles_of_blocks(monkeypatch):
    monkeypatch.setattr(file, "GPU_AT_ONCE", 7 * 20)
    check([8, 8, 8, 4, 12], 7)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("pattern", "size"), [(TWO_FOUR, 100), (NMPattern(4, 8), 16), (NMPattern(2, 3), 9)], ids=str)
def test_dtypes_patterns_and_sizes(dtype, pattern, size):
    check([size], 3, pattern, dtype, turned=size != 16)


@pytest.mark.parametrize("shape", [(2, 16, 7), (1, 36, 300), (3, 5, 1)], ids=str)
def test_distances(shape):
    left, right = (torch.randn(shape, generator=rng(seed)) for seed in (0, 1))
    found, expected = distances_triton(left, right), torch.cdist(left.double(), right.double(), p=1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6 * shape[-1])


def test_what_the_kernel_does_not_take():
    assert file.supports(torch.empty(1), torch.empty(1))
    assert not file.supports(torch.empty(1).double(), torch.empty(1))
