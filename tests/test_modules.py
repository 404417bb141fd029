"""Modules that permute at run time: in a whole model, composed, copied, replaced and refused."""

import copy
import shutil

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from permtriton.errors import ModelError
from permtriton.kernels.norm_permute import NormVariant
from permtriton.model.modules import (
    ChannelGather,
    PermutedLayerNorm,
    PermutedRMSNorm,
    SparseLinear,
    check_index,
    from_norm,
    replace_module,
)
from permtriton.model.norms import match_norm
from permtriton.util.permutation import inverse

from . import folders, zoo
from .kernel_inputs import TWO_FOUR, index_of

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


@torch.no_grad()
def permute_inputs(linear: nn.Module, index: Tensor) -> None:
    linear.weight.copy_(linear.weight[index] if isinstance(linear, Conv1D) else linear.weight[:, index])


def permute_norms(model: PreTrainedModel, name: str) -> int:
    """Permutes the output of every norm that feeds linears, and their columns to match; returns the number of norms."""
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


def sparsify(model: PreTrainedModel, packed: bool) -> None:
    """Makes every pruned linear a `SparseLinear`; those named o_proj get a gather."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and ".layers." in name:
            index = index_of(module.in_features) if name.endswith("o_proj") else None
            if index is not None:
                permute_inputs(module, index)
                folders.prune_weight(module.weight)  # in the groups of the new order
            made = SparseLinear.from_linear(module, index)
            replace_module(model, name, made.pack(TWO_FOUR) if packed else made)


@pytest.mark.parametrize("name", READERS)
def test_permuted_norms_leave_a_model_as_it_is(name):
    model = zoo.build(name)
    expected = zoo.outputs(model, zoo.token_ids())
    parameters = {key: id(value) for key, value in model.named_parameters()}
    assert permute_norms(model, name) == 2 * zoo.LAYERS
    assert zoo.difference(expected, zoo.outputs(model, zoo.token_ids())) < 1e-5
    assert {key: id(value) for key, value in model.named_parameters()} == parameters, "shared, under the old names"


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


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler, and none is found"
)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "backend"),
    [("llama", "aot_eager"), ("llama", "inductor"), ("gpt2", "inductor"), ("gemma2", "inductor")],
)
@pytest.mark.slow
def test_compiles_as_one_graph_and_equals_eager(name, backend):
    model = zoo.build(name, **({"n_layer": 1} if name == "gpt2" else {"num_hidden_layers": 1}))
    permute_norms(model, name)
    if name == "llama":
        folders.prune(model)
        sparsify(model, packed=True)
    ids = zoo.token_ids(2, 12)
    eager = zoo.outputs(model, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        result = compiled(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(result, eager[0], rtol=1e-4, atol=1e-4)


ONES = nn.Parameter(torch.ones(4))


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
        lambda: PermutedRMSNorm(ONES, None, index, NormVariant("rms", 1e-5, 0.0)),
        lambda: PermutedLayerNorm(ONES, None, index, NormVariant("layer", 1e-5, 0.0)),
        lambda: SparseLinear.from_linear(nn.Linear(4, 3), index),
        lambda: gather.compose(index),
        lambda: check_index(index, 4, "here"),
    ]
    for make in makers:
        with pytest.raises(ModelError, match="expected"):
            make()
    assert torch.equal(gather.index.long(), torch.arange(4)), "left as it was"


def test_an_index_of_another_size_is_refused():
    with pytest.raises(ModelError, match=r"\[5\].*expected integers \[4\]"):
        PermutedRMSNorm(ONES, None, torch.arange(5), NormVariant("rms", 1e-5, 0.0))
    with pytest.raises(ModelError, match=r"\[5\].*expected integers \[24\]"):
        SparseLinear(24, 3, gather=ChannelGather(torch.arange(5)))


def test_modules_are_replaced_wherever_they_are_shared():
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared})
    replace_module(model, "a.0", nn.Identity())
    assert isinstance(model["b"], nn.Identity)
    assert isinstance(model["a"][0], nn.Identity)
