"""The linear layer with a weight packed in FP8: its reference, and what it refuses."""

import pytest
import torch
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels.packing import pack
from permtriton.kernels.quantize import FLOAT8, quantize_tokens
from permtriton.kernels.sparse_linear_fp8 import sparse_linear_fp8, unpack_fp8
from permtriton.util.sparsity import NMPattern

from .kernel_inputs import TWO_FOUR, index_of, rng, sparse


def packed_fp8(rows: int, groups: int, pattern: NMPattern = TWO_FOUR) -> tuple[Tensor, Tensor, Tensor]:
    """Values, positions and scales of a weight that float8 holds exactly."""
    values, positions = pack(sparse(rows, groups, pattern).to(FLOAT8).float() + 0.0, pattern)
    return values.to(FLOAT8), positions, torch.rand(rows, generator=rng(7)) + 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pattern", [TWO_FOUR, NMPattern(4, 8)], ids=str)
def test_equals_the_product_of_the_rounded_factors_in_float64(dtype, pattern):
    packed, channels = packed_fp8(9, 8, pattern), 8 * pattern.group
    weight, index = unpack_fp8(*packed, channels, pattern).double(), index_of(channels)
    x, bias = torch.randn(2, 6, channels, generator=rng(5)).to(dtype), torch.randn(9, generator=rng(4)).to(dtype)
    for b, i in ((None, None), (bias, index.short())):
        ordered = x if i is None else x[..., index]
        scale = ordered.float().abs().amax(-1, keepdim=True) / 448
        rounded = (ordered.float() / scale).to(FLOAT8).double() * scale.double()
        expected = rounded @ weight.T + (0 if b is None else b.double())
        y = sparse_linear_fp8(x, *packed, b, i, channels, pattern)
        assert y.dtype == dtype
        tolerance = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def test_every_token_has_its_own_scale_and_zeros_stay_zeros():
    x = torch.randn(4, 32, generator=rng(1)) * torch.tensor([[1e-12], [1.0], [1e12], [0.0]])
    quantized, scale = quantize_tokens(x)
    back = quantized.float() * scale
    torch.testing.assert_close(back[:3].norm(dim=1) / x[:3].norm(dim=1), torch.ones(3), rtol=0.02, atol=0)
    assert not back[3].any()
    assert not (quantized.view(torch.uint8) == 0x80).any()
    assert quantize_tokens(torch.full((1, 8), 65504.0, dtype=torch.float16))[0].float().eq(448).all()


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("x", torch.ones(2, 15), r"\[2, 15\].*expected \[\.\.\., 16\]"),
        ("values", torch.ones(4, 8), "packed values of torch.float32"),
        ("positions", torch.zeros(4, 3, dtype=torch.uint8), "packed values of"),
        ("scale", torch.ones(3), r"\[3\]: expected torch.float32 \[4\]"),
        ("scale", torch.ones(4).bfloat16(), "scale of torch.bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(name, tensor, named):
    values, positions, scale = packed_fp8(4, 4)
    arguments = {"x": torch.ones(2, 16), "values": values, "positions": positions, "scale": scale}
    with pytest.raises(ModelError, match=named):
        sparse_linear_fp8(**{**arguments, name: tensor}, bias=None, index=None, in_features=16, pattern=TWO_FOUR)


@pytest.mark.slow
def test_compiles_without_a_break():
    packed, index = packed_fp8(5, 3), index_of(12)

    def run(x: Tensor) -> Tensor:
        return sparse_linear_fp8(x * 2, *packed, None, index, 12, TWO_FOUR).cos()

    x = torch.randn(3, 12, generator=rng(2))
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))
