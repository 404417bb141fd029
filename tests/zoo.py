"""Tiny random models, one for each architecture. All sizes differ, so that no axis can be mistaken for another."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from permtriton import NMPattern, config_from
from permtriton.data.samples import Samples
from permtriton.methods.planning import Planned, plan_model
from permtriton.methods.recipe_config import CompileConfig
from permtriton.passes.plan import ChannelSpace, Plan
from permtriton.passes.weight_folds import apply_edits, edits_of, moves_of

VOCABULARY, HIDDEN, INTERMEDIATE, POSITIONS, LAYERS, HEADS, KEY_VALUE_HEADS = 90, 64, 112, 48, 2, 4, 2
HEAD_DIM = HIDDEN // HEADS
WIDE_HEAD_DIM = 24  # for architectures with a free head_dim: heads x head_dim then differs from the hidden size

_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    **_TOKENS,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "intermediate_size": INTERMEDIATE,
}
_GROUPED = {**SIZES, "num_key_value_heads": KEY_VALUE_HEADS}
_OPT = {**SIZES, "ffn_dim": INTERMEDIATE, "word_embed_proj_dim": HIDDEN}
_OPT.pop("intermediate_size")
_FALCON = {**SIZES, "ffn_hidden_size": INTERMEDIATE}
_FALCON.pop("intermediate_size")
_GPT2 = {
    **_TOKENS,
    "n_embd": HIDDEN,
    "n_inner": INTERMEDIATE,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": POSITIONS,
}
TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def _family(model: str, config: str, **options: object) -> Callable[..., PreTrainedModel]:
    def make(**changes: object) -> PreTrainedModel:
        return getattr(transformers, model)._from_config(getattr(transformers, config)(**{**options, **changes}))

    return make


def _causal(family: str, **options: object) -> Callable[..., PreTrainedModel]:
    return _family(f"{family}ForCausalLM", f"{family}Config", **options)


ARCHITECTURES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": _causal("Llama", **_GROUPED),
    "llama_tied": _causal("Llama", **_GROUPED, tie_word_embeddings=True),
    "llama_eager": _causal("Llama", **_GROUPED, attn_implementation="eager", attention_bias=True, mlp_bias=True),
    "mistral": _causal("Mistral", **_GROUPED, sliding_window=8),
    "qwen2": _causal("Qwen2", **_GROUPED),
    "qwen3": _causal("Qwen3", **_GROUPED, head_dim=WIDE_HEAD_DIM),
    "phi3": _causal("Phi3", **_GROUPED),
    "gemma2": _causal("Gemma2", **_GROUPED, head_dim=WIDE_HEAD_DIM, sliding_window=8),
    "opt": _causal("OPT", **_OPT),
    "gpt_neox": _causal("GPTNeoX", **SIZES),
    "phi": _causal("Phi", **SIZES),
    "falcon": _causal("Falcon", **_FALCON, parallel_attn=True, multi_query=True, bias=False),  # like the 7B models
    "olmo2": _causal("Olmo2", **_GROUPED),
    "gpt2": _family("GPT2LMHeadModel", "GPT2Config", **_GPT2),
    "bert_mlm": _family("BertForMaskedLM", "BertConfig", **SIZES),
    "bert": _family("BertModel", "BertConfig", **SIZES),
}


_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2}
# Mixtures of experts; their number of experts is not equal to any other size.
MIXTURES: dict[str, Callable[..., PreTrainedModel]] = {
    "mixtral": _causal("Mixtral", **_EXPERTS, num_local_experts=5),
    "qwen3_moe": _causal(
        "Qwen3Moe", **_EXPERTS, num_experts=5, moe_intermediate_size=48, head_dim=WIDE_HEAD_DIM, norm_topk_prob=True
    ),
    "qwen2_moe": _causal(
        "Qwen2Moe", **_EXPERTS, num_experts=5, moe_intermediate_size=48, shared_expert_intermediate_size=80
    ),
    "olmoe": _causal("Olmoe", **_EXPERTS, num_experts=5),
    "gpt_oss": _causal("GptOss", **_EXPERTS, num_local_experts=5, head_dim=WIDE_HEAD_DIM, sliding_window=8),
}


# Architectures of which each folds, joins, ties or transposes as none of the others does.
TELLING = ("llama", "phi3", "gemma2", "olmo2", "gpt2", "bert", "bert_mlm")


def build(name: str, **changes: object) -> PreTrainedModel:
    """Returns a model of either table in eval mode, the same each time; ``changes`` go into its config."""
    torch.manual_seed(0)
    model = {**ARCHITECTURES, **MIXTURES}[name](**changes)
    randomize(model)
    return model.eval()


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    """Returns an even smaller LLaMA with the library's own random weights, the same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).eval()


def tiny_ids(sequences: int, tokens: int, seed: int = 0) -> Tensor:
    """Returns random token ids ``[sequences, tokens]`` of `tiny_llama`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TINY["vocab_size"], (sequences, tokens), generator=generator)


def find_plan(model: PreTrainedModel, sparsity: NMPattern | str, **options: object) -> Plan:
    return plan_model(model, config_from({"sparsity": sparsity, **options}))[0]


@functools.cache
def _plan(name: str) -> Plan:
    return find_plan(build(name), NMPattern(2, 4))


def planned(name: str) -> tuple[PreTrainedModel, Plan]:
    """Returns a new model and its plan at 2:4; the trace is made once for all tests."""
    return build(name), copy.deepcopy(_plan(name))


def start(model: PreTrainedModel, config: CompileConfig, samples: Samples, plan: Plan | None = None) -> Planned:
    """Returns what a forecast is made of: a model, its samples and its plan, with an empty graph."""
    plan = plan or plan_model(model, config)[0]
    return Planned(model, config, samples, plan, fx.GraphModule(nn.Module(), fx.Graph()))


def fold(model: nn.Module, plan: Plan, indices: dict[str, Tensor]) -> None:
    """Folds a new channel order into a model."""
    apply_edits(model, edits_of(moves_of(plan, indices)))


@torch.no_grad()
def randomize(module: nn.Module) -> None:
    """Draws every parameter at random, so that norm weights and biases distinguish channels, too."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=0.2)


@torch.no_grad()
def rescaled(model: PreTrainedModel, **factors: float) -> PreTrainedModel:
    """Multiplies the weights of linears by a factor, by the last part of their names."""
    for name, module in model.named_modules():
        if (factor := factors.get(name.rpartition(".")[2])) is not None:
            module.weight.mul_(factor)
    return model


def token_ids(sequences: int = 8, tokens: int = 24, seed: int = 1) -> Tensor:
    """Returns random token ids ``[sequences, tokens]`` without special tokens."""
    return torch.randint(3, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def outputs(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Returns every tensor that a model or a plain module returns."""
    if isinstance(model, PreTrainedModel):
        result = model(input_ids=inputs[0], use_cache=False).to_tuple()
    else:
        result = model(*inputs)
    return [value for value in (result if isinstance(result, tuple) else (result,)) if isinstance(value, Tensor)]


def difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Returns the largest difference of two models' outputs, relative to the largest output."""
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(first, second, strict=True))


def random_index(space: ChannelSpace, seed: int = 0) -> Tensor:
    """Returns a unit index that permutes every segment at random and is not the identity."""
    generator = torch.Generator().manual_seed(seed)
    starts = [0, *torch.tensor(space.segments).cumsum(0).tolist()]
    index = torch.cat(
        [s + torch.randperm(n, generator=generator) for s, n in zip(starts, space.segments, strict=False)]
    )
    assert not torch.equal(index, torch.arange(space.units))
    return index


def random_indices(plan: Plan, seed: int = 0) -> dict[str, Tensor]:
    """Returns `random_index` of every space that may move."""
    return {s.name: random_index(s, seed + n) for n, s in enumerate(plan.spaces) if not s.frozen}


@contextlib.contextmanager
def float32_means_float64() -> Iterator[None]:
    """Norms and rotary embeddings go down to float32 by name, whatever the model's dtype; that would hide errors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        yield
