import pytest
import torch
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels import sparse_linear_triton as kernels
from permtriton.kernels.launch import Config
from permtriton.kernels.packing import pack
from permtriton.kernels.sparse_linear import sparse_linear_reference
from permtriton.sparsity import NMPattern

from ..kernel_inputs import KERNEL_DTYPES, TWO_FOUR, poison, sparse


def in_float64(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor | None) -> Tensor:
    y = (x if index is None else x[..., index.long()]).double() @ weight.double().t()
    return y if bias is None else y + bias.double()


def assert_close(found: Tensor, expected: Tensor) -> None:
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=4 * eps, atol=4 * eps * expected.abs().max().item())


def use(monkeypatch, config: Config) -> None:
    monkeypatch.setattr(kernels, "config_for", lambda op, configs, shape, dtype: config)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
@pytest.mark.parametrize("extras", ["", "bias", "index", "bias index"])
def test_the_product_in_float64(dtype, tokens, extras, monkeypatch):
    """Ragged rows and channels, in outputs poisoned with NaN."""
    tokens = min(tokens, 16) if dtype == torch.float32 else tokens
    weight = sparse(37, 68, dtype=dtype)
    x, bias = torch.randn(tokens, 272).to(dtype), torch.randn(37).to(dtype) if "bias" in extras else None
    index = torch.randperm(272).short() if "index" in extras else None
    packed = pack(weight, TWO_FOUR)
    poison(monkeypatch)
    found = kernels.sparse_linear_triton(x, *packed, bias, index, 272, TWO_FOUR)
    assert found.dtype == dtype
    assert_close(found, in_float64(x, weight, bias, index))


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("channels", [16, 208, 256])
def test_splits_along_the_channels(splits, tokens, channels, monkeypatch):
    """Splits that are empty, ragged or more than there are tiles; the same bits each time."""
    use(monkeypatch, Config({"TILE_O": 16, "TILE_C": 64, "SPLITS": splits}))
    weight, x, bias = sparse(20, channels // 4), torch.randn(tokens, channels), torch.randn(20)
    arguments = (x, *pack(weight, TWO_FOUR), bias, torch.randperm(channels), channels, TWO_FOUR)
    found = kernels.sparse_linear_triton(*arguments)
    assert_close(found, in_float64(x, weight, bias, arguments[4]))
    assert torch.equal(found, kernels.sparse_linear_triton(*arguments))


@pytest.mark.parametrize(
    ("tokens", "config"), [*((1, config) for config in kernels.VECTOR_CONFIGS), *((3, c) for c in kernels.CONFIGS)]
)
def test_every_configuration(tokens, config, monkeypatch):
    use(monkeypatch, config)
    weight, x = sparse(9, 516, dtype=torch.bfloat16), torch.randn(tokens, 2064).bfloat16()
    found = kernels.sparse_linear_triton(x, *pack(weight, TWO_FOUR), None, None, 2064, TWO_FOUR)
    assert_close(found, in_float64(x, weight, None, None))


def test_every_pair_of_positions():
    """One group per row, all six position pairs in all four places of a word: each weight meets its own channel."""
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    weight = torch.zeros(24, 16)
    for place in range(4):
        for number, (i, j) in enumerate(pairs):
            weight[place * 6 + number, [place * 4 + i, place * 4 + j]] = torch.tensor([1.0, 100.0])
    x = torch.arange(1, 17).float()
    packed = pack(weight, TWO_FOUR)
    for tokens in (1, 2):
        found = kernels.sparse_linear_triton(x.expand(tokens, 16), *packed, None, None, 16, TWO_FOUR)
        assert torch.equal(found, (weight @ x).expand(tokens, 24))


@pytest.mark.parametrize("index_dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [1, 3])
def test_index_dtypes_and_strided_inputs(index_dtype, tokens):
    weight, index = sparse(5, 56, dtype=torch.float32), torch.randperm(224).to(index_dtype)
    values, positions = pack(weight, TWO_FOUR)
    x = torch.randn(224, 2 * tokens).t()[::2].unsqueeze(1)
    strided = values.t().contiguous().t()
    found = kernels.sparse_linear_triton(x, strided, positions.t().contiguous().t(), None, index, 224, TWO_FOUR)
    assert found.shape == (tokens, 1, 5)
    assert_close(found, in_float64(x, weight, None, index))


def test_one_token_without_leading_dimensions():
    weight, x = sparse(5, 8, dtype=torch.float32), torch.randn(32)
    found = kernels.sparse_linear_triton(x, *pack(weight, TWO_FOUR), None, None, 32, TWO_FOUR)
    assert found.shape == (5,)
    assert_close(found, in_float64(x, weight, None, None))
    reference = sparse_linear_reference(x, *pack(weight, TWO_FOUR), None, None, 32, TWO_FOUR)
    torch.testing.assert_close(found, reference)


@pytest.mark.parametrize(
    ("tokens", "channels", "kept", "group", "dtype"),
    [
        (65, 16, 2, 4, torch.float32),
        (0, 16, 2, 4, torch.float32),
        (1, 24, 2, 4, torch.float32),
        (1, 16, 4, 8, torch.float32),
        (1, 16, 2, 4, torch.float64),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(tokens, channels, kept, group, dtype):
    packed = pack(torch.zeros(4, channels, dtype=dtype), NMPattern(kept, group))
    x = torch.ones(tokens, channels, dtype=dtype)
    assert not kernels.supports(x, packed[0], channels, NMPattern(kept, group))
    with pytest.raises(ModelError, match="1 to 64 tokens"):
        kernels.sparse_linear_triton(x, *packed, None, None, channels, NMPattern(kept, group))
