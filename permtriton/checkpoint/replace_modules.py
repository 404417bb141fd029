"""Replaces modules of a model without weights by permuted and packed ones."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations.accelerate import get_device
from transformers.quantizers.quantizers_utils import get_module_from_name

from permtriton.checkpoint.quantization_config import WHERE, NormEntry, Packed
from permtriton.errors import ModelError
from permtriton.kernels.norm_permute import NormVariant
from permtriton.kernels.packing import packed_shapes
from permtriton.model.headers import DTYPES, StoredTensor
from permtriton.model.modules import GatheredLinear, from_norm, replace_module
from permtriton.util.permutation import index_dtype
from permtriton.util.sparsity import NMPattern

FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class PackedParameter:
    """A packed parameter of a model that is loaded."""

    names: list[str]  # its names in the model, several where layers share it
    stored_name: str  # its name among the stored tensors
    dim: int  # its input dimension in the model
    entry: Packed
    pattern: NMPattern


def device_of(name: str, device_map: Mapping[str, Any] | str | None) -> torch.device:
    """Returns the device on which transformers puts a parameter: for a text such as "auto", a GPU if there is one."""
    if isinstance(device_map, str):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = get_device(dict(device_map) if device_map else None, name, valid_torch_device=True)
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def set_parameter(model: nn.Module, names: Iterable[str], parameter: nn.Parameter) -> None:
    for name in names:
        owner, attribute = get_module_from_name(model, name)
        setattr(owner, attribute, parameter)


def replace_by_permuted(model: nn.Module, name: str, channels: int, norm: NormEntry | None) -> None:
    """Replaces a norm, or a linear if ``norm`` is None, by a module that permutes, whose index is loaded later."""
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


def replace_by_packed(model: nn.Module, packed: PackedParameter, stored: Mapping[str, StoredTensor]) -> None:
    """Empties a parameter, and adds buffers for its packed parts, which are loaded later."""
    owner, attribute = get_module_from_name(model, packed.names[0])
    name, entry, dim, pattern = packed.stored_name, packed.entry, packed.dim, packed.pattern
    shape, parameter = entry["shape"], getattr(owner, attribute)
    if (list(parameter.shape), dim) != (shape, entry["dim"]):
        raise ModelError(
            f"{WHERE}: {name} has shape {shape} and the input dimension {entry['dim']}, but the model of config.json "
            f"needs {list(parameter.shape)} and {dim}: the file is damaged"
        )
    values, positions = packed_shapes(parameter.numel() // shape[dim], shape[dim], pattern)
    in_fp8, uint8 = "values" in entry, {"U8": torch.uint8}
    parts: list[tuple[str, tuple[int, ...], Mapping[str, torch.dtype]]]
    parts = [("_values", values, FLOAT8 if in_fp8 else DTYPES), ("_positions", positions, uint8)]
    parts += [("_scale", (shape[0],), {"F32": torch.float32})] * in_fp8
    for part, size, dtypes in parts:
        found = stored.get(name + part)
        if found is None or found.shape != size or found.dtype not in dtypes:
            raise ModelError(
                f"{name}{part} is {f'{found.dtype} {list(found.shape)}' if found else 'missing'}, expected "
                f"{' or '.join(dtypes)} {list(size)} for {shape} at {pattern}: the checkpoint is damaged or incomplete"
            )
        owner.register_buffer(attribute + part, torch.empty(size, dtype=dtypes[found.dtype], device="meta"))
    # transformers cannot initialize None
    set_parameter(model, packed.names, nn.Parameter(torch.empty(0, dtype=parameter.dtype, device="meta")))
