"""Models whose weights are not on this machine, built from their config and the headers of their weights."""

from contextlib import suppress
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import nn
from transformers import PreTrainedModel

from permtriton.errors import ModelError, reading
from permtriton.model.headers import DTYPES, checkpoint_files
from permtriton.model.load import check_folder, load_empty_model
from permtriton.model.source import Source, dtype_of
from permtriton.model.tokenizer import load_processor
from permtriton.util.progress import Progress

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def is_here(source: Source) -> bool:
    """Returns whether a model's weights are on this machine: in a folder or a file, or in the cache of the hub.

    A folder with a config but without weights does not count: the config only tells how large a model would be.
    """
    check_folder(source)
    if source.gguf is not None:  # on the hub, a GGUF file can only be fetched whole
        return True
    if not source.on_hub:
        return any(file.suffix in WEIGHTS for file in source.folder.iterdir())
    with suppress(ModelError):  # none of the files, or not all of them
        return bool(checkpoint_files(source.folder))
    return False


def load_outline(source: Source, progress: Progress) -> tuple[PreTrainedModel, Any]:
    """Builds a model on the meta device from its config and, on the hub, its weights' headers; no weight is fetched.

    Returns:
        The model, in the dtype that `load_model` would give it, and its tokenizer or processor.
    """
    progress.say(f"loading {source.described}")
    model = load_empty_model(source)
    stored: dict[str, Any] = {}
    if source.on_hub:
        with reading(f"{source.name}: the headers of its weights cannot be fetched from the hub", ModelError):
            headers = HfApi(token=source.token).get_safetensors_metadata(source.name, revision=source.revision)
            stored = {name: tensor for file in headers.files_metadata.values() for name, tensor in file.tensors.items()}
    dtype = dtype_of(source)
    if dtype == "auto" and model.config.dtype is None:
        dtype = next((DTYPES[tensor.dtype] for tensor in stored.values() if tensor.dtype in DTYPES), dtype)
    if isinstance(dtype, torch.dtype):
        model = nn.Module.to(model, dtype=dtype)
    return model, load_processor(source, model)
