"""Samples that are stored as tensors in a file, for models of images or sound, or for any other."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError, reading
from permtriton.model.core import takes_decoder_ids

TENSORS = ".safetensors"
MEDIA_INPUTS = ("pixel_values", "input_values", "input_features")  # main inputs of models of images or sound

Processor = Any  # a tokenizer, processor, image processor or feature extractor of transformers


def is_media(model: PreTrainedModel, source: str) -> bool:
    """Whether samples come from this module: the model reads images or sound, or the source holds tensors."""
    return model.main_input_name in MEDIA_INPUTS or source.endswith(TENSORS)


def stored_samples(
    source: str, model: PreTrainedModel, count: int | None, generator: torch.Generator | None = None
) -> Samples:
    """Returns samples of tensors in a file.

    Args:
        source: a ``.safetensors`` file whose tensors have the names of arguments of the model's ``forward`` and one row
            per sample.
        count: number of samples to draw; None for all.
        generator: generator of the draw; None takes the samples in order.
    """
    if not source.endswith(TENSORS):
        raise CalibrationError(
            f"{source} is no {TENSORS} file, but {type(model).__name__} reads {model.main_input_name}: give a "
            f"{TENSORS} file with {model.main_input_name}, a row per sample, or in Python a tensor or DataLoader"
        )
    if os.path.exists(source) and not os.path.isfile(source):  # a pipe might never end
        raise CalibrationError(f"{source} is no plain file: give a {TENSORS} file")
    with reading(f"{source} cannot be read", CalibrationError):
        stored = Samples(inputs_for(model, load_file(source)))
    if count is not None and len(stored) < count:
        held = f"{len(stored)} sample{'' if len(stored) == 1 else 's'}"
        raise CalibrationError(f"{source} holds {held}, but {count} are needed: lower `samples=`, or add more")
    order = torch.arange(len(stored)) if generator is None else torch.randperm(len(stored), generator=generator)
    left = order[len(stored) if count is None else count :]
    return replace(stored[order[:count]], surplus=stored[left] if left.numel() and stored.is_text else None)


def inputs_for(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors without labels, which only encoder-decoders read, and without a mask of ones."""
    labels = takes_decoder_ids(model)
    return {
        name: values
        for name, values in tensors.items()
        if (labels or name != "labels") and not (name == "attention_mask" and bool((values == 1).all()))
    }
