"""The sinkhorn kernels under Triton's interpreter, against the float64 reference."""

import pytest
import torch
from torch import Tensor

from permtriton.kernels import autotune
from permtriton.kernels.sinkhorn import (
    BACKWARD_CONFIGS,
    CONFIGS,
    sinkhorn_backward_reference,
    sinkhorn_backward_triton,
    sinkhorn_reference,
    sinkhorn_triton,
    supports,
)

from ..kernel_inputs import logits_of


def check_forward(logits: Tensor, tau: float, rounds: int, tolerance: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    found, expected = sinkhorn_triton(logits, tau, rounds), sinkhorn_reference(logits.double(), tau, rounds)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert ours.shape == theirs.shape
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.double(), theirs, atol=1e-7, rtol=tolerance)
    return found


def check_backward(logits: Tensor, tau: float, rounds: int, grad: Tensor | None = None, slack: float = 1.0) -> None:
    if grad is None:
        grad = torch.randn(logits.shape)
    _, rows, columns = sinkhorn_reference(logits.double(), tau, rounds)
    expected = sinkhorn_backward_reference(grad.double(), logits.double(), rows, columns, tau)
    found = sinkhorn_backward_triton(grad, logits, rows.float(), columns.float(), tau)
    assert found.dtype == logits.dtype
    assert found.is_contiguous()
    tolerance = slack * 2e-5
    limit = tolerance * float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected, atol=limit, rtol=tolerance)


@pytest.mark.parametrize(("size", "rounds"), [(1, 1), (7, 5), (33, 2)])
def test_forward_and_backward(size, rounds):
    logits = logits_of(size)
    check_forward(logits, 0.5, rounds)
    check_backward(logits, 0.5, rounds)


@pytest.mark.parametrize("size", [64, 100, 128])
def test_large_blocks(size):
    logits = logits_of(size, blocks=1)
    check_forward(logits, 1.0, 2)
    check_backward(logits, 1.0, 2)


def test_strided_logits_and_gradients():
    logits = logits_of(12, blocks=4)
    for strided in (logits.mT, logits[::2], torch.stack((logits, logits), 3)[..., 0]):
        assert not strided.is_contiguous()
        check_forward(strided, 0.7, 3)
        check_backward(strided, 0.7, 3, torch.randn(strided.shape).mT)
        check_backward(strided, 0.7, 3, torch.randn(12, 1).expand(strided.shape))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(("spread", "tau", "rounds"), [(1e4, 1.0, 1), (1e30, 1e-3, 5), (1.0, 1e-40, 5)])
def test_extreme_logits_stay_finite(spread, tau, rounds):
    logits = logits_of(8, spread=spread)
    soft, rows, columns = sinkhorn_triton(logits, tau, rounds)
    assert soft.isfinite().all()
    assert soft.min() >= 0
    assert soft.max() <= 1 + 1e-5
    assert sinkhorn_backward_triton(torch.randn(soft.shape), logits, rows, columns, tau).isfinite().all()


def test_the_gradient_stays_exact_where_scales_diverge():
    """Rows that share their only column drive its scale down and theirs up, by powers of their number."""
    logits = logits_of(32, blocks=1)
    logits[:, :24, 0] += 10
    check_backward(logits, 0.1, 20, slack=5)


def test_nan_is_not_lost():
    logits = logits_of(8)
    logits[1, 3, 2] = float("nan")
    found, expected = sinkhorn_triton(logits, 1.0, 2)[0], sinkhorn_reference(logits, 1.0, 2)[0]
    assert torch.equal(found.isnan(), expected.isnan())
    assert found[1].isnan().all()


@pytest.mark.parametrize("config", CONFIGS + BACKWARD_CONFIGS)
def test_every_configuration(config):
    """With blocks of several panels, the last one partly padded."""
    logits = logits_of(36, blocks=1)
    with autotune.forced({"sinkhorn": config, "sinkhorn_backward": config}):
        check_forward(logits, 0.5, 2)
        check_backward(logits, 0.5, 2)


@pytest.mark.parametrize("logits", [torch.zeros(1, 4, 4, dtype=torch.float64), torch.zeros(1, 129, 129)])
def test_what_the_kernels_do_not_take(logits):
    small = logits[:, :128, :128].float()
    assert (supports(logits, 1), supports(small, 0), supports(small, 1)) == (False, False, True)


def test_another_default_dtype_of_torch_changes_nothing():
    logits = logits_of(16)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        check_forward(logits, 0.5, 5)
    finally:
        torch.set_default_dtype(before)
