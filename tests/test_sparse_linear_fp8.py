"""The linear layer with a weight packed in FP8: its reference, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from permtriton.errors import ModelError
from permtriton.kernels import autotune, launch, quantize, sparse_linear
from permtriton.kernels import sparse_linear_fp8 as file
from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.packing import pack
from permtriton.kernels.quantize import FLOAT8, quantize_tokens
from permtriton.kernels.sparse_linear_fp8 import DENSE, DEQUANTIZED, MMA, ROUTES, routed, sparse_linear_fp8, unpack_fp8
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


# -- which way it takes on a GPU: the launchers replaced, the rest as it is -------------------------------------------


class Kernel:
    """Stands in for a variant of the CUDA kernel."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def launch(self, x, values, positions, bias, scales):
        rows, tokens = scales
        weight = unpack_fp8(values, positions, rows, x.shape[-1], TWO_FOUR)
        product = linear(x.float() * tokens, weight)
        return (product if bias is None else product + bias).to(self.dtype)


@pytest.fixture
def routes(monkeypatch):
    """What was asked of the table, and the route to prefer; every call is decided anew."""
    asked = SimpleNamespace(tables=[], prefer=None, right=Kernel)

    def config_for(op, configs, shape, dtype):
        asked.tables.append([config.constants["ROUTE"] for config in configs])
        return next((config for config in configs if config.constants["ROUTE"] == asked.prefer), configs[0])

    monkeypatch.setattr(autotune, "_STATE", autotune._State(choices={}))
    monkeypatch.setattr(quantize, "has_kernels", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(mma, "limits_of", lambda device: mma.GpuLimits(132, has_wgmma=True))
    monkeypatch.setattr(mma, "chosen", lambda product, device: asked.right and asked.right(product.dtype))
    monkeypatch.setattr(sparse_linear, "config_for", config_for)
    monkeypatch.setattr(
        file, "quantize", lambda x, index: quantize_tokens(x if index is None else x[..., index.long()])
    )
    for cached in (file._multiplies_float8, launch.warn_once):
        cached.cache_clear()
    yield asked
    for cached in (file._multiplies_float8, launch.warn_once):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "tokens", "groups", "possible"),
    [
        (torch.bfloat16, 3, 128, [MMA, DENSE, DEQUANTIZED]),
        (torch.bfloat16, 256, 128, [MMA, DENSE, DEQUANTIZED]),
        (torch.bfloat16, 257, 128, [DENSE, DEQUANTIZED]),
        (torch.float16, 5, 64, [MMA, DEQUANTIZED]),
        (torch.float16, 300, 64, [DEQUANTIZED]),
        (torch.bfloat16, 0, 64, [DEQUANTIZED]),
    ],
)
def test_every_possible_route_gives_the_product(routes, dtype, tokens, groups, possible):
    packed, channels = packed_fp8(64, groups), 4 * groups
    x, bias = torch.randn(tokens, 1, channels, generator=rng(3)).to(dtype), torch.randn(64, generator=rng(2)).to(dtype)
    index = index_of(channels)
    expected = sparse_linear_fp8(x, *packed, bias, index, channels, TWO_FOUR)
    for routes.prefer in (None, *possible):
        y = routed(x, *packed, bias, index, channels, TWO_FOUR)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2 * channels**0.5)
        route = possible[0] if routes.prefer is None else routes.prefer
        assert autotune._STATE.choices[f"route {tokens}x64x{channels}"] == ROUTES[route]
    assert all(table == possible for table in routes.tables)


def test_a_kernel_that_is_not_right_leaves_the_choice_to_the_others(routes):
    packed, x = packed_fp8(64, 64), torch.randn(3, 256, generator=rng(1)).bfloat16()
    routes.right = None
    routed(x, *packed, None, None, 256, TWO_FOUR)
    assert autotune._STATE.choices["route 3x64x256"] == ROUTES[DENSE]


@pytest.mark.parametrize(
    ("dtype", "channels", "wgmma", "route"),
    [
        (torch.bfloat16, 96, True, DENSE),
        (torch.float32, 256, True, DEQUANTIZED),
        (torch.bfloat16, 40, True, DEQUANTIZED),
        (torch.bfloat16, 256, False, DENSE),
    ],
)
def test_where_the_kernel_cannot_run_a_warning_says_so(routes, monkeypatch, dtype, channels, wgmma, route):
    monkeypatch.setattr(mma, "limits_of", lambda device: mma.GpuLimits(132, has_wgmma=wgmma))
    packed = packed_fp8(64, channels // 4)
    with pytest.warns(UserWarning, match=f"unpacked for each product here .{ROUTES[route]}"):
        routed(torch.ones(2, channels, dtype=dtype), *packed, None, None, channels, TWO_FOUR)


def test_where_torch_multiplies_no_float8_it_is_dequantized(routes, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("torch._scaled_mm is only supported on other GPUs")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    routed(torch.ones(300, 64).bfloat16(), *packed_fp8(64, 16), None, None, 64, TWO_FOUR)
    assert autotune._STATE.choices["route 300x64x64"] == ROUTES[DEQUANTIZED]
