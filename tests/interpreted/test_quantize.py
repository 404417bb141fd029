import numpy as np
import pytest
import torch
from torch.nn.functional import silu
from triton.runtime import interpreter

from permtriton.kernels import autotune
from permtriton.kernels import norm_permute as norms
from permtriton.kernels import quantize as kernels
from permtriton.kernels.launch import tl
from permtriton.kernels.norm_permute import KINDS, NormVariant, norm_permute, norm_quantize_triton
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
    x, up = (view(torch.randn(6, 20).mul(20).to(dtype)) for _ in range(2))
    index = torch.randperm(x.shape[-1])
    check(quantize_triton(x), x)
    check(quantize_triton(x, index.short()), x[..., index])
    (q, scale), expected = quantize_triton(x, up=up), silu(x) * up
    torch.testing.assert_close(scale, quantize_tokens(expected)[1], rtol=torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(q.float() * scale, expected.float(), rtol=2**-4 + 2**-7, atol=scale.max().item() / 512)


@pytest.mark.parametrize("channels", [1, 33, 48, 100])
@pytest.mark.parametrize("config", CONFIGS)
def test_any_size_in_every_configuration(channels, config):
    x = torch.randn(5, channels) * torch.logspace(-6, 6, 5).unsqueeze(1)
    x[1] = 0.0
    index = torch.randperm(channels)
    with autotune.forced({"quantize": config}):
        check(quantize_triton(x), x)
        check(quantize_triton(x, index), x[:, index])


@pytest.mark.parametrize("channels", [40, 64])
def test_long_rows(channels, monkeypatch):
    """Rows that do not fit into registers are read twice; their channels are gathered first."""
    x, index = torch.randn(3, 2 * channels)[:, :channels], torch.randperm(channels)
    short = quantize_triton(x, up=x.flip(0))
    monkeypatch.setattr(kernels, "LONGEST", 16)
    monkeypatch.setattr(kernels, "LONG_TILE", 16)
    check(quantize_triton(x), x)
    check(quantize_triton(x, index), x[:, index])
    long = quantize_triton(x, up=x.flip(0))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(short, long, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((5, 48), torch.float16), ((1, 33), torch.float32), ((2, 3, 64), torch.float32)]
)
def test_after_a_norm(kind, shape, dtype, monkeypatch):
    """The norm rounds first: what is quantized is the same kernel's norm."""
    channels = shape[-1]
    x, weight = torch.randn(shape).to(dtype), torch.rand(channels).add(0.5).to(dtype)
    bias = torch.randn(channels).to(dtype) if kind == "layer" else None
    arguments = (x, weight, bias, torch.randperm(channels), NormVariant(kind, 1e-3, 1.0))
    for longest in (kernels.LONGEST, 16):
        monkeypatch.setattr(kernels, "LONGEST", longest)
        check(norm_quantize_triton(*arguments), norms.norm_permute_triton(*arguments))
    assert torch.allclose(norm_quantize_triton(*arguments)[1], quantize_tokens(norm_permute(*arguments))[1], rtol=4e-3)


def test_a_wide_stream_is_rounded_to_the_dtype_of_a_narrow_weight_first():
    x, weight, index = torch.randn(4, 24), torch.rand(24).half(), torch.randperm(24)
    arguments = (x, weight, None, index, NormVariant("rms", 1e-3))
    check(norm_quantize_triton(*arguments), norms.norm_permute_triton(*arguments))


def test_the_comparison_can_fail():
    x = torch.randn(4, 24)
    with pytest.raises(AssertionError):
        check(quantize_triton(x, torch.randperm(24)), x)
    with pytest.raises(AssertionError):
        check(quantize_triton(x * 1.001), x)
