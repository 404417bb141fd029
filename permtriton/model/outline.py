"""Models whose weights are not on this machine, built from their config and the headers of their weights."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from torch import nn
from transformers import PreTrainedModel

from permtriton.errors import ModelError, reading
from permtriton.model.headers import CONFIG_FILE, DTYPES, checkpoint_files
from permtriton.model.load import check_folder, load_empty_model
from permtriton.model.name import is_hub_name
from permtriton.model.source import Source, dtype_of
from permtriton.model.tokenizer import load_processor

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def is_here(source: Source) -> bool:
    """Returns whether a model's weights are on this machine: in a folder or a file, or in the cache of the hub.

    A folder with a config but without weights does not count: it only tells how large a model would be.
    """
    if source.folder is not None and source.gguf_file is None and (source.folder / CONFIG_FILE).is_file():
        return any(file.suffix in WEIGHTS for file in source.folder.iterdir())
    if source.gguf_file is not None or source.folder is not None or source.gguf is not None:
        return True  # a GGUF file on the hub can only be fetched whole
    check_folder(source)
    config = cached(source, CONFIG_FILE)
    with suppress(ModelError):
        return config is not None and all(map(Path.is_file, checkpoint_files(config.parent)))
    return False


def load_outline(source: Source) -> tuple[PreTrainedModel, Any]:
    """Builds a model on the meta device from its config and, on the hub, its weights' headers; no weight is fetched.

    Returns:
        The model, in the dtype that `load_model` would give it, and its tokenizer or processor.
    """
    model = load_empty_model(source)
    stored = {}
    if source.folder is None:
        with reading(f"{source.name}: the headers of its weights cannot be fetched from the hub", ModelError):
            headers = HfApi(token=source.token).get_safetensors_metadata(source.name, revision=source.revision)
            stored = {name: tensor for file in headers.files_metadata.values() for name, tensor in file.tensors.items()}
    for name, parameter in model.named_parameters():
        if name in stored and list(parameter.shape) != stored[name].shape:
            raise ModelError(
                f"{source.name}: {name} has the shape {stored[name].shape}, but {type(model).__name__} with this "
                f"config.json needs {list(parameter.shape)}: a size in config.json is damaged, or it belongs to other "
                "weights"
            )
    dtype = dtype_of(source)
    if dtype == "auto" and model.config.dtype is None:
        dtype = next((DTYPES[tensor.dtype] for tensor in stored.values() if tensor.dtype in DTYPES), dtype)
    if isinstance(dtype, torch.dtype):
        model = nn.Module.to(model, dtype=dtype)
    return model, load_processor(source, model)


def cached(source: Source, file: str) -> Path | None:
    """Returns a file of a hub name from the cache on this machine; None if it is not there."""
    path = try_to_load_from_cache(source.name, file, revision=source.revision) if is_hub_name(source.name) else None
    return Path(path) if isinstance(path, str) else None
