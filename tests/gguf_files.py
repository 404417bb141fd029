"""Tiny GGUF files, as llama.cpp writes them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from transformers import LlamaForCausalLM

from . import zoo
from .sentences import trained_tokenizer

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def llama() -> LlamaForCausalLM:
    """Returns a tiny LLaMA whose rows can be quantized, in blocks of 32."""
    size = len(trained_tokenizer())
    return zoo.tiny_llama(hidden_size=32, intermediate_size=64, vocab_size=size, tie_word_embeddings=True)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    architecture: str = "llama",
    tokenizer: bool = True,
    further: Mapping[str, np.ndarray] | None = None,
    **fields: int | float | str,
) -> dict[str, np.ndarray]:
    """Writes a LLaMA as GGUF: matrices in Q8_0, vectors in F32.

    Args:
        further: tensors to write besides.
        fields: values of the header in place of the model's, without the architecture before their names.

    Returns:
        The name of each of the model's parameters -> its weight as the file holds it, dequantized.
    """
    writer, config = GGUFWriter(path, architecture), model.config
    sizes: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
    }
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
    for name, value in {**sizes, **fields}.items():
        add[type(value)](name if name.startswith("split.") else f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    if tokenizer:
        _add_tokenizer(writer)
    expected = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        kind = GGMLQuantizationType.Q8_0 if weight.ndim > 1 else GGMLQuantizationType.F32
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        stored = quantize(weight if heads is None else _interleaved(weight, heads), kind)
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=kind)
        expected[name] = weight if weight.ndim == 1 else _rounded(weight)
    for name, tensor in (further or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def write_tokenizer(path: Path, architecture: str, kind: str, tokens: Sequence[str], **fields: int | str) -> None:
    """Writes a GGUF file of a tokenizer, whose first token is special, and of one tensor.

    Args:
        kind: ``gpt2`` for byte-level BPE, which merges two spaces, and two of x; ``llama`` for SentencePiece.
        fields: further values of the header, without ``tokenizer.ggml.`` before their names.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL, *[TokenType.NORMAL] * (len(tokens) - 1)])
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    if kind == "gpt2":
        writer.add_token_merges(["Ġ Ġ", "x x"])
    add = {int: writer.add_uint32, str: writer.add_string, bool: writer.add_bool}
    for name, value in fields.items():
        add[type(value)](f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, *parts, last = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(parts)]}.{last}"


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of queries or keys in llama.cpp's order, which rotates neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _rounded(weight: np.ndarray) -> np.ndarray:
    """Returns what Q8_0 keeps: blocks of 32 integers with a scale in float16."""
    blocks = weight.reshape(-1, 32)
    scales = np.abs(blocks).max(1, keepdims=True) / 127
    return (np.rint(blocks / scales) * scales.astype(np.float16).astype(np.float32)).reshape(weight.shape)


def _add_tokenizer(writer: GGUFWriter) -> None:
    tokenizer = trained_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(state["vocab"], key=state["vocab"].get))
    writer.add_token_types([TokenType.CONTROL, *[TokenType.NORMAL] * (len(state["vocab"]) - 1)])
    writer.add_token_merges([" ".join(merge) for merge in state["merges"]])
    writer.add_eos_token_id(0)
