import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from permtriton.kernels.norm_permute import NormVariant, norm_backward_reference, norm_permute, norm_reference

from .kernel_inputs import KERNEL_DTYPES, index_of, rng

EPS = 1e-3  # large enough to change the result
MODULES: dict[type[nn.Module], tuple[str, float]] = {
    LlamaRMSNorm: ("rms", 0.0),
    T5LayerNorm: ("rms", 0.0),
    Olmo2RMSNorm: ("rms_float", 0.0),
    HeliumRMSNorm: ("rms_float", 0.0),
    GemmaRMSNorm: ("rms_float", 1.0),
    nn.LayerNorm: ("layer", 0.0),
    NemotronLayerNorm1P: ("layer", 1.0),
}
CLOSE = {Gemma3nRMSNorm: ("rms_float", 0.0), CohereLayerNorm: ("layer", 0.0), nn.RMSNorm: ("rms_float", 0.0)}
VARIANTS = sorted({*MODULES.values(), ("rms", 1.0)})


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=torch.float64).to(dtype)


def norm_of(cls: type[nn.Module], channels: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    norm = cls(channels, eps=EPS)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 1.5)
    return norm.to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, offset: float, kind: str) -> Tensor:
    """The norm as its equation says, in float64."""
    x = x.double()
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() + offset)
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("cls", MODULES)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, (2, 3, 72)) for dtype in KERNEL_DTYPES),
        *((torch.bfloat16, shape) for shape in ((7,), (0, 5), (2, 129))),
    ],
)
def test_equals_the_module_bit_for_bit(cls, dtype, shape):
    """By the same operations in the same order, then a gather."""
    norm, x, index = norm_of(cls, shape[-1], dtype), random(*shape, dtype=dtype), index_of(shape[-1])
    kind, offset = MODULES[cls]
    y = norm_permute(x, norm.weight, norm._parameters.get("bias"), index, NormVariant(kind, EPS, offset))
    expected = norm(x)
    assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
    assert torch.equal(y, expected[..., index])


@pytest.mark.parametrize("cls", CLOSE)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_equals_modules_that_round_otherwise_within_two_roundings(cls, dtype):
    norm, x, index = norm_of(cls, 72, dtype), random(5, 72, dtype=dtype), index_of(72)
    kind, offset = CLOSE[cls]
    y = norm_permute(x, norm.weight, None, index, NormVariant(kind, EPS, offset))
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(y, norm(x)[..., index], rtol=2 * epsilon, atol=2 * epsilon)


@pytest.mark.parametrize(("kind", "offset"), VARIANTS)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_equals_the_equation_in_float64(kind, offset, dtype):
    x, weight, index = random(3, 5, 41, dtype=dtype), random(41, dtype=dtype, seed=1), index_of(41)
    bias = random(41, dtype=dtype, seed=2) if kind == "layer" else None
    y = norm_permute(x, weight, bias, index, NormVariant(kind, EPS, offset))
    epsilon = 4 * torch.finfo(dtype).eps
    expected = exact(x, weight, bias, offset, kind)[..., index]
    torch.testing.assert_close(y.double(), expected, rtol=epsilon, atol=epsilon)


@pytest.mark.parametrize(("kind", "offset"), VARIANTS)
def test_strided_input_and_small_index(kind, offset):
    x, weight, index = random(6, 4, 20).transpose(0, 1), random(40, seed=1)[::2], index_of(20)
    expected = norm_permute(x.contiguous(), weight.contiguous(), None, index, NormVariant(kind, EPS, offset))
    for small in (index.byte(), index.short()):
        torch.testing.assert_close(norm_permute(x, weight, None, small, NormVariant(kind, EPS, offset)), expected)


def test_a_float32_weight_promotes_as_in_the_module():
    norm, x, index = norm_of(LlamaRMSNorm, 16), random(3, 16, dtype=torch.bfloat16), index_of(16)
    y = norm_permute(x, norm.weight, None, index, NormVariant("rms", EPS))
    assert y.dtype == torch.float32
    assert torch.equal(y, norm(x)[:, index])
    norm = norm_of(GemmaRMSNorm, 16)
    assert torch.equal(norm_permute(x, norm.weight, None, index, NormVariant("rms_float", EPS, 1.0)), norm(x)[:, index])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float32_stream_takes_the_dtype_of_the_weight_as_in_t5(dtype):
    norm, x, index = norm_of(T5LayerNorm, 16, dtype), random(3, 16, dtype=torch.float32), index_of(16)
    y = norm_permute(x, norm.weight, None, index, NormVariant("rms", EPS))
    assert y.dtype == dtype
    assert torch.equal(y, norm(x)[:, index])
    assert (
        norm_permute(x.to("meta"), norm.weight.to("meta"), None, index.to("meta"), NormVariant("rms", EPS)).dtype
        == dtype
    )


@pytest.mark.parametrize(("kind", "offset"), VARIANTS)
def test_backward_equals_autograd_in_float64(kind, offset):
    """The formula of the backward pass, with nothing rounded to float32."""
    leaves = [random(3, 4, 11, dtype=torch.float64).requires_grad_()]
    leaves += [random(11, dtype=torch.float64, seed=s).requires_grad_() for s in (1, 2)[: 1 + (kind == "layer")]]
    x, weight, bias = (*leaves, None)[:3]
    grad = random(3, 4, 11, dtype=torch.float64, seed=3)
    y = norm_reference(x, weight, bias, NormVariant(kind, EPS, offset), precision=torch.float64)
    torch.testing.assert_close(y, exact(x, weight, bias, offset, kind))
    expected = torch.autograd.grad(y, leaves, grad)
    with torch.no_grad():
        found = norm_backward_reference(grad, x, weight, bias, NormVariant(kind, EPS, offset), torch.float64)
    torch.testing.assert_close(found[: len(leaves)], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kind", "offset"), VARIANTS)
def test_gradients_of_a_float32_norm_under_autocast(kind, offset):
    """The input has another dtype than weight and bias; each gradient has the dtype of its tensor."""
    x, weight = random(3, 11, dtype=torch.bfloat16), random(11, seed=1)
    bias, grad = random(11, seed=2) if kind == "layer" else None, random(3, 11, dtype=torch.bfloat16, seed=3)
    found = norm_backward_reference(grad, x, weight, bias, NormVariant(kind, EPS, offset))
    assert [None if each is None else each.dtype for each in found] == [
        x.dtype,
        weight.dtype,
        None if bias is None else bias.dtype,
    ]
    doubles = [None if each is None else each.double() for each in (grad, x, weight, bias)]
    expected = norm_backward_reference(*doubles, NormVariant(kind, EPS, offset), torch.float64)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "offset"), VARIANTS)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_gradients_equal_float64(kind, offset, dtype):
    leaves = [random(2, 6, 33, dtype=dtype).requires_grad_(), random(33, dtype=dtype, seed=1).requires_grad_()]
    if kind == "layer":
        leaves.append(random(33, dtype=dtype, seed=2).requires_grad_())
    index, grad = index_of(33), random(2, 6, 33, dtype=dtype, seed=3)
    found = torch.autograd.grad(norm_permute(*(*leaves, None)[:3], index, NormVariant(kind, EPS, offset)), leaves, grad)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y = exact(*(*doubles, None)[:3], offset, kind)[..., index]
    expected = torch.autograd.grad(y, doubles, grad.double())
    epsilon = 32 * torch.finfo(dtype).eps
    for a, b, leaf in zip(found, expected, leaves, strict=True):
        assert a.dtype == leaf.dtype
        torch.testing.assert_close(a.double(), b, rtol=epsilon, atol=epsilon)


@pytest.mark.parametrize(("kind", "offset"), [("rms", 0.0), ("layer", 1.0)])
@pytest.mark.slow
def test_compiles_without_a_break(kind, offset):
    weight, index = random(8, seed=1), index_of(8)
    leaves = [random(3, 8).requires_grad_() for _ in range(2)]

    def run(x: Tensor) -> Tensor:
        return norm_permute(x * 2, weight, None, index, NormVariant(kind, EPS, offset)).cos()

    results = [torch.compile(run, fullgraph=True, backend="aot_eager")(leaves[0]), run(leaves[1])]
    for result in results:
        result.square().sum().backward()
    assert torch.equal(*results)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"index": index_of(7)}, r"index torch.int64 \[7\]"),
        ({"weight": torch.ones(7)}, r"\[7\].* for \[2, 8\]"),
        ({"bias": torch.ones(7), "variant": NormVariant("layer", EPS)}, r"\[7\].* for \[2, 8\]"),
        ({"bias": torch.ones(8)}, "kind rms"),
        ({"variant": NormVariant("batch", EPS)}, "kind batch"),
    ],
)
def test_what_does_not_fit_is_refused(changed, named):
    arguments = {"x": torch.ones(2, 8), "weight": torch.ones(8), "bias": None, "index": index_of(8)}
    with pytest.raises(AssertionError, match=named):
        norm_permute(**{**arguments, "variant": NormVariant("rms", EPS), **changed})
