"""Prepares a model without weights for the tensors of a permtriton checkpoint, and unpacks loaded weights."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from permtriton.checkpoint.schema import PermTritonQuantizationConfig
from permtriton.errors import ModelError
from permtriton.kernels.launch import has_kernels
from permtriton.kernels.norm_permute import NormVariant
from permtriton.kernels.packing import check_packed, pack, packed_shapes, unpack
from permtriton.kernels.packing_triton import supports
from permtriton.model.modules import (
    GatheredLinear,
    SparseLinear,
    from_norm,
    index_dtype,
    replace_module,
)
from permtriton.model.stored import FLOATS, StoredTensor
from permtriton.sparsity import NMPattern

_WHERE = "config.json, quantization_config"


def unpacked(
    name: str, values: Tensor, positions: Tensor, shape: Sequence[int], dim: int, pattern: NMPattern
) -> Tensor:
    """Checks a packed parameter and returns it unpacked, in its own shape.

    Args:
        name: name of the parameter, for errors.
        values: stored values, as `permtriton.kernels.packing.pack` returns them.
        positions: stored positions, as the same function returns them.
        shape: shape of the parameter.
        dim: input dimension of the parameter.
        pattern: N:M pattern of the parameter.

    Raises:
        ModelError: as `check_content`.
    """
    outer = [size for position, size in enumerate(shape) if position != dim]
    check_content(name, values, positions, shape, dim, pattern)
    weight = unpack(values, positions, shape[dim], pattern)
    return weight.view(*outer, shape[dim]).movedim(-1, dim).contiguous()


def check_content(
    name: str, values: Tensor, positions: Tensor, shape: Sequence[int], dim: int, pattern: NMPattern
) -> None:
    """Refuses values and positions that `permtriton.kernels.packing.pack` cannot have made; see `unpacked`.

    Raises:
        ModelError: they are damaged; the message says which parameter and how.
    """
    rows = torch.Size(shape).numel() // shape[dim]
    try:
        check_packed(values, positions, rows, shape[dim], pattern)
    except ModelError as error:
        raise ModelError(f"{name}: {error}; the checkpoint is damaged") from error


def stays_packed(
    owner: nn.Module, attribute: str, dtype: torch.dtype, pattern: NMPattern, device: torch.device
) -> bool:
    """Whether a packed parameter stays packed, because a kernel multiplies it in that form.

    Args:
        owner: module that holds the parameter.
        attribute: name of the parameter in that module.
        dtype: dtype that it will have.
        pattern: N:M pattern of the parameter.
        device: device that it will be on.

    Returns:
        True for the weight of a linear for which `runs_packed` is true.
    """
    if type(owner) not in (nn.Linear, GatheredLinear, SparseLinear) or attribute != "weight":
        return False
    return runs_packed(owner.get_parameter("weight").shape[1], dtype, pattern, device)


def runs_packed(in_features: int, dtype: torch.dtype, pattern: NMPattern, device: torch.device) -> bool:
    """Whether a kernel multiplies the packed weight of a linear: 2:4, in 16 bits, on a GPU with kernels.

    Args:
        in_features: number of input channels, on this rank if several ranks divide them.
        dtype: dtype that the weight will have.
        pattern: its N:M pattern.
        device: device that it will be on.
    """
    return dtype.itemsize == 2 and supports(dtype, in_features, pattern) and has_kernels(device)


def cast_packed(
    values: Tensor, positions: Tensor, in_features: int, pattern: NMPattern, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Casts a packed weight to ``dtype`` and packs it again, because small weights may have become zeros.

    Raises:
        ModelError: a weight is not finite in ``dtype``.
    """
    weight = unpack(values, positions, in_features, pattern)
    return pack(weight.to(dtype) + 0.0, pattern)  # never -0.0


def device_of(name: str, device_map: Mapping[str, Any] | str | None) -> torch.device:
    """Returns the device on which transformers puts a parameter.

    Args:
        name: name of the parameter.
        device_map: devices by module name; as text (such as "auto") it is not decided yet, and means a GPU if there is
            one.
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

    The names differ by a prefix if only one of them is a base model without a head.

    Args:
        name: name in the checkpoint.
        known: names in the model.
        prefix: name of the base model inside a model with a head.
    """
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in candidates if candidate in known), None)


def find_name(name: str, known: set[str], model: Any) -> str | None:
    """Does what `resolve_name` does, and refuses a name that the model must have.

    Returns:
        The model's name; None only for a part of another class's head.

    Raises:
        ModelError: the model does not have the name, although it is the class of the checkpoint or the name is in the
            base model.
    """
    found = resolve_name(name, known, model.base_model_prefix)
    same_class = type(model).__name__ in (model.config.architectures or ())
    if found is None and (same_class or name.startswith(f"{model.base_model_prefix}.")):
        raise ModelError(
            f"{_WHERE} lists {name}, which the {type(model).__name__} of config.json does not have: the file is damaged"
        )
    return found


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module that holds a parameter, and the name of the parameter in that module."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def set_parameter(model: nn.Module, names: Iterable[str], parameter: nn.Parameter) -> None:
    """Makes a parameter what the model holds under each of ``names``."""
    for name in names:
        owner, attribute = owner_of(model, name)
        setattr(owner, attribute, parameter)


def replace_by_permuted_norm(model: nn.Module, name: str, entry: Mapping[str, Any]) -> nn.Module:
    """Replaces a norm by a permuted norm whose index is still to be loaded.

    Args:
        model: model on the meta device.
        name: name of the norm in the model.
        entry: its entry in the config.

    Returns:
        The norm that was replaced.

    Raises:
        ModelError: the module is not a norm with the entry's number of channels.
    """
    norm = model.get_submodule(name)
    channels = entry["channels"]
    weight = norm._parameters.get("weight")
    if weight is None or weight.shape != (channels,):
        raise ModelError(
            f"{_WHERE}: {name} is not a norm with {channels} channels in this model: the file is damaged, or it "
            "belongs to another model"
        )
    index = torch.empty(channels, dtype=index_dtype(channels), device="meta")
    replace_module(model, name, from_norm(norm, NormVariant(entry["kind"], entry["eps"], entry["offset"]), index))
    return norm


def replace_by_sparse_linear(model: nn.Module, name: str) -> None:
    """Replaces the linear that holds the parameter ``name`` by a `SparseLinear`."""
    path, _, _ = name.rpartition(".")
    linear = model.get_submodule(path)
    assert isinstance(linear, nn.Linear)
    if not isinstance(linear, SparseLinear):
        replace_module(model, path, SparseLinear.from_linear(linear))


def replace_by_gathered_linear(model: nn.Module, name: str, channels: int) -> None:
    """Replaces the linear ``name`` by a `GatheredLinear` whose index is still to be loaded.

    Raises:
        ModelError: the module is not a linear with that number of input channels.
    """
    linear = model.get_submodule(name)
    if not isinstance(linear, nn.Linear) or linear.in_features != channels:
        raise ModelError(
            f"{_WHERE}: {name} is not a linear with {channels} input channels in this model: the file is damaged, or "
            "it belongs to another model"
        )
    index = torch.empty(channels, dtype=index_dtype(channels), device="meta")
    replace_module(model, name, GatheredLinear.from_linear(linear, index))


def replace_by_packed(
    model: nn.Module,
    name: str,
    stored_name: str,
    dim: int,
    entry: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    config: PermTritonQuantizationConfig,
) -> None:
    """Empties a parameter, and adds buffers for its packed values and positions, which are still to be loaded.

    Args:
        model: model on the meta device.
        name: name of the parameter in the model.
        stored_name: name of the parameter in the checkpoint.
        dim: input dimension of the parameter in the model.
        entry: its entry in the config.
        stored: tensor name -> description of the stored tensor.
        config: entries of the config; gives the pattern.

    Raises:
        ModelError: model, config and files do not fit together.
    """
    owner, attribute = owner_of(model, name)
    shape, pattern = entry["shape"], config.pattern
    if dim != entry["dim"]:
        raise ModelError(f"{_WHERE}: {entry['dim']} is not the input dimension of {stored_name}: the file is damaged")
    if list(getattr(owner, attribute).shape) != shape:
        raise ModelError(
            f"{_WHERE}: {stored_name} has shape {shape}, but the model of config.json needs "
            f"{list(getattr(owner, attribute).shape)}: the file is damaged"
        )
    values, positions = packed_parts(stored_name, stored)
    shapes = packed_shapes(torch.Size(shape).numel() // shape[dim], shape[dim], pattern)
    if (values.shape, positions.shape) != shapes or values.dtype not in FLOATS or positions.dtype != "U8":
        raise ModelError(
            f"{values.file}: {stored_name} is stored as {values.dtype} {list(values.shape)} and {positions.dtype} "
            f"{list(positions.shape)}, expected floating-point {list(shapes[0])} and U8 {list(shapes[1])} for "
            f"{shape} at {pattern}: the checkpoint is damaged"
        )
    dtype = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[values.dtype]
    empty = torch.empty(0, dtype=getattr(owner, attribute).dtype, device="meta")
    setattr(owner, attribute, nn.Parameter(empty))  # transformers fails on None when it initializes
    owner.register_buffer(f"{attribute}_values", torch.empty(shapes[0], dtype=dtype, device="meta"))
    owner.register_buffer(f"{attribute}_positions", torch.empty(shapes[1], dtype=torch.uint8, device="meta"))


def packed_parts(name: str, stored: Mapping[str, StoredTensor]) -> tuple[StoredTensor, StoredTensor]:
    """Returns the descriptions of a packed parameter's values and positions.

    Raises:
        ModelError: either is missing.
    """
    values, positions = stored.get(f"{name}_values"), stored.get(f"{name}_positions")
    if values is None or positions is None:
        raise ModelError(
            f"the checkpoint holds no packed weights for {name}: it is incomplete, or its config is damaged"
        )
    return values, positions
