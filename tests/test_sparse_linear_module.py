"""`SparseLinear`: packed and compressed forms that change no bit, and everything that ``nn.Linear`` can do."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import parametrize

from permtriton import NMPattern
from permtriton.errors import ModelError
from permtriton.kernels import cusparselt
from permtriton.model.modules import ChannelGather, SparseLinear

from . import folders
from .kernel_inputs import TWO_FOUR, compressed, empty_packed, index_of, rng


def sparse_linear_of(seed: int = 0, gather: bool = True, dtype: torch.dtype = torch.float32) -> SparseLinear:
    torch.manual_seed(seed)
    made = SparseLinear.from_linear(nn.Linear(24, 10), index_of(24) if gather else None).to(dtype)
    folders.prune_weight(made.weight)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gather", [False, True])
def test_packing_changes_no_bit(dtype, gather):
    layer, x = sparse_linear_of(0, gather, dtype), torch.randn(2, 5, 24).to(dtype)
    weight, expected = layer.weight.detach().clone(), layer(x)
    ordered = x[..., index_of(24)] if gather else x
    assert torch.equal(expected, linear(ordered, weight, layer.bias))
    assert layer.pack(TWO_FOUR) is layer
    assert (layer.weight.numel(), layer.weight.dtype, list(layer.parameters())) == (0, dtype, [layer.bias])
    assert set(layer.state_dict()) - {"gather.index"} == {"bias", "weight_values", "weight_positions"}
    assert sum(layer.state_dict()[k].nbytes for k in ("weight_values", "weight_positions")) < weight.nbytes
    assert torch.equal(layer(x), expected)
    layer.unpack()
    assert torch.equal(layer.weight, weight)
    assert set(layer.state_dict()) - {"gather.index"} == {"bias", "weight"}
    assert torch.equal(layer.unpack()(x), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_a_sparse_linear_survives_copies_state_dicts_and_moves(packed):
    layer, other, x = sparse_linear_of(0), sparse_linear_of(1), torch.randn(5, 24)
    if packed:
        layer.pack(TWO_FOUR)
        empty_packed(other, TWO_FOUR)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), expected)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert half.gather.index.dtype == torch.uint8
    if packed:
        assert half.weight_positions.dtype == torch.uint8
        assert torch.equal(half.weight_positions, layer.weight_positions)
        assert torch.equal(half.unpack().weight, layer.unpack().weight.bfloat16())
    assert layer.to("meta")(x.to("meta")).shape == (5, 10)


def test_an_empty_packed_layer_can_be_made_on_the_meta_device_and_filled():
    source = sparse_linear_of(0).pack(TWO_FOUR)
    with torch.device("meta"):
        gather = ChannelGather(torch.empty(24, dtype=torch.uint8))
        layer = empty_packed(SparseLinear(24, 10, gather=gather), TWO_FOUR)
    layer.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(5, 24)
    assert torch.equal(layer(x), source(x))


@pytest.fixture
def cusparselt_stand_in(monkeypatch):
    monkeypatch.setattr(cusparselt, "supports", lambda dtype, *_: dtype == torch.bfloat16)
    monkeypatch.setattr(cusparselt, "compress", compressed)
    return compressed


def compressed_of(seed: int) -> SparseLinear:
    layer = SparseLinear(32, 16, dtype=torch.bfloat16)
    weight = torch.randn(16, 32, generator=rng(seed))
    folders.prune_weight(weight)
    layer.weight.data = weight.bfloat16()
    return layer.pack(TWO_FOUR).compress()


def test_the_compressed_form_shares_the_values(cusparselt_stand_in):
    layer, x = compressed_of(0), torch.randn(3, 32).bfloat16()
    weight, expected = copy.deepcopy(layer).unpack().weight, layer(x)
    storage = layer.weight_values.untyped_storage()
    assert storage.data_ptr() == layer.weight_compressed.untyped_storage().data_ptr()
    assert storage.nbytes() + layer.weight_positions.nbytes == weight.nbytes * 10 // 16
    assert set(layer.state_dict()) == {"bias", "weight_values", "weight_positions"}
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.unpack().weight, weight)
    assert not hasattr(layer, "weight_compressed")


def test_values_in_another_order_are_kept_beside_it(cusparselt_stand_in, monkeypatch):
    monkeypatch.setattr(cusparselt, "compress", lambda weight: cusparselt_stand_in(weight.flip(0)))
    layer = compressed_of(0)
    assert layer.weight_values.data_ptr() != layer.weight_compressed.data_ptr()
    assert torch.equal(layer.unpack().weight, compressed_of(0).unpack().weight)


@pytest.mark.parametrize("change", ["load", "assign", "float and back", "copy"])
def test_the_compressed_form_is_that_of_the_weight_after_every_change(change, cusparselt_stand_in):
    layer, other = compressed_of(0), compressed_of(1)
    if change == "float and back":
        layer.float()
        assert layer.weight_compressed is None
        assert layer.weight_values.dtype == torch.float32
        layer.bfloat16()
    elif change == "copy":
        layer = copy.deepcopy(layer).to("cpu")
    else:
        layer.load_state_dict(other.state_dict(), assign=change == "assign")
    expected = cusparselt_stand_in(copy.deepcopy(layer).unpack().weight.detach())
    assert torch.equal(layer.weight_compressed, expected)
    assert torch.equal(layer.weight_values, (other if change in ("load", "assign") else compressed_of(0)).weight_values)


def test_a_move_that_changes_nothing_compresses_nothing(cusparselt_stand_in, monkeypatch):
    layer = compressed_of(0)
    form = layer.weight_compressed
    monkeypatch.setattr(cusparselt, "compress", lambda weight: pytest.fail("compressed again"))
    assert layer.to("cpu").bfloat16().weight_compressed is form


def test_under_autocast_it_takes_what_a_linear_takes():
    layer, x = compressed_of(0), torch.randn(3, 32)
    dense = copy.deepcopy(layer).unpack()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), dense(x))
    with pytest.raises(ModelError, match=r"float32 input"):
        layer(x)


def test_a_float32_weight_takes_float16_as_the_dense_one_does_in_t5():
    layer, x = compressed_of(0).float(), torch.randn(3, 32).half()
    assert torch.equal(layer(x), layer(x.float()))


def test_nothing_is_compressed_where_it_cannot_be_multiplied():
    layer = compressed_of(0)  # there is no cuSPARSELt on a CPU
    assert layer.weight_compressed is None
    assert SparseLinear(32, 16).compress().pattern is None


def test_a_sparse_linear_is_a_linear():
    """Everything that works on ``nn.Linear`` works here: parametrizations, gradients, shared parameters."""
    dense = nn.Linear(24, 10)
    layer, x = SparseLinear.from_linear(dense, index_of(24)), torch.randn(5, 24)
    assert isinstance(layer, nn.Linear)
    assert layer.weight is dense.weight
    assert layer.bias is dense.bias
    layer(x).sum().backward()
    assert torch.allclose(dense.weight.grad[0], x[:, index_of(24)].sum(0))

    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    expected = 2 * (layer(x) - layer.bias) + layer.bias
    parametrize.register_parametrization(layer, "weight", Twice())
    torch.testing.assert_close(layer(x), expected)


def test_a_packed_layer_passes_gradients_to_its_input_and_bias():
    layer, x = sparse_linear_of(), torch.randn(5, 24)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    biases = []
    for leaf in leaves:
        layer.bias.grad = None
        layer(leaf).square().sum().backward()
        biases.append(layer.bias.grad)
        if layer.pattern is None:
            layer.pack(TWO_FOUR)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    torch.testing.assert_close(*biases)


def test_what_cannot_be_packed_is_left_dense():
    layer = SparseLinear.from_linear(nn.Linear(24, 10))
    with pytest.raises(ModelError, match="row 0: more nonzero"):
        layer.pack(TWO_FOUR)
    with pytest.raises(ModelError, match="24 input channels"):
        layer.pack(NMPattern(2, 5))
    assert layer.weight.numel()
    assert layer(torch.ones(24)).shape == (10,)
    packed = sparse_linear_of().pack(TWO_FOUR)
    with pytest.raises(ModelError, match="packed at 2:4 already"):
        packed.pack(TWO_FOUR)
