"""Replaces modules of a model without weights by permuted and packed ones."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from permtriton.checkpoint.quantization_config import WHERE, NormEntry, Packed
from permtriton.errors import ModelError
from permtriton.kernels.norm_permute import NormVariant
from permtriton.kernels.packing import packed_shapes
from permtriton.model.headers import DTYPES, StoredTensor
from permtriton.model.modules import GatheredLinear, SparseLinear, from_norm, replace_module
from permtriton.util.permutation import index_dtype
from permtriton.util.sparsity import NMPattern


def device_of(name: str, device_map: Mapping[str, Any] | str | None) -> torch.device:
    """Returns the device on which transformers puts a parameter.

    Args:
        device_map: devices by module name; text such as "auto", which transformers has not resolved yet, means a GPU if
            there is one.
    """
    if isinstance(device_map, str):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = name.split(".")
    for length in range(len(parts), -1, -1):
        device = (device_map or {}).get(".".join(parts[:length]))
        if device is not None and device != "disk":
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.device("cpu")


def resolve_name(name: str, known: Any, prefix: str) -> str | None:
    """Returns the model's name for a tensor or module of the checkpoint, or None if the model does not have it.

    The names differ by a prefix if only the saved or only the loaded model is a base model without a head.

    Args:
        name: name in the checkpoint.
        known: names in the model.
        prefix: name of the base model inside a model with a head.
    """
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in candidates if candidate in known), None)


def find_name(name: str, known: set[str], model: Any) -> str | None:
    """Does what `resolve_name` does, but raises a `ModelError` if the model lacks a name that it must have.

    Returns:
        The model's name; None only for a part of another class's head.
    """
    resolved = resolve_name(name, known, model.base_model_prefix)
    same_class = type(model).__name__ in (model.config.architectures or ())
    if resolved is None and (same_class or name.startswith(f"{model.base_model_prefix}.")):
        raise ModelError(
            f"{WHERE} lists {name}, which the {type(model).__name__} of config.json does not have: the file is damaged"
        )
    return resolved


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module that holds a parameter, and the name of the parameter in that module."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def set_parameter(model: nn.Module, names: Iterable[str], parameter: nn.Parameter) -> None:
    """Sets ``parameter`` in the model under each of ``names``."""
    for name in names:
        owner, attribute = owner_of(model, name)
        setattr(owner, attribute, parameter)


def replace_by_permuted_norm(model: nn.Module, name: str, entry: NormEntry) -> None:
    """Replaces a norm by a permuted norm whose index is still to be loaded."""
    norm = model.get_submodule(name)
    channels = entry["channels"]
    weight = norm._parameters.get("weight")
    if weight is None or weight.shape != (channels,):
        raise ModelError(
            f"{WHERE}: {name} is not a norm with {channels} channels in this model: the file is damaged, or it "
            "belongs to another model"
        )
    index = torch.empty(channels, dtype=index_dtype(channels), device="meta")
    replace_module(model, name, from_norm(norm, NormVariant(entry["kind"], entry["eps"], entry["offset"]), index))


def replace_by_sparse_linear(model: nn.Module, name: str, kind: type[SparseLinear] = SparseLinear) -> None:
    """Replaces the linear that holds the parameter ``name`` by a `SparseLinear` of a kind."""
    path, _, _ = name.rpartition(".")
    linear = model.get_submodule(path)
    if not isinstance(linear, nn.Linear):
        raise ModelError(f"{WHERE}: {name} is not the weight of a linear in this model: the file is damaged")
    if not isinstance(linear, kind):
        replace_module(model, path, kind.from_linear(linear))


def replace_by_gathered_linear(model: nn.Module, name: str, channels: int) -> None:
    """Replaces the linear ``name`` by a `GatheredLinear` whose index is still to be loaded."""
    linear = model.get_submodule(name)
    if not isinstance(linear, nn.Linear) or linear.in_features != channels:
        raise ModelError(
            f"{WHERE}: {name} is not a linear with {channels} input channels in this model: the file is damaged, or "
            "it belongs to another model"
        )
    index = torch.empty(channels, dtype=index_dtype(channels), device="meta")
    replace_module(model, name, GatheredLinear.from_linear(linear, index))


def replace_by_packed(
    model: nn.Module,
    name: str,
    stored_name: str,
    dim: int,
    entry: Packed,
    stored: Mapping[str, StoredTensor],
    pattern: NMPattern,
) -> None:
    """Empties a parameter, and adds buffers for its packed values and positions, which are still to be loaded.

    Args:
        name: name of the parameter in the model.
        stored_name: name of the parameter in the checkpoint.
        dim: input dimension of the parameter in the model.
    """
    owner, attribute = owner_of(model, name)
    shape = entry["shape"]
    if dim != entry["dim"]:
        raise ModelError(f"{WHERE}: {entry['dim']} is not the input dimension of {stored_name}: the file is damaged")
    if list(getattr(owner, attribute).shape) != shape:
        raise ModelError(
            f"{WHERE}: {stored_name} has shape {shape}, but the model of config.json needs "
            f"{list(getattr(owner, attribute).shape)}: the file is damaged"
        )
    values, positions = stored.get(f"{stored_name}_values"), stored.get(f"{stored_name}_positions")
    if values is None or positions is None:
        raise ModelError(f"the checkpoint holds no packed weights for {stored_name}: it is incomplete")
    shapes = packed_shapes(torch.Size(shape).numel() // shape[dim], shape[dim], pattern)
    dtypes = {"F8_E4M3": torch.float8_e4m3fn} if "values" in entry else DTYPES
    if (values.shape, positions.shape) != shapes or values.dtype not in dtypes or positions.dtype != "U8":
        raise ModelError(
            f"{values.file}: {stored_name} is stored as {values.dtype} {list(values.shape)} and {positions.dtype} "
            f"{list(positions.shape)}, expected {' or '.join(dtypes)} {list(shapes[0])} and U8 {list(shapes[1])} for "
            f"{shape} at {pattern}: the checkpoint is damaged"
        )
    empty = torch.empty(0, dtype=getattr(owner, attribute).dtype, device="meta")
    setattr(owner, attribute, nn.Parameter(empty))  # transformers cannot initialize None
    owner.register_buffer(f"{attribute}_values", torch.empty(shapes[0], dtype=dtypes[values.dtype], device="meta"))
    owner.register_buffer(f"{attribute}_positions", torch.empty(shapes[1], dtype=torch.uint8, device="meta"))
    if "values" in entry:
        scale = stored.get(f"{stored_name}_scale")
        if scale is None or (scale.dtype, scale.shape) != ("F32", (shape[0],)):
            raise ModelError(f"the checkpoint holds no F32 scale [{shape[0]}] for {stored_name}: it is damaged")
        owner.register_buffer(f"{attribute}_scale", torch.empty(shape[0], dtype=torch.float32, device="meta"))
