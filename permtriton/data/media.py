"""Samples that are made of tensors, in a file or in memory: for models of images or sound, or for any other."""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError, reading
from permtriton.model.core import takes_decoder_ids

TENSORS = ".safetensors"
MEDIA_INPUTS = ("pixel_values", "input_values", "input_features")  # main inputs of models of images or sound

Processor = Any  # a tokenizer, processor, image processor or feature extractor of transformers


def is_media(model: PreTrainedModel, source: str) -> bool:
    """Returns whether ``source`` holds no text: the model reads images or sound, or it is a file of tensors."""
    return model.main_input_name in MEDIA_INPUTS or source.endswith(TENSORS)


def tensors_of(data: Any, model: PreTrainedModel, most: int | None = None) -> Samples:
    """Returns samples that are made of tensors: one row of each tensor per sample.

    Labels are left out, except for encoder-decoders, which read them. An attention mask of ones is left out, too.

    Args:
        data: tensor of the model's main input (token ids, int64 ``[samples, tokens]``); tensors by the names of
            arguments of the model's ``forward``; or a loader of batches of either.
        most: number of samples to take, the first ones; None for all.
    """
    if isinstance(data, Samples):
        return data[:most]
    if isinstance(data, DataLoader):
        return _of_loader(data, model, most)
    with reading("data cannot be made into tensors", CalibrationError):
        named = data if isinstance(data, Mapping) else {model.main_input_name: data}
        tensors = {name: torch.as_tensor(values) for name, values in named.items()}
    if not takes_decoder_ids(model):
        tensors.pop("labels", None)
    if (mask := tensors.get("attention_mask")) is not None and bool((mask == 1).all()):
        del tensors["attention_mask"]
    return Samples(tensors)[:most]


def stored_samples(source: str, model: PreTrainedModel) -> Samples:
    """Returns the samples of a ``.safetensors`` file, whose tensors have names as `tensors_of` takes them."""
    if not source.endswith(TENSORS):
        raise CalibrationError(
            f"{source} is no {TENSORS} file, but {type(model).__name__} reads {model.main_input_name}: give a "
            f"{TENSORS} file with {model.main_input_name}, a row per sample, or in Python a tensor or DataLoader"
        )
    with reading(f"{source} cannot be read", CalibrationError):
        return tensors_of(load_file(source), model)


def _of_loader(loader: DataLoader, model: PreTrainedModel, most: int | None) -> Samples:
    """Returns the first ``most`` samples of a loader; of a batch that is a tuple or list, only item 0 is read."""
    batches = list[Samples]()
    for batch in loader:
        batches.append(tensors_of(batch[0] if isinstance(batch, list | tuple) else batch, model))
        if most is not None and sum(map(len, batches)) >= most:
            break
    if not batches:
        raise CalibrationError("the DataLoader gave no batch: give one that has data")
    advice = "give samples of one length, without padding"
    with reading(f"the batches of the DataLoader cannot be joined ({advice})", CalibrationError):
        return batches[0].joined(*batches[1:])[:most]
