"""Samples that are stored as tensors in a file, for models of images or sound, or for any other."""

from collections.abc import Mapping
from typing import Any

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


def stored_samples(source: str, model: PreTrainedModel) -> Samples:
    """Returns the samples of a ``.safetensors`` file.

    Its tensors have the names of arguments of the model's ``forward``, and one row per sample.
    """
    if not source.endswith(TENSORS):
        raise CalibrationError(
            f"{source} is no {TENSORS} file, but {type(model).__name__} reads {model.main_input_name}: give a "
            f"{TENSORS} file with {model.main_input_name}, a row per sample, or in Python a tensor or DataLoader"
        )
    with reading(f"{source} cannot be read", CalibrationError):
        return tensor_samples(model, load_file(source))


def tensor_samples(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Samples:
    """Returns samples of tensors without labels, which only encoder-decoders read, and without a mask of ones."""
    labels = takes_decoder_ids(model)
    return Samples(
        {
            name: values
            for name, values in tensors.items()
            if (labels or name != "labels") and not (name == "attention_mask" and bool((values == 1).all()))
        }
    )
