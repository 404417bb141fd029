import pytest
import torch
from torch import Tensor

from permtriton.kernels.sinkhorn import sinkhorn

from .kernel_inputs import logits_of

SIZES = [1, 2, 4, 7, 32, 33, 64]


def weights_of(like: Tensor) -> Tensor:
    """Fixed weights of the entries, so that the gradient has no symmetry that could hide errors."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)


def dense(logits: Tensor, tau: float, rounds: int) -> Tensor:
    """Equations 2-5 one matrix at a time, in float64, for autograd."""
    matrices = (logits.double() / tau).exp()
    if rounds == 0:
        return matrices / matrices.sum(2, keepdim=True)
    for _ in range(rounds):
        matrices = matrices / matrices.sum(2, keepdim=True)
        matrices = matrices / matrices.sum(1, keepdim=True)
    return matrices


def gradient(function, logits: Tensor, tau: float, rounds: int) -> Tensor:
    leaf = logits.clone().requires_grad_()
    result = function(leaf, tau, rounds)
    (result * weights_of(result).to(result.dtype)).sum().backward()
    return leaf.grad


@pytest.mark.parametrize("size", SIZES)
def test_columns_sum_to_one_after_the_last_round(size):
    soft = sinkhorn(logits_of(size, spread=3.0), 0.5, 2)
    assert soft.min() >= 0
    torch.testing.assert_close(soft.sum(1), torch.ones(3, size), atol=3e-6, rtol=0)


@pytest.mark.parametrize("size", SIZES)
def test_many_rounds_are_doubly_stochastic(size):
    soft = sinkhorn(logits_of(size), 1.0, 40)
    torch.testing.assert_close(soft.sum(1), torch.ones(3, size), atol=1e-5, rtol=0)
    torch.testing.assert_close(soft.sum(2), torch.ones(3, size), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
@pytest.mark.parametrize("size", [1, 4, 7, 32])
@pytest.mark.parametrize("tau", [1.0, 0.2])
def test_forward_and_gradient_agree_with_dense_float64(size, rounds, tau):
    logits = logits_of(size, dtype=torch.float64)
    torch.testing.assert_close(sinkhorn(logits, tau, rounds), dense(logits, tau, rounds), atol=1e-12, rtol=1e-10)
    expected = gradient(dense, logits, tau, rounds)
    torch.testing.assert_close(gradient(sinkhorn, logits, tau, rounds), expected, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("size", [4, 33, 64])
def test_low_precision_logits(size, dtype, tolerance):
    """Computed in float32 whatever the logits' dtype, the gradient returned in theirs."""
    logits = logits_of(size, dtype=dtype)
    soft = sinkhorn(logits, 0.5, 5)
    assert soft.dtype == torch.float32
    torch.testing.assert_close(soft.double(), dense(logits, 0.5, 5), atol=2e-6, rtol=1e-4)
    found, expected = gradient(sinkhorn, logits, 0.5, 5), gradient(dense, logits.double(), 0.5, 5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance * expected.abs().max().item(), rtol=tolerance)


def test_strided_logits_and_gradients():
    logits, tau = logits_of(12), 0.7
    strided = torch.stack((logits, logits), 3)[..., 0].mT.contiguous().mT
    assert not strided.is_contiguous()
    torch.testing.assert_close(sinkhorn(strided, tau, 3), sinkhorn(logits, tau, 3))
    torch.testing.assert_close(gradient(sinkhorn, strided, tau, 3), gradient(sinkhorn, logits, tau, 3))
    leaf = logits.clone().requires_grad_()
    sinkhorn(leaf, tau, 0)[:, :, 0].mT.sum().backward()
    dense_leaf = logits.double().requires_grad_()
    dense(dense_leaf, tau, 0)[:, :, 0].sum().backward()
    torch.testing.assert_close(leaf.grad.double(), dense_leaf.grad, atol=1e-6, rtol=1e-5)


def test_blocks_do_not_mix():
    logits = logits_of(8, blocks=5)
    alone = torch.cat([sinkhorn(block.unsqueeze(0), 0.5, 5) for block in logits])
    torch.testing.assert_close(sinkhorn(logits, 0.5, 5), alone)
    assert sinkhorn(logits[:0], 0.5, 5).shape == (0, 8, 8)


@pytest.mark.parametrize("rounds", [0, 1, 5])
@pytest.mark.parametrize(("spread", "tau"), [(1.0, 1e-4), (30.0, 0.1), (1e4, 1.0), (1e30, 1e-3)])
def test_extreme_logits_stay_finite(spread, tau, rounds):
    logits = logits_of(32, spread=spread)
    soft = sinkhorn(logits, tau, rounds)
    assert soft.isfinite().all()
    assert soft.min() >= 0
    assert soft.max() <= 1 + 1e-5
    assert gradient(sinkhorn, logits, tau, rounds).isfinite().all()


@pytest.mark.parametrize(("tau", "rounds"), [(0.1, 20), (0.03, 10)])
def test_the_gradient_stays_exact_where_scales_diverge(tau, rounds):
    """Rows that share their only column drive its scale down and theirs up, by powers of their number."""
    logits = logits_of(32)
    logits[:, :24, 0] += 10
    expected = gradient(sinkhorn, logits.double(), tau, rounds)
    found = gradient(sinkhorn, logits, tau, rounds)
    torch.testing.assert_close(found.double(), expected, atol=1e-4 * expected.abs().max().item(), rtol=1e-3)


def test_towards_zero_temperature_it_is_the_permutation_of_a_clear_winner():
    index = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    matrix = torch.zeros(16, 16)
    matrix[index, torch.arange(16)] = 1
    logits = (matrix + 0.3 * logits_of(16, blocks=1).tanh())[0]
    torch.testing.assert_close(sinkhorn(logits.unsqueeze(0), 0.005, 5)[0], matrix, atol=1e-4, rtol=0)


def test_compiles_without_a_break():
    logits = logits_of(6)
    compiled = torch.compile(
        lambda x, tau, rounds: sinkhorn(x * 2, tau, rounds) + 1, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(logits, 0.5, 3), sinkhorn(logits * 2, 0.5, 3) + 1, atol=0, rtol=0)
    found = gradient(compiled, logits, 0.5, 3)
    torch.testing.assert_close(found, 2 * gradient(sinkhorn, logits * 2, 0.5, 3))
