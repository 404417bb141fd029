import inspect
import re

import pytest
import torch
from torch import Tensor

from permtriton.kernels import sparse_linear_triton as kernels
from permtriton.kernels.launch import Config
from permtriton.kernels.packing import pack
from permtriton.kernels.sparse_linear import sparse_linear_reference
from permtriton.util.sparsity import NMPattern

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
@pytest.mark.parametrize("channels", [16, 208, 256])
def test_splits_along_the_channels(splits, channels, monkeypatch):
    """Splits that are empty, ragged or more than there are tiles; the same bits each time."""
    use(monkeypatch, Config({"TILE_O": 16, "TILE_C": 64, "SPLITS": splits}))
    weight, x, bias = sparse(20, channels // 4), torch.randn(5, channels), torch.randn(20)
    arguments = (x, *pack(weight, TWO_FOUR), bias, torch.randperm(channels), channels, TWO_FOUR)
    found = kernels.sparse_linear_triton(*arguments)
    assert_close(found, in_float64(x, weight, bias, arguments[4]))
    assert torch.equal(found, kernels.sparse_linear_triton(*arguments))


@pytest.mark.parametrize(
    ("tokens", "config"), [*((1, config) for config in kernels.VECTOR_CONFIGS), *((3, c) for c in kernels.CONFIGS)]
)
def test_every_configuration(tokens, config, monkeypatch):
    use(monkeypatch, config)
    for dtype in KERNEL_DTYPES if tokens == 1 else [torch.bfloat16]:
        weight, x = sparse(9, 516, dtype=dtype), torch.randn(tokens, 2064).to(dtype)
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


def test_the_byte_permutations_take_what_the_positions_say(monkeypatch):
    """The inline PTX, which is not interpreted, by hand on all words, on bytes that all differ; and its stand-in."""
    word = torch.arange(1 << 16)
    halves = torch.arange(32).view(16, 2) @ torch.tensor([1, 256])
    inputs = (halves.view(8, 2) @ torch.tensor([1, 1 << 16])).expand(word.shape[0], 8).unbind(1)
    registers = {f"${place}": value for place, value in enumerate((word, *inputs), 4)}

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    def prmt(low: Tensor, high: Tensor, selector: Tensor) -> Tensor:
        both = low | high << 32
        return sum(((both >> 8 * ((selector >> 4 * place) & 7)) & 255) << 8 * place for place in range(4))

    operations = {"and.b32": torch.bitwise_and, "shr.u32": torch.bitwise_right_shift, "prmt.b32": prmt}
    lines = re.findall(r"(and\.b32|shr\.u32|prmt\.b32) ([^;]+);", inspect.getsource(kernels._partners.fn))
    for operation, operands in lines:
        result, *arguments = operands.split(", ")
        registers[result] = operations[operation](*map(value, arguments))
    monkeypatch.setattr(kernels, "tl", torch)
    for group in range(4):
        first, second = (4 * group + ((word >> (4 * group + bit)) & 3) for bit in (0, 2))
        expected = halves[first] | halves[second] << 16
        assert torch.equal(registers[f"${group}"], expected)
        plain = kernels._two_of_four.fn(word >> 4 * group, *inputs[2 * group : 2 * group + 2])
        assert torch.equal(plain & 0xFFFFFFFF, expected)  # 32 bits in the kernel
    assert len(lines) == 13


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_one_token_from_odd_addresses(dtype):
    """Views that begin between two words of 32 bits."""
    weight, x = sparse(5, 24, dtype=dtype), torch.randn(97).to(dtype)[1:]
    values, positions = (
        torch.cat([part.flatten()[:1], part.flatten()])[1:].view(part.shape) for part in pack(weight, TWO_FOUR)
    )
    found = kernels.sparse_linear_triton(x, values, positions, None, None, 96, TWO_FOUR)
    assert_close(found, in_float64(x, weight, None, None))


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
def test_what_the_kernels_do_not_take(tokens, channels, kept, group, dtype):
    assert not kernels.takes(tokens, 4, channels, dtype, NMPattern(kept, group))
