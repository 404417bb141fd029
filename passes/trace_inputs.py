"""Samples to trace a model with if no real ones are at hand: their shapes follow from the model's config alone."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.model.core import DECODER_IDS, divides_text, takes_decoder_ids

TRACE_TOKENS = 4  # few, so that following channels is cheap; more than one, so that mixing of tokens shows
MORE_TOKENS = 16  # for models that halve the sequence several times
LENGTHS = (400, 1600, 6400, 25600)  # of sound, in samples: the model's convolutions need a minimum
FRAMES = (16, 64, 128, 1024)  # numbers of frames of a spectrogram
TRACE_DECODER_TOKENS = 3  # not equal to the encoder's number, so that the two streams cannot be confused
IMAGE_SIZES = (32, 64, 224)  # pixels, tried after the config's own size


def examples(model: PreTrainedModel) -> list[Samples]:
    """Returns one sample for each shape that the model's main input may have, the likeliest first."""
    name, ids = model.main_input_name, torch.zeros((1, MORE_TOKENS), dtype=torch.int64)
    shapes = {"pixel_values": _images, "input_values": _sounds, "input_features": _spectrograms}.get(name)
    inputs = [torch.zeros(shape) for shape in shapes(model.config)] if shapes else [ids[:, :TRACE_TOKENS], ids]
    if not takes_decoder_ids(model):
        return [Samples({name: tensor}) for tensor in inputs]
    decoded = [ids[:, :TRACE_DECODER_TOKENS] if divides_text(model) else tensor.clone() for tensor in inputs]
    return [Samples({name: tensor, DECODER_IDS: read}) for tensor, read in zip(inputs, decoded, strict=True)]


def _images(config: Any) -> Iterator[tuple[int, ...]]:
    vision = getattr(config, "vision_config", None) or config
    channels, patch = getattr(vision, "num_channels", 3), getattr(vision, "patch_size", None)
    sizes = [getattr(vision, "image_size", None), 4 * patch if isinstance(patch, int) else None, *IMAGE_SIZES]
    frames = getattr(vision, "num_frames", None)
    for size in filter(None, sizes):
        height, width = (size, size) if isinstance(size, int) else size
        if frames:
            yield 1, frames, channels, height, width
        yield 1, channels, height, width


def _sounds(config: Any) -> Iterator[tuple[int, ...]]:
    if hasattr(config, "num_mel_bins"):  # ``input_values`` is a spectrogram
        yield 1, getattr(config, "max_length", FRAMES[-1]), config.num_mel_bins
    for length in LENGTHS:
        yield 1, length


def _spectrograms(config: Any) -> Iterator[tuple[int, ...]]:
    names = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size", "input_dim")
    bins = next((getattr(config, name) for name in names if hasattr(config, name)), 80)
    frames = [2 * positions for positions in [getattr(config, "max_source_positions", None)] if positions]
    for count in (*frames, *FRAMES):
        yield 1, bins, count
        yield 1, count, bins
