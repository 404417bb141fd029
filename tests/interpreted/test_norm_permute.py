import pytest
import torch
from torch import Tensor

from permtriton.kernels import autotune, quantize
from permtriton.kernels import norm_permute as kernels
from permtriton.kernels.norm_permute import (
    CONFIGS,
    KINDS,
    NormVariant,
    add_norm_permute,
    add_norm_permute_triton,
    norm_permute,
    norm_permute_triton,
    norm_reference,
    takes,
)  # fmt: skip

from ..kernel_inputs import KERNEL_DTYPES, VIEWS

EPS = 1e-3
RMS = NormVariant("rms", EPS)
VARIANTS = [NormVariant(kind, EPS, offset) for kind in KINDS for offset in (0.0, 1.0)]
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def inputs(rows: int, channels: int, dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    x = torch.randn(rows, channels).add(0.5).to(dtype)
    shift = torch.randn(channels).to(dtype) if bias else None
    return x, torch.rand(channels).add(0.5).to(dtype), shift, torch.randperm(channels)


def wide(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, variant: NormVariant) -> Tensor:
    shift = None if bias is None else bias.double()
    return norm_reference(x.double(), weight.double(), shift, variant, index.long(), torch.float64)


def check_forward(x, weight, bias, index, variant, config=None):
    with autotune.forced({"norm_permute": config} if config else {}):
        y = norm_permute_triton(x, weight, bias, index, variant)
    reference = norm_permute(x, weight, bias, index, variant)
    assert (y.dtype, y.shape, y.is_contiguous()) == (reference.dtype, x.shape, True)
    limit = max(ROUNDING[x.dtype], ROUNDING[y.dtype])
    torch.testing.assert_close(y.double(), wide(x, weight, bias, index, variant), rtol=limit, atol=limit)


@pytest.mark.parametrize(
    ("variant", "dtype", "bias"),
    [
        *((variant, dtype, False) for variant, dtype in zip(VARIANTS, 2 * KERNEL_DTYPES, strict=True)),
        (NormVariant("layer", EPS), torch.float32, True),
        (NormVariant("layer", EPS, 1.0), torch.float16, True),
    ],
)
def test_forward(variant, dtype, bias):
    for shape in ((5, 40), (1, 33), (3, 1)):
        arguments = inputs(*shape, dtype, bias)
        check_forward(*arguments, variant)


@pytest.mark.parametrize(("kind", "dtype"), [("rms", torch.float32), ("layer", torch.bfloat16)])
def test_rows_that_leave_no_registers_for_weight_and_index(kind, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "HELD", 16)
    check_forward(*inputs(5, 41, dtype, kind == "layer"), NormVariant(kind, EPS, 1.0))


def test_rows_that_do_not_fit_into_registers_are_left_to_the_reference():
    """Half as many channels fit if rows are not aligned."""
    longest = quantize.LONGEST
    for channels, stride, fits in ((longest, longest, True), (longest + 16, longest + 16, False),
                                   (longest - 1, longest, False), (longest, longest + 1, False)):  # fmt: skip
        x, weight = torch.empty(2, stride)[:, :channels], torch.empty(channels)
        assert takes(x, weight, None) == fits


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_every_configuration(kind):
    for config in CONFIGS:
        check_forward(*inputs(3, 20, torch.float32, False), NormVariant(kind, EPS), config)


@pytest.mark.parametrize("view", VIEWS)
def test_strided_input(view):
    x, weight, _, _ = inputs(6, 12, torch.float32, False)
    x = view(x)
    weight, index = weight.repeat(2)[::2][: x.shape[-1]], torch.randperm(x.shape[-1])
    check_forward(x, weight, None, index.byte(), RMS)


def test_mixed_types():
    """A float32 weight over bfloat16: "rms" promotes, the others give the dtype of x."""
    x, _, _, index = inputs(4, 24, torch.bfloat16, False)
    weight = torch.rand(24)
    for kind in ("rms", "rms_float"):
        check_forward(x, weight, None, index, NormVariant(kind, EPS))
    assert norm_permute_triton(x, weight, None, index, RMS).dtype == torch.float32
    stream, narrow = torch.randn(4, 24), torch.rand(24).half()  # T5 in float16
    check_forward(stream, narrow, None, index, RMS)
    assert norm_permute_triton(stream, narrow, None, index, RMS).dtype == torch.float16


def test_a_wide_stream_is_rounded_to_the_dtype_of_a_narrow_weight():
    """As T5 in float16 does: only the last bits of the sums may make a rare difference."""
    stream, narrow, index = torch.randn(64, 1024), torch.rand(1024).half() + 0.5, torch.randperm(1024)
    found = norm_permute_triton(stream, narrow, None, index, RMS)
    expected = norm_reference(stream, narrow, None, RMS, index)
    assert (found != expected).float().mean() < 0.01


def test_roundings_are_the_modules_own():
    """float16, bit for bit in nearly all places: the sum may differ in its last bit, no other step may.

    (The interpreter cuts bfloat16 off where a GPU rounds.)
    """
    for variant in VARIANTS[:4]:
        arguments = inputs(16, 64, torch.float16, False)
        y = norm_permute_triton(*arguments, variant)
        assert (y != norm_permute(*arguments, variant)).float().mean() < 0.01


@pytest.mark.parametrize(
    ("rows", "channels", "dtype"), [(5, 48, torch.float32), (3, 96, torch.bfloat16), (2, 16, torch.float16)]
)
def test_of_a_sum(rows, channels, dtype):
    """The sum is rounded before the norm, as torch does."""
    x, weight, _, index = inputs(rows, channels, dtype, False)
    residual = torch.randn(channels, rows).to(dtype).t()
    found = add_norm_permute_triton(x, residual, weight, index, EPS)
    expected = add_norm_permute(x, residual, weight, index, EPS)
    ulp = 2**-7 if dtype == torch.bfloat16 else 0.0  # which the interpreter rounds towards zero
    torch.testing.assert_close(found[1], x + residual, rtol=ulp, atol=0.0)
    assert torch.equal(expected[1], x + residual)
    torch.testing.assert_close(found[0], expected[0], rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    wider = torch.randn(rows, 2 * channels).to(dtype)
    found = add_norm_permute_triton(x, wider[:, channels:], weight, index, EPS)
    torch.testing.assert_close(found[1], x + wider[:, channels:], rtol=ulp, atol=0.0)
