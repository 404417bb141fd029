import math

import pytest
import torch
from torch import Tensor

from permtriton.errors import CalibrationError
from permtriton.methods.order.learned import Learned as Options
from permtriton.methods.order.relaxation import Relaxation, SiteBlocks
from permtriton.passes.plan import ChannelSpace, Site
from permtriton.util.permutation import is_permutation

CPU = torch.device("cpu")


def relaxation_of(*spaces: ChannelSpace, seed: int = 0, **options) -> Relaxation:
    return Options(**{"block_size": 8, **options}).relaxation(spaces, seed, CPU)


def space_of(*segments: int, name: str = "space") -> ChannelSpace:
    return ChannelSpace(name, segments, ())


def plain_site(space: ChannelSpace) -> Site:
    return Site(space.name, ("linear",), space.units, torch.arange(space.units), space)


def tied_site(space: ChannelSpace) -> Site:
    """Two query heads for each key/value head: the channels of every segment appear twice in a row."""
    units, start = [], 0
    for segment in space.segments:
        units += [torch.arange(start, start + segment)] * 2
        start += segment
    return Site("tied", ("o_proj",), 2 * space.units, torch.cat(units), space)


def apart_site(space: ChannelSpace) -> Site:
    """All first copies, then all second ones."""
    return Site("tied", ("o_proj",), 2 * space.units, torch.arange(space.units).repeat(2), space)


def matrices(flat: Tensor, sizes: list[int]) -> list[Tensor]:
    return [part.view(size, size) for part, size in zip(flat.split([s * s for s in sizes]), sizes, strict=True)]


def onehot(index: Tensor) -> Tensor:
    matrix = torch.zeros(index.numel(), index.numel())
    matrix[index, torch.arange(index.numel())] = 1
    return matrix


def hard(relaxation: Relaxation, index: dict[str, Tensor], spaces: list[ChannelSpace]) -> list[Tensor]:
    """The batched blocks of permutation matrices that ``index`` stands for."""
    batches = [torch.zeros_like(weight) for weight in relaxation.weights]
    for space in spaces:
        for start, size in space.blocks(relaxation.block_size):
            place, row = relaxation.position(space, start)
            batches[place][row] = onehot(index[space.name][start : start + size] - start)
    return batches


@pytest.mark.parametrize("segments", [(8,), (32,), (16, 16), (20,), (12, 4, 24), (4,)])
@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_start_near_the_identity_hardens_to_it(segments, tau):
    relaxation = relaxation_of(space_of(*segments))
    index = relaxation.by_space(relaxation.assign(relaxation.soft(tau)))["space"]
    assert torch.equal(index, torch.arange(sum(segments)))


@pytest.mark.parametrize("start", ["identity", "random"])
def test_the_start_follows_the_seed(start):
    space = space_of(16, 12)
    first, again, other = (relaxation_of(space, seed=seed, init=start) for seed in (3, 3, 4))
    for a, b, c in zip(first.weights, again.weights, other.weights, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_clamped_logits(limit):
    relaxation = relaxation_of(space_of(8), sinkhorn_rounds=0, clamp=limit)
    with torch.no_grad():
        relaxation.weights[0].mul_(10)
    logits = relaxation.scale * relaxation.weights[0]
    expected = logits.clamp(-1, 1) if limit else logits
    torch.testing.assert_close(relaxation.soft(1.0)[0], expected.softmax(-1))
    assert logits.abs().max() > 5


@pytest.mark.parametrize("segments", [(64,), (20,), (12, 4, 24)])
@pytest.mark.parametrize("seed", range(3))
def test_hardens_to_permutations_inside_blocks(segments, seed):
    space = space_of(*segments)
    relaxation = relaxation_of(space, seed=seed, init="random")
    index = relaxation.by_space(relaxation.assign(relaxation.soft(0.5)))["space"]
    assert index.dtype == torch.int64
    assert is_permutation(index)
    for start, size in space.blocks(8):
        assert index[start : start + size].sort().values.tolist() == list(range(start, start + size))


def test_hardens_to_the_matrices_given():
    """Block by block, space by space, in the project's convention ``P[index[j], j] = 1``."""
    spaces = [space_of(12, 20, name="a"), space_of(8, name="b"), space_of(4, name="c")]
    relaxation = relaxation_of(*spaces)
    generator = torch.Generator().manual_seed(0)
    expected = {}
    for space in spaces:
        blocks = space.blocks(8)
        expected[space.name] = torch.cat([s + torch.randperm(n, generator=generator) for s, n in blocks])
    found = relaxation.by_space(relaxation.assign(hard(relaxation, expected, spaces)))
    assert found.keys() == expected.keys()
    for name, index in expected.items():
        assert torch.equal(found[name], index)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_a_soft_permutation_that_is_not_finite_is_refused(value, place):
    relaxation = relaxation_of(space_of(20))
    soft = [matrices.detach() for matrices in relaxation.soft(1.0)]
    soft[place][-1, 2, 1] = value
    with pytest.raises(CalibrationError, match="no longer finite"):
        relaxation.assign(soft)


@pytest.mark.parametrize("segments", [(16, 16), (12, 12), (4, 20)])
@pytest.mark.parametrize("site_of", [plain_site, tied_site, apart_site])
def test_flat_blocks_are_the_matrix_of_the_site_s_index(segments, site_of):
    """The index and the matrices that a site's mask receives are the same permutation, tied copies included."""
    space = space_of(*segments)
    relaxation, site = relaxation_of(space, seed=1, init="random"), site_of(space)
    index = relaxation.by_space(relaxation.assign(relaxation.soft(0.3)))
    blocks = SiteBlocks(relaxation, site)
    assert sum(blocks.sizes) == site.channels
    flat = blocks.flat(hard(relaxation, index, [space]))
    assert torch.equal(torch.block_diag(*matrices(flat, blocks.sizes)), onehot(site.expand(index["space"])))


@pytest.mark.parametrize("segments", [(16, 16), (12, 12), (4, 20), (64,)])
@pytest.mark.parametrize("site_of", [plain_site, tied_site, apart_site])
def test_the_gradient_added_is_that_of_autograd(segments, site_of):
    """Gradients are added to those of another site."""
    space = space_of(*segments)
    relaxation = relaxation_of(space_of(8, name="before"), space)
    soft = [matrices.detach().requires_grad_() for matrices in relaxation.soft(1.0)]
    blocks = SiteBlocks(relaxation, site_of(space))
    flat = blocks.flat(soft)
    gradient = torch.rand(flat.shape, generator=torch.Generator().manual_seed(0))
    found = [torch.ones_like(matrices) for matrices in soft]
    blocks.add_gradient(gradient, found)
    expected = torch.autograd.grad(flat, soft, gradient, materialize_grads=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, 1 + other)


@pytest.mark.parametrize(
    ("segments", "sizes"), [((20,), [8, 8, 4]), ((12, 12), [8, 4, 8, 4]), ((4, 16), [4, 8, 8]), ((6,), [6])]
)
def test_a_smaller_last_block(segments, sizes):
    space = space_of(*segments)
    relaxation = relaxation_of(space)
    blocks = SiteBlocks(relaxation, plain_site(space))
    assert blocks.sizes == sizes
    assert relaxation.sizes == sorted(set(sizes))
    soft = relaxation.soft(1.0)
    taken = dict.fromkeys(relaxation.sizes, 0)
    for matrix, size in zip(matrices(blocks.flat(soft), blocks.sizes), sizes, strict=True):
        assert torch.equal(matrix, soft[relaxation.sizes.index(size)][taken[size]])
        taken[size] += 1
