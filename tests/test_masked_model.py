"""The masks that learning puts on a model: their orders, their gradients, and what they cost the host."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from permtriton.methods.order.masked_model import LearnedMasks, masked_model
from permtriton.methods.order.relaxation import SiteBlocks
from permtriton.methods.recipe_config import CompileConfig
from permtriton.passes.plan import ChannelSpace, Site, linear_module
from permtriton.util.permutation import identity

from .learning import CPU, PATTERN, QUICK, Problem, tiny

CONFIG = CompileConfig(sparsity=PATTERN)


@pytest.mark.parametrize(
    ("block_size", "layout", "layers"), [(8, "portable", "last:1"), (12, "fused", "all"), (16, "portable", "all")]
)
@pytest.mark.slow
def test_every_linear_gets_the_order_of_its_site(block_size, layout, layers):
    """Including tied channels, blocks of two sizes, and layers that do not learn."""
    given = Problem(tiny(), layout=layout)
    options = replace(QUICK, block_size=block_size, layers=layers, init="random")
    relaxation = options.relaxation(options.spaces(given.plan), 0, CPU)
    soft = relaxation.soft(0.5)
    indices = relaxation.by_space(relaxation.assign(soft))
    with masked_model(given.run(), relaxation) as masks:
        masks.set(relaxation.assign(soft), None)
        for site, name in given.plan.linears():
            found = linear_module(given.model, name).parametrizations.weight[0].index
            unmoved = identity(site.channels)
            learns = site.space.name in indices
            assert torch.equal(found, site.expand(indices[site.space.name]) if learns else unmoved), name
            assert learns != torch.equal(found, unmoved), name


class Weight:
    """Stands for a masked weight that is not kept."""

    def set(self, index: Tensor, soft: Tensor, keep: bool, curved: float) -> None:
        self.soft = soft

    def take_gradient(self) -> None:
        return None


def two_masks(soft: Tensor) -> tuple[LearnedMasks, list[Tensor]]:
    """The masks of two sites that share a block of 4 channels, and the leaves that their weights see."""
    space = ChannelSpace("space", (4,), ())
    relaxation = replace(QUICK, block_size=4).relaxation([space], 0, CPU)
    weights = [Weight(), Weight()]
    sites = [Site(name, (), 4, torch.arange(4), space) for name in ("one", "other")]
    masks = LearnedMasks(
        None, [(SiteBlocks(relaxation, site), [weight]) for site, weight in zip(sites, weights, strict=True)]
    )
    masks.set(torch.arange(4), [soft])
    return masks, [weight.soft for weight in weights]


def test_float16_gradients_do_not_vanish():
    """A mean over many tokens leaves gradients that float16 rounds to zero unless the loss is scaled up."""
    soft = torch.ones(1, 4, 4, requires_grad=True)
    masks, leaves = two_masks(soft * 1)
    (leaves[0].half() * torch.tensor(1e-9 * 2.0**20, dtype=torch.float16)).sum().backward()
    assert float(masks.backward(2.0**20)) == pytest.approx(1e-9, rel=1e-2)
    assert soft.grad is not None
    torch.testing.assert_close(soft.grad, torch.full((1, 4, 4), 1e-9), rtol=1e-2, atol=0)


def test_gradients_of_two_sites_add_up():
    soft = torch.ones(1, 4, 4, requires_grad=True)
    masks, leaves = two_masks(soft * 1)
    ((leaves[0] * 3).sum() + (leaves[1] * torch.arange(16.0)).sum()).backward()
    masks.backward(4.0)
    torch.testing.assert_close(soft.grad, (3 + torch.arange(16.0)).view(1, 4, 4) / 4)


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_seen(broken, value):
    """Whichever site it belongs to."""
    masks, leaves = two_masks(torch.ones(1, 4, 4, requires_grad=True) * 1)
    for leaf in leaves:
        leaf.sum().backward()
    leaves[broken].grad[5] = value
    assert not math.isfinite(masks.backward(1.0))
