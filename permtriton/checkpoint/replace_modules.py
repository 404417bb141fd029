"""Replaces modules of a model without weights by permuted and packed ones."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.integrations.accelerate import get_device

from permtriton.checkpoint.quantization_config import WHERE, NormEntry, Packed
from permtriton.errors import ModelError
from permtriton.kernels.norm_permute import NormVariant
from permtriton.kernels.packing import packed_shapes
from permtriton.model.headers import DTYPES, StoredTensor
from permtriton.model.modules import GatheredLinear, from_norm, replace_module
from permtriton.util.permutation import index_dtype
from permtriton.util.sparsity import NMPattern

FP8, POSITIONS, SCALES = {"F8_E4M3": torch.float8_e4m3fn}, {"U8": torch.uint8}, {"F32": torch.float32}


def device_of(name: str, device_map: Mapping[str, Any] | str | None) -> torch.device:
    """Returns the device on which transformers puts a parameter; "auto", not resolved yet, is a GPU if there is one."""
    if isinstance(device_map, str):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = get_device(dict(device_map) if device_map else None, name, valid_torch_device=True)
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def resolve_name(name: str, known: Any, prefix: str) -> str | None:
    """Returns which of the ``known`` names of a model a tensor or module of the checkpoint has; None if it has none.

    The names differ by ``prefix``, a base model's, if only the saved or only the loaded model has a head.
    """
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in candidates if candidate in known), None)


def find_name(name: str, known: set[str], model: Any) -> str | None:
    """Does what `resolve_name` does, but returns None only for a part of another class's head, else it refuses."""
    resolved = resolve_name(name, known, model.base_model_prefix)
    same_class = type(model).__name__ in (model.config.architectures or ())
    if resolved is None and (same_class or name.startswith(f"{model.base_model_prefix}.")):
        raise ModelError(
            f"{WHERE} lists {name}, which the {type(model).__name__} of config.json does not have: the file is damaged"
        )
    return resolved


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def set_parameter(model: nn.Module, names: Iterable[str], parameter: nn.Parameter) -> None:
    for name in names:
        owner, attribute = owner_of(model, name)
        setattr(owner, attribute, parameter)


def replace_by_permuted(model: nn.Module, name: str, channels: int, norm: NormEntry | None) -> None:
    """Replaces a norm, or a linear if ``norm`` is None, by a module that permutes; its index is still to be loaded."""
    module: Any = model.get_submodule(name)
    index = torch.empty(channels, dtype=index_dtype(channels), device="meta")
    weight = module._parameters.get("weight")
    if weight is None or weight.shape[-1] != channels or (norm is None) != isinstance(module, nn.Linear):
        raise ModelError(
            f"{WHERE}: {name} is not a {'norm' if norm else 'linear'} with {channels} input channels in this model: "
            "the file is damaged, or it belongs to another model"
        )
    if norm is None:
        replace_module(model, name, GatheredLinear.from_linear(module, index))
    else:
        replace_module(model, name, from_norm(module, NormVariant(norm["kind"], norm["eps"], norm["offset"]), index))


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
        name, stored_name: of the parameter in the model, and in the checkpoint.
        dim: input dimension of the parameter in the model.
    """
    owner, attribute = owner_of(model, name)
    shape, parameter = entry["shape"], getattr(owner, attribute)
    if (list(parameter.shape), dim) != (shape, entry["dim"]):
        raise ModelError(
            f"{WHERE}: {stored_name} has shape {shape} and the input dimension {entry['dim']}, but the model of "
            f"config.json needs {list(parameter.shape)} and {dim}: the file is damaged"
        )
    values, positions = packed_shapes(parameter.numel() // shape[dim], shape[dim], pattern)
    sizes: dict[str, tuple[int, ...]] = {"_values": values, "_positions": positions}
    if "values" in entry:
        sizes["_scale"] = (shape[0],)
    for part, size in sizes.items():
        found = stored.get(stored_name + part)
        dtypes = {"_values": FP8 if "values" in entry else DTYPES, "_positions": POSITIONS, "_scale": SCALES}[part]
        if found is None or found.shape != size or found.dtype not in dtypes:
            raise ModelError(
                f"{stored_name}{part} is {f'{found.dtype} {list(found.shape)}' if found else 'missing'}, expected "
                f"{' or '.join(dtypes)} {list(size)} for {shape} at {pattern}: the checkpoint is damaged or incomplete"
            )
        owner.register_buffer(attribute + part, torch.empty(size, dtype=dtypes[found.dtype], device="meta"))
    # transformers cannot initialize None
    setattr(owner, attribute, nn.Parameter(torch.empty(0, dtype=parameter.dtype, device="meta")))
