"""vLLM computes what transformers computes, for every layout and format, and for every model class that is served."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm

from permtriton.checkpoint.export import export
from permtriton.checkpoint.packed import fill_packed
from permtriton.model.modules import SparseLinear, replace_module
from permtriton.serving.norm import VllmPermutedRMSNorm
from permtriton.serving.servable import SERVED

from .. import folders, zoo
from .conftest import FOLDERS
from .engine import engine, expected_greedy, greedy, log_probabilities, prompts

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 96}  # heads of 32, as vLLM's kernels
WIDE = {**SIZES, "intermediate_size": 224}
MODELS = {
    "LlamaForCausalLM": ("llama", {**WIDE, "head_dim": 32}),
    "MistralForCausalLM": ("mistral", {**WIDE, "head_dim": 32}),
    "Qwen2ForCausalLM": ("qwen2", WIDE),
    "Qwen3ForCausalLM": ("qwen3", {**WIDE, "head_dim": 32}),
    "GPTNeoXForCausalLM": ("gpt_neox", WIDE),
    "OPTForCausalLM": ("opt", {**SIZES, "word_embed_proj_dim": 128, "ffn_dim": 224}),
    "Olmo2ForCausalLM": ("olmo2", WIDE),
    "PhiForCausalLM": ("phi", WIDE),
    "Phi3ForCausalLM": ("phi3", WIDE),
}
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16,
         "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16384}  # fmt: skip
FUSED = [name for name, fused in SERVED.items() if fused]
GATHERED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")


@pytest.mark.parametrize("name", FOLDERS)
def test_generates_the_same_tokens(name, demo_folders):
    inputs = prompts(demo_folders[name])
    with engine(demo_folders[name]) as llm:
        assert greedy(llm, inputs) == expected_greedy(demo_folders[name], inputs)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_generates_the_same_tokens_with_packed_weights(demo_folders, eager, monkeypatch):
    """As on a GPU, weights stay packed and are multiplied by the operator, also inside vLLM's `torch.compile`."""
    used = []
    monkeypatch.setattr("permtriton.serving.linear.fill_packed", lambda *parts: used.append(1) or fill_packed(*parts))
    monkeypatch.setattr("permtriton.serving.linear.runs_packed", lambda *_: True)
    inputs = prompts(demo_folders["fused-packed"])
    with engine(demo_folders["fused-packed"], enforce_eager=eager) as llm:
        assert greedy(llm, inputs) == expected_greedy(demo_folders["fused-packed"], inputs)
    assert len(used) == 4 * 4  # q/k/v, o, gate/up and down of four layers


def pruned_model(name: str, **changes: int) -> nn.Module:
    zoo_name, sizes = MODELS[name]
    model = zoo.build(zoo_name, **{**sizes, **changes})
    assert type(model).__name__ == name
    folders.prune(model)
    return model


def fused_model(name: str, **changes: int) -> nn.Module:
    """A model whose norms all permute, and whose linears but gate and up gather: q, k and v in the same order."""
    model = pruned_model(name, **changes)
    layers = range(model.config.num_hidden_layers)
    norms = ("input_layernorm", "post_attention_layernorm")
    folders.fuse(model, [f"model.layers.{layer}.{norm}" for layer in layers for norm in norms], [])
    for layer in layers:
        for part in GATHERED:
            linear = model.get_submodule(path := f"model.layers.{layer}.{part}")
            seed = torch.Generator().manual_seed(layer + linear.in_features)
            index = torch.randperm(linear.in_features, generator=seed)
            replace_module(model, path, SparseLinear.from_linear(linear, index))
    return model


def check_log_probabilities(model: nn.Module, folder: Path, packed: bool) -> None:
    folders.save(model, folder / "saved")
    if packed:
        export(folder / "saved", folder / "packed", "packed")
    served = folder / ("packed" if packed else "saved")
    inputs = zoo.token_ids(8, 20)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float32).eval()(inputs).logits[:, -1]
    with engine(served, skip_tokenizer_init=True, max_logprobs=zoo.VOCABULARY) as llm:
        found = log_probabilities(llm, inputs, zoo.VOCABULARY)
    torch.testing.assert_close(found, logits.log_softmax(-1), rtol=0, atol=1e-3)


@pytest.mark.slow(but=["OPTForCausalLM"])
@pytest.mark.parametrize("name", [name for name in SERVED if name not in FUSED])
def test_the_same_probabilities_with_packed_weights(name, tmp_path):
    check_log_probabilities(pruned_model(name), tmp_path, packed=True)


@pytest.mark.slow(but=["LlamaForCausalLM-True"])
@pytest.mark.parametrize(("name", "packed"), [("LlamaForCausalLM", False), *((name, True) for name in FUSED)])
def test_the_same_probabilities_with_norms_and_gathers(name, packed, tmp_path):
    check_log_probabilities(fused_model(name), tmp_path, packed)


@pytest.mark.soak
def test_a_model_of_300_million_parameters_generates_the_same_tokens(soak, tmp_path):
    if not soak:
        pytest.skip("takes minutes: --soak runs it")
    model = fused_model("LlamaForCausalLM", **LARGE)
    assert sum(parameter.numel() for parameter in model.parameters()) > 300e6
    folders.save(model, tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "packed", "packed")
    inputs = torch.randint(3, LARGE["vocab_size"], (8, 20)).tolist()
    with engine(tmp_path / "packed", skip_tokenizer_init=True) as llm:
        assert greedy(llm, inputs) == expected_greedy(tmp_path / "packed", inputs)


class Operators(TorchDispatchMode):
    """Notes the name of each operator of permtriton that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "permtriton":
            self.called.append(str(func.overloadpacket.__name__))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_permutes_in_one_kernel(dtype):
    """With the addition before it, as vLLM's layers call it."""
    with set_current_vllm_config(VllmConfig()):
        plain, permuted = (kind(64, dtype=dtype) for kind in (RMSNorm, VllmPermutedRMSNorm))
    index = torch.randperm(64)
    plain.weight.data.uniform_(0.5, 2.0)
    permuted.weight, permuted.permutes, permuted.index = plain.weight, True, index
    x, residual = torch.randn(2, 5, 64).to(dtype)
    with torch.no_grad(), Operators() as operators:
        alone, (normed, total) = permuted(x), permuted(x, residual)
    assert operators.called == ["norm_permute", "add_norm_permute"]
    torch.testing.assert_close(alone, plain.forward_native(x)[:, index])
    expected, added = plain.forward_native(x.clone(), residual.clone())
    torch.testing.assert_close(normed, expected[:, index])
    torch.testing.assert_close(total, added)
