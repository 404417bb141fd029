import copy
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from permtriton import NMPattern
from permtriton.errors import ModelError
from permtriton.kernels import cusparselt
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.kernels.norm_permute import NormVariant
from permtriton.match_norm import match_norm
from permtriton.modules import (
    ChannelGather,
    PermutedLayerNorm,
    PermutedRMSNorm,
    SparseLinear,
    check_index,
    from_norm,
    index_dtype,
    replace_module,
)
from permtriton.permutation import inverse

from . import zoo
from .weights import compressed

# Norm of a layer -> the linears that read it.
_LLAMA = {
    "input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
}
_PHI3 = {"input_layernorm": ["self_attn.qkv_proj"], "post_attention_layernorm": ["mlp.gate_up_proj"]}
_GEMMA2 = {
    "input_layernorm": _LLAMA["input_layernorm"],
    "pre_feedforward_layernorm": _LLAMA["post_attention_layernorm"],
}
_OPT = {"self_attn_layer_norm": _LLAMA["input_layernorm"], "final_layer_norm": ["fc1"]}
_NEOX = {"input_layernorm": ["attention.query_key_value"], "post_attention_layernorm": ["mlp.dense_h_to_4h"]}
READERS: dict[str, tuple[str, dict[str, list[str]]]] = {
    "llama": ("model.layers", _LLAMA),
    "mistral": ("model.layers", _LLAMA),
    "qwen3": ("model.layers", _LLAMA),
    "phi3": ("model.layers", _PHI3),
    "gemma2": ("model.layers", _GEMMA2),
    "opt": ("model.decoder.layers", _OPT),
    "gpt_neox": ("gpt_neox.layers", _NEOX),
    "gpt2": ("transformer.h", {"ln_1": ["attn.c_attn"], "ln_2": ["mlp.c_fc"]}),
}
PATTERN = NMPattern(2, 4)


def index_of(channels: int, seed: int = 0) -> Tensor:
    return torch.randperm(channels, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def permute_inputs(linear: nn.Module, index: Tensor) -> None:
    linear.weight.copy_(linear.weight[index] if isinstance(linear, Conv1D) else linear.weight[:, index])


def permute_norms(model: PreTrainedModel, name: str) -> int:
    """Puts a random order behind every norm that feeds linears, and the linears' columns in it. Returns how many."""
    path, readers = READERS[name]
    seed = 0
    for layer in model.get_submodule(path):
        for norm_name, linears in readers.items():
            norm, seed = layer.get_submodule(norm_name), seed + 1
            index = index_of(norm.weight.numel(), seed)
            variant = match_norm(norm, index.numel())
            assert variant is not None
            replace_module(layer, norm_name, from_norm(norm, variant, index))
            for linear_name in linears:
                permute_inputs(layer.get_submodule(linear_name), index)
    return seed


@torch.no_grad()
def prune(model: PreTrainedModel) -> None:
    """Keeps 2 of 4 of every linear inside the layers."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and ".layers." in name:
            module.weight.mul_(top_n_mask(module.weight.abs().t().contiguous(), 2, 4).t()).add_(0.0)  # no -0.0


def sparsify(model: PreTrainedModel, packed: bool) -> None:
    """Makes every pruned linear a `SparseLinear`; those named o_proj get a gather."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and ".layers." in name:
            index = index_of(module.in_features) if name.endswith("o_proj") else None
            if index is not None:
                permute_inputs(module, index)
                with torch.no_grad():  # the groups of the new order
                    module.weight.mul_(top_n_mask(module.weight.abs().t().contiguous(), 2, 4).t()).add_(0.0)
            made = SparseLinear.from_linear(module, index)
            replace_module(model, name, made.pack(PATTERN) if packed else made)


def sparse_linear_of(seed: int = 0, gather: bool = True, dtype: torch.dtype = torch.float32) -> SparseLinear:
    torch.manual_seed(seed)
    made = SparseLinear.from_linear(nn.Linear(24, 10), index_of(24) if gather else None).to(dtype)
    with torch.no_grad():
        made.weight.mul_(top_n_mask(made.weight.abs().t().contiguous(), 2, 4).t()).add_(0.0)
    return made


@pytest.mark.parametrize("name", READERS)
def test_permuted_norms_leave_a_model_as_it_is(name):
    model = zoo.build(name)
    expected = zoo.outputs(model, zoo.token_ids())
    parameters = {key: id(value) for key, value in model.named_parameters()}
    assert permute_norms(model, name) == 2 * zoo.LAYERS
    assert zoo.difference(expected, zoo.outputs(model, zoo.token_ids())) < 1e-5
    assert {key: id(value) for key, value in model.named_parameters()} == parameters, "shared, under the old names"


@pytest.mark.parametrize("wrong", ["inverse", "unpermuted reader"])
def test_a_wrong_order_is_seen(wrong):
    """Break it: the comparison above can fail."""
    model = zoo.build("llama")
    expected = zoo.outputs(model, zoo.token_ids())
    permute_norms(model, "llama")
    layer = model.model.layers[1]
    if wrong == "inverse":
        layer.input_layernorm.index = inverse(layer.input_layernorm.index.long()).byte()
    else:
        permute_inputs(layer.mlp.up_proj, inverse(layer.post_attention_layernorm.index.long()))
    assert zoo.difference(expected, zoo.outputs(model, zoo.token_ids())) > 1e-2


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_generates_the_same_tokens_with_cache_batch_and_padding(name):
    model = zoo.build(name)
    permuted = copy.deepcopy(model)
    permute_norms(permuted, name)
    ids = zoo.token_ids(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :1] = 0
    ids[mask == 0] = 0
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    expected = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(permuted.generate(ids, attention_mask=mask, **options), expected)
    assert torch.equal(permuted.generate(ids, attention_mask=mask, use_cache=False, **options), expected)
    alone = permuted.generate(ids[:1, 4:], **options)
    assert torch.equal(alone, expected[:1, 4:]), "padding changes nothing"


def test_a_packed_model_generates_what_the_dense_one_does():
    dense, packed = zoo.build("llama"), zoo.build("llama")
    for model, pack in ((dense, False), (packed, True)):
        permute_norms(model, "llama")
        prune(model)
        sparsify(model, pack)
    ids = zoo.token_ids()
    assert all(map(torch.equal, zoo.outputs(dense, ids), zoo.outputs(packed, ids)))
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert torch.equal(dense.generate(ids, **options), packed.generate(ids, **options))


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler, and none is found"
)


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_compiles_as_one_graph_and_equals_eager(name):
    model = zoo.build(name, **({"n_layer": 1} if name == "gpt2" else {"num_hidden_layers": 1}))
    permute_norms(model, name)
    if name == "llama":
        prune(model)
        sparsify(model, packed=True)
    ids = zoo.token_ids(2, 12)
    eager = zoo.outputs(model, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        result = compiled(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(result, eager[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 256, 257, 32768, 32769])
def test_indices_take_the_fewest_bytes(channels):
    gather = ChannelGather(index_of(channels))
    assert gather.index.dtype == index_dtype(channels)
    size = {1: 1, 256: 1, 257: 2, 32768: 2, 32769: 4}[channels]
    assert gather.index.element_size() == size
    x = torch.arange(channels).float()
    assert torch.equal(gather(x), x[index_of(channels)])


def modules_of(index: Tensor) -> list[nn.Module]:
    channels = index.numel()
    norms = [(LlamaRMSNorm, "rms", 0.0), (GemmaRMSNorm, "rms_float", 1.0), (nn.LayerNorm, "layer", 0.0)]
    made = [from_norm(cls(channels, eps=1e-5), NormVariant(kind, 1e-5, o), index) for cls, kind, o in norms]
    return [ChannelGather(index), *made]


@pytest.mark.parametrize("which", range(4))
def test_compose_applies_a_further_order(which):
    x, first, second = torch.randn(3, 16), index_of(16, 1), index_of(16, 2)
    module = modules_of(first)[which]
    dtype, y = module.index.dtype, module(x)
    module.compose(second)
    assert torch.equal(module(x), y[:, second])
    assert module.index.dtype == dtype
    module.compose(inverse(second))
    assert torch.equal(module(x), y)


@pytest.mark.parametrize("which", range(4))
def test_survives_copies_state_dicts_and_moves(which):
    x, module, other = torch.randn(3, 16), modules_of(index_of(16, 1))[which], modules_of(index_of(16, 2))[which]
    zoo.randomize(module)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))
    half = copy.deepcopy(module).to(torch.bfloat16)
    assert half.index.dtype == torch.uint8
    assert torch.equal(half.index, module.index)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert module.to("meta")(x.to("meta")).shape == x.shape


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([0, 1, 1, 3]),
        torch.tensor([0, 1, 2, 4]),
        torch.tensor([-1, 1, 2, 0]),
        torch.tensor([0.0, 1.0, 2.0, 3.0]),
        torch.tensor([[0, 1, 2, 3]]),
        torch.tensor([True] * 4),
    ],
)
def test_what_is_no_permutation_is_refused(index):
    gather = ChannelGather(torch.arange(4))
    makers = [
        lambda: ChannelGather(index),
        lambda: PermutedRMSNorm(torch.ones(4), 1e-5, index),
        lambda: PermutedLayerNorm(torch.ones(4), None, 1e-5, index),
        lambda: SparseLinear.from_linear(nn.Linear(4, 3), index),
        lambda: gather.compose(index),
        lambda: check_index(index, 4, "here"),
    ]
    for make in makers:
        with pytest.raises(ModelError, match="expected"):
            make()
    assert torch.equal(gather.index.long(), torch.arange(4)), "left as it was"


def test_an_index_of_another_size_is_refused():
    with pytest.raises(ModelError, match=r"\[5\].*expected whole numbers \[4\]"):
        PermutedRMSNorm(torch.ones(4), 1e-5, torch.arange(5))
    with pytest.raises(ModelError, match=r"\[5\].*expected whole numbers \[24\]"):
        SparseLinear(24, 3, gather=ChannelGather(torch.arange(5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gather", [False, True])
def test_packing_changes_no_bit(dtype, gather):
    layer, x = sparse_linear_of(0, gather, dtype), torch.randn(2, 5, 24).to(dtype)
    weight, expected = layer.weight.detach().clone(), layer(x)
    ordered = x[..., index_of(24)] if gather else x
    assert torch.equal(expected, linear(ordered, weight, layer.bias))
    assert layer.pack(PATTERN) is layer
    assert layer.weight is None
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
        layer.pack(PATTERN)
        other.prepare_packed(PATTERN)
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
    source = sparse_linear_of(0).pack(PATTERN)
    with torch.device("meta"):
        gather = ChannelGather(torch.empty(24, dtype=torch.uint8))
        layer = SparseLinear(24, 10, gather=gather).prepare_packed(PATTERN)
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
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    weight *= top_n_mask(weight.abs().t().contiguous(), 2, 4).t()
    layer.weight.data = (weight + 0.0).bfloat16()
    return layer.pack(PATTERN).compress()


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


def test_nothing_is_compressed_where_it_cannot_be_multiplied():
    layer = compressed_of(0)  # there is no cuSPARSELt on a CPU
    assert layer.weight_compressed is None
    assert SparseLinear(32, 16).compress().pattern is None


def test_a_sparse_linear_is_a_linear():
    """What works on ``nn.Linear`` goes on working: parametrizations, gradients, shared parameters."""
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
    with pytest.raises(ModelError, match="parametrized"):
        layer.pack(PATTERN)
    with pytest.raises(ModelError, match="parametrized"):
        SparseLinear.from_linear(layer)


def test_a_packed_layer_passes_gradients_to_its_input_and_bias():
    layer, x = sparse_linear_of(), torch.randn(5, 24)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    biases = []
    for leaf in leaves:
        layer.bias.grad = None
        layer(leaf).square().sum().backward()
        biases.append(layer.bias.grad)
        if layer.pattern is None:
            layer.pack(PATTERN)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    torch.testing.assert_close(*biases)


def test_what_cannot_be_packed_is_left_dense():
    layer = SparseLinear.from_linear(nn.Linear(24, 10))
    with pytest.raises(ModelError, match="row 0, group 0"):
        layer.pack(PATTERN)
    with pytest.raises(ModelError, match="24 input channels"):
        layer.prepare_packed(NMPattern(2, 5))
    assert layer.weight is not None
    assert layer(torch.ones(24)).shape == (10,)
    packed = sparse_linear_of().pack(PATTERN)
    with pytest.raises(ModelError, match="packed at 2:4 already"):
        packed.pack(PATTERN)


def test_what_is_printed():
    assert repr(modules_of(index_of(16))[0]) == "ChannelGather(channels=16)"
    assert repr(modules_of(index_of(16))[2]) == "PermutedRMSNorm(16, kind=rms_float, eps=1e-05, offset=1.0)"
    assert "packed=2:4" in repr(sparse_linear_of().pack(PATTERN))
    assert "packed" not in repr(sparse_linear_of())


def test_modules_are_replaced_wherever_they_are_shared():
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared})
    replace_module(model, "a.0", nn.Identity())
    assert isinstance(model["b"], nn.Identity)
    assert isinstance(model["a"][0], nn.Identity)
    for name, named in (("a.7", "'a.7'"), ("", "itself")):
        with pytest.raises(ModelError, match=named):
            replace_module(model, name, nn.Identity())
