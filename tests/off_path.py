"""Tiny models with paths that a trace on token ids does not run: images, encoder states, long sequences."""

from collections.abc import Callable

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from . import zoo

IMAGE_TOKEN, IMAGE_SIZE, PATCHES = zoo.VOCABULARY - 1, 16, 4
TEXT = {**zoo.SIZES, "num_key_value_heads": zoo.KEY_VALUE_HEADS, "model_type": "llama"}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": 8,
}
LONG = 32  # tokens beyond which a rotary embedding uses its long factors


def _with_images(family: str, text: str, vision: str, **options: object) -> PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(
        vision_config={**VISION, "model_type": vision},
        text_config={**TEXT, "model_type": text, "head_dim": zoo.HEAD_DIM},
        **options,
    )
    return getattr(transformers, f"{family}ForConditionalGeneration")._from_config(config)


def _long_rope() -> PreTrainedModel:
    half = zoo.HEAD_DIM // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [2.0 + n for n in range(half)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LONG, **factors}
    return zoo.build(
        "phi3", max_position_embeddings=2 * LONG, original_max_position_embeddings=LONG, rope_parameters=rope
    )


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llava": lambda: _with_images("Llava", "llama", "clip_vision_model", image_token_index=IMAGE_TOKEN),
    "idefics3": lambda: _with_images(
        "Idefics3", "llama", "idefics3_vision", image_token_id=IMAGE_TOKEN, pad_token_id=0
    ),
    "paligemma": lambda: _with_images(
        "PaliGemma", "gemma", "siglip_vision_model", image_token_index=IMAGE_TOKEN, projection_dim=zoo.HIDDEN
    ),
    "gemma3": lambda: _with_images(
        "Gemma3", "gemma3_text", "siglip_vision_model", image_token_index=IMAGE_TOKEN, mm_tokens_per_image=PATCHES
    ),
    "bart_decoder": lambda: transformers.BartForCausalLM._from_config(
        transformers.BartConfig(
            vocab_size=zoo.VOCABULARY, d_model=zoo.HIDDEN, decoder_layers=2, decoder_ffn_dim=zoo.INTERMEDIATE,
            decoder_attention_heads=zoo.HEADS, max_position_embeddings=zoo.POSITIONS, forced_eos_token_id=2,
        )
    ),
    "gpt2_cross": lambda: zoo.build("gpt2", add_cross_attention=True),
    "bert_cross": lambda: transformers.BertLMHeadModel._from_config(
        transformers.BertConfig(**zoo.SIZES, is_decoder=True, add_cross_attention=True)
    ),
    "long_rope": _long_rope,
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    """Returns a model with random weights in eval mode, the same each time."""
    torch.manual_seed(0)
    model = MODELS[name]()
    zoo.randomize(model)
    return model.eval()


def arguments(name: str) -> dict[str, Tensor]:
    """Returns arguments for which a model leaves the path of token ids."""
    ids, generator = zoo.token_ids(1, 12), torch.Generator().manual_seed(2)
    ids = ids.clamp(max=IMAGE_TOKEN - 1)
    if name == "long_rope":
        return {"input_ids": zoo.token_ids(1, LONG + 8)}
    if name in ("bart_decoder", "gpt2_cross", "bert_cross"):
        return {"input_ids": ids, "encoder_hidden_states": torch.randn(1, 5, zoo.HIDDEN, generator=generator)}
    shape = (1, 1, 3, IMAGE_SIZE, IMAGE_SIZE) if name == "idefics3" else (1, 3, IMAGE_SIZE, IMAGE_SIZE)
    images = 1 if name == "idefics3" else PATCHES
    return {
        "input_ids": torch.cat([torch.full((1, images), IMAGE_TOKEN), ids], 1),
        "pixel_values": torch.randn(shape, generator=generator),
    }
