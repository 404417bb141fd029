"""Makes place in a model without weights for what a permtriton checkpoint holds, and unpacks what was loaded."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from permtriton.checkpoint import FLOATS, StoredTensor
from permtriton.errors import ModelError
from permtriton.kernels.launch import has_kernels
from permtriton.kernels.norm_permute import NormVariant
from permtriton.kernels.packing import check_packed, pack, packed_shapes, unpack
from permtriton.kernels.packing_triton import supports
from permtriton.modules import PermutedLayerNorm, PermutedRMSNorm, SparseLinear, from_norm, index_dtype, replace_module
from permtriton.schema import PermTritonQuantizationConfig
from permtriton.sparsity import NMPattern

_WHERE = "config.json, quantization_config"


def unpacked(
    name: str, values: Tensor, positions: Tensor, shape: Sequence[int], dim: int, kept: int, group: int
) -> Tensor:
    """Returns the parameter that was packed, in its own orientation, after checking everything about it.

    Args:
        name: for messages.
        values: as stored.
        positions: as stored.
        shape: of the parameter.
        dim: its input dimension.
        kept: weights kept in a group.
        group: consecutive channels in a group.

    Raises:
        ModelError: it cannot have been packed by permtriton.
    """
    outer = [size for position, size in enumerate(shape) if position != dim]
    check_content(name, values, positions, shape, dim, kept, group)
    weight = unpack(values, positions, shape[dim], kept, group)
    return weight.view(*outer, shape[dim]).movedim(-1, dim).contiguous()


def check_content(
    name: str, values: Tensor, positions: Tensor, shape: Sequence[int], dim: int, kept: int, group: int
) -> None:
    """Refuses what `permtriton.kernels.packing.pack` cannot have made of a parameter; the arguments of `unpacked`.

    Raises:
        ModelError: with ``name`` and what is wrong.
    """
    rows = torch.Size(shape).numel() // shape[dim]
    try:
        check_packed(values, positions, rows, shape[dim], kept, group)
    except ModelError as error:
        raise ModelError(f"{name}: {error}; the checkpoint is damaged") from error


def stays_packed(
    owner: nn.Module, attribute: str, dtype: torch.dtype, pattern: NMPattern, device: torch.device
) -> bool:
    """Whether a packed parameter is multiplied as it is: a linear's 2:4 weight in 16 bits, on a GPU with kernels."""
    if type(owner) not in (nn.Linear, SparseLinear) or attribute != "weight" or dtype.itemsize != 2:
        return False
    in_features = owner.get_parameter("weight").shape[1]
    return supports(dtype, in_features, pattern.kept, pattern.group) and has_kernels(device)


def packed_as(
    values: Tensor, positions: Tensor, in_features: int, pattern: NMPattern, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the packed form of a packed weight in another dtype, in which small weights may be zeros.

    Raises:
        ModelError: a weight is not finite in ``dtype``.
    """
    weight = unpack(values, positions, in_features, pattern.kept, pattern.group)
    return pack(weight.to(dtype) + 0.0, pattern.kept, pattern.group)  # never -0.0


def device_of(name: str, device_map: Mapping[str, Any] | str | None) -> torch.device:
    """Returns where transformers puts a parameter; a GPU where it is still to be decided and there is one."""
    if isinstance(device_map, str):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = name.split(".")
    for length in range(len(parts), -1, -1):
        found = (device_map or {}).get(".".join(parts[:length]))
        if found is not None and found != "disk":
            return torch.device("cuda", found) if isinstance(found, int) else torch.device(found)
    return torch.device("cpu")


def is_permuted(module: nn.Module) -> bool:
    """Whether a module brings channels into another order at run time."""
    gathers = isinstance(module, SparseLinear) and module.gather is not None
    return gathers or isinstance(module, PermutedRMSNorm | PermutedLayerNorm)


def is_packed(module: nn.Module) -> TypeGuard[SparseLinear]:
    """Whether a module holds its weight packed."""
    return isinstance(module, SparseLinear) and module.pattern is not None


def resolve(name: str, known: Any, prefix: str) -> str | None:
    """Returns a checkpoint's name as the model has it, which may be its base model or hold it; None for neither."""
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in candidates if candidate in known), None)


def find(name: str, known: set[str], model: Any) -> str | None:
    """Returns `resolve`'s answer; None only in a class that the checkpoint was not made of, outside its base.

    Raises:
        ModelError: the model does not have what it must have.
    """
    found = resolve(name, known, model.base_model_prefix)
    own = type(model).__name__ in (model.config.architectures or ())
    if found is None and (own or name.startswith(f"{model.base_model_prefix}.")):
        raise ModelError(
            f"{_WHERE} tells of {name}, which the {type(model).__name__} of config.json "
            "does not have: the file is damaged"
        )
    return found


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module that holds a parameter, and the parameter's name in it."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def swap_norm(model: nn.Module, name: str, entry: Mapping[str, Any]) -> nn.Module:
    """Puts a permuted norm in the place of a norm, and returns the latter.

    Raises:
        ModelError: there is no norm of so many channels.
    """
    norm = model.get_submodule(name)
    channels = entry["channels"]
    weight = norm._parameters.get("weight")
    if weight is None or weight.shape != (channels,):
        raise ModelError(f"{_WHERE}: {name} is no norm of {channels} channels in this model")
    index = torch.empty(channels, dtype=index_dtype(channels), device="meta")
    replace_module(model, name, from_norm(norm, NormVariant(entry["kind"], entry["eps"], entry["offset"]), index))
    return norm


def swap_linear(model: nn.Module, name: str) -> None:
    """Puts a linear that can hold its weight packed in the place of the linear that holds the parameter ``name``."""
    path, _, _ = name.rpartition(".")
    linear = model.get_submodule(path)
    assert isinstance(linear, nn.Linear)
    if not isinstance(linear, SparseLinear):
        replace_module(model, path, SparseLinear.from_linear(linear))


def swap_gather(model: nn.Module, name: str, channels: int) -> None:
    """Puts a linear that gathers its input in the place of a linear.

    Raises:
        ModelError: there is no linear of so many input channels.
    """
    linear = model.get_submodule(name)
    if not isinstance(linear, nn.Linear) or linear.in_features != channels:
        raise ModelError(f"{_WHERE}: {name} is no linear layer of {channels} input channels in this model")
    index = torch.empty(channels, dtype=index_dtype(channels), device="meta")
    replace_module(model, name, SparseLinear.from_linear(linear, index))


def swap_parameter(
    model: nn.Module,
    name: str,
    stored_name: str,
    entry: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    config: PermTritonQuantizationConfig,
) -> None:
    """Puts empty values and positions beside a parameter, which becomes empty.

    Args:
        model: without weights, on the meta device.
        name: of the parameter in the model.
        stored_name: in the checkpoint.
        entry: what the config tells of it.
        stored: what the files hold.
        config: for the pattern.

    Raises:
        ModelError: model, config and files do not fit together.
    """
    owner, attribute = owner_of(model, name)
    shape, dim, pattern = entry["shape"], entry["dim"], config.pattern
    if dim != (0 if isinstance(owner, Conv1D) else len(shape) - 1):
        raise ModelError(f"{_WHERE}: {dim} is not the input dimension of {stored_name}: the file is damaged")
    if list(getattr(owner, attribute).shape) != shape:
        raise ModelError(
            f"{_WHERE}: {stored_name} has shape {shape}, in the model of config.json "
            f"it has {list(getattr(owner, attribute).shape)}: the file is damaged"
        )
    values, positions = packed_parts(stored_name, stored)
    shapes = packed_shapes(torch.Size(shape).numel() // shape[dim], shape[dim], pattern.kept, pattern.group)
    if (values.shape, positions.shape) != shapes or values.dtype not in FLOATS or positions.dtype != "U8":
        raise ModelError(
            f"{values.file}: {stored_name} is stored as {values.dtype} {list(values.shape)} and {positions.dtype} "
            f"{list(positions.shape)}, expected floating-point {list(shapes[0])} and U8 {list(shapes[1])} for "
            f"{shape} at {pattern}: the checkpoint is damaged"
        )
    dtype = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[values.dtype]
    empty = torch.empty(0, dtype=getattr(owner, attribute).dtype, device="meta")
    setattr(owner, attribute, nn.Parameter(empty))  # transformers would stumble over None where it initializes
    owner.register_buffer(f"{attribute}_values", torch.empty(shapes[0], dtype=dtype, device="meta"))
    owner.register_buffer(f"{attribute}_positions", torch.empty(shapes[1], dtype=torch.uint8, device="meta"))


def packed_parts(name: str, stored: Mapping[str, StoredTensor]) -> tuple[StoredTensor, StoredTensor]:
    """Returns where values and positions of a packed parameter are.

    Raises:
        ModelError: either is missing.
    """
    parts = [stored.get(f"{name}_{part}") for part in ("values", "positions")]
    if parts[0] is None or parts[1] is None:
        raise ModelError(
            f"the checkpoint holds no packed weights for {name}: it is incomplete, or its config is damaged"
        )
    return parts[0], parts[1]
