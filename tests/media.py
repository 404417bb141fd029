"""Tiny models of images and sound."""

import torch
from torch import Tensor
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    Kosmos2Config,
    Kosmos2ForConditionalGeneration,
    PreTrainedModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForAudioClassification,
)

from . import zoo

HEADS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES = {**HEADS, "intermediate_size": 32}
PIXELS = {"image_size": 16, "patch_size": 8}
CONVOLUTIONS = {"conv_dim": (8, 8), "conv_kernel": (10, 4), "conv_stride": (5, 2), "num_conv_pos_embeddings": 4,
                "num_conv_pos_embedding_groups": 2, "vocab_size": 12}  # fmt: skip
WHISPER = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_layers": 1,
           "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "max_source_positions": 50, "num_mel_bins": 8,
           "vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
           "classifier_proj_size": 8}  # fmt: skip
MODELS = {
    "vit": lambda: ViTForImageClassification(ViTConfig(**SIZES, **PIXELS, num_labels=4)),
    "dinov2": lambda: Dinov2Model(Dinov2Config(**HEADS, **PIXELS)),
    "dinov3": lambda: DINOv3ViTModel(DINOv3ViTConfig(**{**SIZES, **PIXELS, "hidden_size": 32})),
    "clip": lambda: CLIPVisionModel(CLIPVisionConfig(**SIZES, **PIXELS)),
    "siglip": lambda: SiglipVisionModel(SiglipVisionConfig(**SIZES, **PIXELS)),
    "wav2vec2": lambda: Wav2Vec2ForCTC(Wav2Vec2Config(**SIZES, **CONVOLUTIONS)),
    "whisper": lambda: WhisperForAudioClassification(WhisperConfig(**WHISPER)),
}
SHAPES = {"wav2vec2": (6, 200), "whisper": (6, 8, 100)}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[name]()
    zoo.randomize(model)
    return model.eval()


def inputs(name: str) -> dict[str, Tensor]:
    """Random samples of a model, by the name of its main input."""
    values = torch.randn(SHAPES.get(name, (6, 3, 16, 16)), generator=torch.Generator().manual_seed(0))
    return {build(name).main_input_name: values}


BLIP2 = {
    "vision_config": {**SIZES, **PIXELS}, "num_query_tokens": 4, "image_text_hidden_size": 8, "image_token_index": 59,
    "qformer_config": {**SIZES, "vocab_size": 40, "encoder_hidden_size": 16, "cross_attention_frequency": 1},
}  # fmt: skip
TEXTS = {
    "opt": {**HEADS, "model_type": "opt", "vocab_size": 60, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "t5": {"model_type": "t5", "vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
           "decoder_start_token_id": 0},
}  # fmt: skip
KOSMOS2 = {
    "text_config": {"vocab_size": 60, "embed_dim": 16, "layers": 1, "ffn_dim": 32, "attention_heads": 2},
    "vision_config": {**SIZES, **PIXELS}, "latent_query_num": 4,
}  # fmt: skip


def image_and_text(name: str) -> PreTrainedModel:
    """Returns a model that needs images and token ids at once: ``kosmos2``, or BLIP-2 with the text model ``name``."""
    if name == "kosmos2":
        model = Kosmos2ForConditionalGeneration(Kosmos2Config(**KOSMOS2))
    else:
        model = Blip2ForConditionalGeneration(Blip2Config(**BLIP2, text_config=TEXTS[name]))
    zoo.randomize(model)
    return model.eval()


def image_and_text_inputs(name: str) -> dict[str, Tensor]:
    """Returns what that model needs, one row for each of 4 samples; the first 4 tokens stand for the image."""
    ids, first = torch.randint(3, 58, (4, 12)), torch.arange(12).expand(4, 12) < 4
    inputs = {"input_ids": ids.masked_fill(first, 59), "pixel_values": torch.randn(4, 3, 16, 16)}
    return {**inputs, "image_embeds_position_mask": first} if name == "kosmos2" else inputs
