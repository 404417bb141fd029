import pytest
import torch

from permtriton.kernels import sparsegpt_block as kernels
from permtriton.kernels.sparsegpt_block import sparsegpt_block_reference, sparsegpt_block_triton
from permtriton.util.sparsity import NMPattern


def inputs(rows, channels):
    block, factor = torch.randn(channels, rows), torch.randn(channels, channels).triu() / channels
    factor.diagonal().abs_().add_(0.5)
    return block, factor


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", kernels.CONFIGS, ids=str)
@pytest.mark.parametrize(
    ("chooses", "rows", "channels", "kept", "group"), [(True, 5, 16, 4, 8), (True, 70, 8, 2, 4), (False, 5, 16, 1, 2)]
)
def test_the_pass_of_a_block(chooses, rows, channels, kept, group, config, monkeypatch):
    """No two scores are so close that rounding would choose; one of a group that is given may keep more or fewer."""
    monkeypatch.setattr(kernels, "config_for", lambda *_: config)
    block, factor = inputs(rows, channels)
    keep = None if chooses else torch.rand(channels, rows) < 0.5
    expected = sparsegpt_block_reference(block.double(), factor.double(), keep, NMPattern(kept, group))
    found = sparsegpt_block_triton(block, factor, keep, NMPattern(kept, group))
    close(found, expected)
    assert torch.equal(found[0] != 0, expected[0] != 0)


@pytest.mark.parametrize("chooses", [True, False])
def test_channels_that_are_no_power_of_two(chooses):
    block, factor = inputs(7, 12)
    keep = None if chooses else torch.rand(12, 7) < 0.5
    expected = sparsegpt_block_reference(block.double(), factor.double(), keep, NMPattern(2, 4))
    close(sparsegpt_block_triton(block, factor, keep, NMPattern(2, 4)), expected)


def test_ties_keep_the_lower_channel():
    found, _ = sparsegpt_block_triton(torch.ones(8, 3), torch.eye(8), None, NMPattern(2, 4))
    assert torch.equal(found, torch.tensor([1.0, 1, 0, 0, 1, 1, 0, 0])[:, None].expand(8, 3))


def test_strided_parts():
    block, factor = torch.randn(20, 12)[2:18, ::2], inputs(6, 32)[1][3:19, 3:19]
    keep = (torch.rand(6, 16) < 0.5).t()
    expected = sparsegpt_block_reference(block.double(), factor.double(), keep, NMPattern(2, 4))
    close(sparsegpt_block_triton(block, factor, keep, NMPattern(2, 4)), expected)


def test_what_the_kernel_does_not_take():
    assert kernels.supports(torch.empty(128, 4), NMPattern(2, 4))
    assert not kernels.supports(torch.empty(144, 4), NMPattern(8, 16))
    assert not kernels.supports(torch.empty(128, 4).double(), NMPattern(2, 4))
