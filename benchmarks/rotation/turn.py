"""How are the residual stream and the heads of a LLaMA-like model turned, without a change of its outputs?"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel


@torch.no_grad()
def fold_gains(model: PreTrainedModel) -> None:
    """Moves the gain of each norm into the linears that read it; an output head that is tied is untied first."""
    if model.config.tie_word_embeddings:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    for norm, readers in readers_of(model):
        for reader in readers:
            reader.weight.mul_(norm.weight)
        norm.weight.fill_(1)


def readers_of(model: PreTrainedModel) -> Iterator[tuple[nn.Module, list[nn.Linear]]]:
    """Yields each norm of the stream and the linears that read it."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]
        yield layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]
    yield model.model.norm, [model.lm_head]


@torch.no_grad()
def turn_stream(model: PreTrainedModel, rotation: Tensor) -> None:
    """Turns the residual stream of a model without gains."""
    rotation = rotation.to(model.dtype)
    for weight in [model.model.embed_tokens.weight, *(each.weight for _, own in readers_of(model) for each in own)]:
        weight.copy_(weight @ rotation)
    for layer in model.model.layers:
        for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
            writer.weight.copy_(rotation.T @ writer.weight)


@torch.no_grad()
def turn_heads(model: PreTrainedModel, rotations: Tensor) -> None:
    """Turns the values of each key-value head, ``[layers, heads, size, size]``."""
    for layer, own in zip(model.model.layers, rotations.to(model.dtype), strict=True):
        values, output = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
        values.copy_(torch.block_diag(*own).T @ values)
        output.copy_(output @ per_query_head(own, model.config))


def per_query_head(own: Tensor, config: PretrainedConfig) -> Tensor:
    """Returns the rotation of the inputs of o: block by block that of the query head's values."""
    return torch.block_diag(*own.repeat_interleave(config.num_attention_heads // len(own), 0))


@contextmanager
def in_full_precision(model: PreTrainedModel) -> Iterator[None]:
    """Inside the context, norms do not round to float32, as those of transformers do whatever the model's dtype."""

    def forward(norm: nn.Module, hidden: Tensor) -> Tensor:
        return norm.weight * hidden * (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()

    with patch.object(type(model.model.norm), "forward", forward):
        yield
