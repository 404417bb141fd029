import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from permtriton.kernels import autotune
from permtriton.kernels import quantize as kernels
from permtriton.kernels.launch import tl
from permtriton.kernels.quantize import CONFIGS, FLOAT8, quantize_tokens, quantize_triton

from ..kernel_inputs import KERNEL_DTYPES, VIEWS


@pytest.fixture(autouse=True)
def _rounded(monkeypatch):
    """The interpreter rounds as a GPU does: its own cast to float8 loses carries, that to bfloat16 cuts off."""
    own, torch_dtypes = interpreter._convert_float, {tl.float8e4nv: FLOAT8, tl.bfloat16: torch.bfloat16}

    def convert(values, from_type, to_type, mode):
        if from_type != tl.float32 or to_type not in torch_dtypes:
            return own(values, from_type, to_type, mode)
        result = torch.from_numpy(np.array(values, np.float32)).to(torch_dtypes[to_type])
        return result.view(torch.uint8 if to_type == tl.float8e4nv else torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def check(found, expected_values):
    """Bit for bit the reference of the same values, but that 1 / scale multiplies; -0.0 counts as 0.0."""
    (q, scale), (expected_q, expected_scale) = found, quantize_tokens(expected_values)
    assert (q.dtype, q.shape, q.is_contiguous()) == (FLOAT8, expected_q.shape, True)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(q.float(), (expected_values.float() * (1 / scale)).to(FLOAT8).float())
    assert (q.float() != expected_q.float()).float().mean() < 0.01


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("view", [lambda x: x, *VIEWS])
def test_rows_of_any_strides(view, dtype):
    x = view(torch.randn(6, 20).mul(20).to(dtype))
    index = torch.randperm(x.shape[-1])
    check(quantize_triton(x, None), x)
    check(quantize_triton(x, index.short()), x[..., index])


@pytest.mark.parametrize("channels", [1, 33, 48, 100])
@pytest.mark.parametrize("config", CONFIGS)
def test_any_size_in_every_configuration(channels, config):
    x = torch.randn(5, channels) * torch.logspace(-6, 6, 5).unsqueeze(1)
    x[1] = 0.0
    index = torch.randperm(channels)
    with autotune.forced({"quantize": config}):
        check(quantize_triton(x, None), x)
        check(quantize_triton(x, index), x[:, index])


@pytest.mark.parametrize("channels", [40, 64])
def test_long_rows(channels, monkeypatch):
    """Rows that do not fit into registers are read twice; their channels are gathered first."""
    x, index = torch.randn(3, 2 * channels)[:, :channels], torch.randperm(channels)
    monkeypatch.setattr(kernels, "LONGEST", 16)
    monkeypatch.setattr(kernels, "LONG_TILE", 16)
    check(quantize_triton(x, None), x)
    check(quantize_triton(x, index), x[:, index])


def test_the_comparison_can_fail():
    x = torch.randn(4, 24)
    with pytest.raises(AssertionError):
        check(quantize_triton(x, torch.randperm(24)), x)
    with pytest.raises(AssertionError):
        check(quantize_triton(x * 1.001, None), x)
