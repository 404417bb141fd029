"""A quantizer of transformers, by which ``from_pretrained`` and ``save_pretrained`` read and write our checkpoints.

Loading is strict: a tensor that is missing, damaged or of another shape is an error. Linears in FP8 stay packed, and so
do others on a GPU if a kernel multiplies them in that form; all other packed parameters become dense. A model that then
has no packed and no permuted modules is a plain transformers model. Any other model keeps its ``quantization_config``,
and ``save_pretrained`` writes it in the format "packed", "packed-fp8" or "dense".

transformers alone must not load such a checkpoint, but would only warn that it does not know the quantizer. Therefore
it finds tensors of other shapes than it expects: a packed parameter is stored as an empty tensor, and the weight of a
permuted norm or linear with one more dimension.
"""

import re
from collections.abc import Mapping, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from permtriton.checkpoint.folder import check_hashes
from permtriton.checkpoint.formats import Format
from permtriton.checkpoint.names import find_name, loaded_names
from permtriton.checkpoint.packed import cast_packed, fill_packed, runs_packed, unpacked
from permtriton.checkpoint.quantization_config import (
    NormEntry,
    Packed,
    PermTritonQuantizationConfig,
    config_entries,
    packed_entry,
)
from permtriton.checkpoint.replace_modules import (
    PackedParameter,
    device_of,
    replace_by_packed,
    replace_by_permuted,
    set_parameter,
)
from permtriton.errors import ModelError
from permtriton.model.experts import input_dim
from permtriton.model.headers import StoredTensor, read_headers
from permtriton.model.modules import (
    ChannelGather,
    GatheredLinear,
    PermutedNorm,
    SparseLinear,
    SparseLinearFp8,
    check_index,
    is_packed,
    is_permuted,
    replace_module,
)
from permtriton.util.sparsity import PrunedWeight


def checkpoint_config(model: nn.Module, sparsity: str) -> PermTritonQuantizationConfig | None:
    """Returns the config of a model's permuted and packed modules; None for a plain model."""
    norms: dict[str, NormEntry] = {}
    gathers: dict[str, int] = {}
    packed: dict[str, Packed] = {}
    for name, module in model.named_modules():
        if is_packed(module):
            assert module.pattern is not None
            shape, in_fp8 = (module.out_features, module.in_features), isinstance(module, SparseLinearFp8)
            packed[f"{name}.weight"] = packed_entry(shape, PrunedWeight(1, module.pattern), sparsity, in_fp8=in_fp8)
        if isinstance(module, PermutedNorm):
            kind, eps, offset = module.variant.kind, module.variant.eps, module.variant.offset
            norms[name] = {"kind": kind, "offset": offset, "eps": eps, "channels": module.index.numel()}
        elif isinstance(module, GatheredLinear) and module.gather is not None:
            gathers[name] = module.gather.index.numel()
    return config_entries(sparsity, packed, gathers, norms) if norms or gathers or packed else None


def attach(model: Any, sparsity: str) -> None:
    """Makes ``save_pretrained`` of a model write permuted and packed modules as `PermTritonQuantizer` reads them."""
    if config := checkpoint_config(model, sparsity):
        model.config.quantization_config = config
        model.hf_quantizer = PermTritonQuantizer(config)


class PermTritonQuantizer(HfQuantizer):
    """Replaces modules and parameters before the weights are loaded, and checks and unpacks them afterwards."""

    quantization_config: PermTritonQuantizationConfig

    def __init__(self, quantization_config: PermTritonQuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._packed: list[PackedParameter] = []
        self._expected: dict[str, Tensor] = {}  # every tensor of the model, on the meta device
        self._dtype: torch.dtype | None = None

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return self.quantization_config.format != Format.PACKED_FP8

    @property
    def is_compileable(self) -> bool:
        return True

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = dtype
        return dtype

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Returns True, so that transformers leaves the check of shapes to this class; nothing is quantized."""
        return True

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: Sequence[str] | None = None,
        device_map: Mapping[str, Any] | str | None = None,
        **kwargs: Any,
    ) -> None:
        self._refuse_offloading(device_map)
        files = [Path(file) for file in checkpoint_files or []]
        for file in files:
            if file.parent != files[0].parent or file.parent.name == "..":
                raise ModelError(
                    f"the index of the weights names {file}, which is outside the checkpoint's folder: it is damaged"
                )
        if files:
            check_hashes(files[0].parent, self.quantization_config.sha256)
        headers = read_headers(files)
        # No shape shows that a packed linear gathers, so that an unlisted gather would be left out in silence.
        gathers = {name for name in headers if name.endswith(".gather.index")}
        if unlisted := gathers - {*self.quantization_config.indices}:
            raise ModelError(f"config.json does not list the permutation {min(unlisted)}: it is damaged")
        names = loaded_names(model, [*headers, *self.quantization_config.packed])
        stored = {names[name]: tensor for name, tensor in headers.items()}
        self._replace(model, stored, names, device_map)
        for name, tensor in model.state_dict().items():
            dtype = self._target_dtype(model, name, tensor)
            self._expected[name] = torch.empty_like(tensor, dtype=dtype, device="meta")

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self._refuse_offloading(getattr(model, "hf_device_map", None))
        self._refuse_dividing(model)
        self._check_loaded(model)
        for packed in self._packed:
            self._keep_or_unpack(model, packed)
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if name in self._expected and tensor.is_floating_point():
                tensor.data = tensor.data.to(self._expected[name].dtype)
        for name, module in model.named_modules():
            if isinstance(module, ChannelGather | PermutedNorm):
                check_index(module.index, module.index.numel(), name)
        self._update_config(model)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns the state dict, with the shapes that keep transformers alone from loading it."""
        state = dict(model.state_dict())
        for name, module in model.named_modules():
            key = f"{name}.weight"
            if is_packed(module):
                assert module.pattern is not None
                values, positions = module.weight_values, module.weight_positions
                state[key] = module.weight
                if isinstance(module, SparseLinearFp8):
                    continue
                # Packed again, because a cast of the module may have made zeros of small weights.
                parts = cast_packed(values, positions, module.in_features, module.pattern, values.dtype)
                state[f"{key}_values"], state[f"{key}_positions"] = parts
            elif is_permuted(module):
                state[key] = state[key].unsqueeze(0)
        return state, {}

    def _refuse_offloading(self, device_map: Mapping[str, Any] | str | None) -> None:
        if not isinstance(device_map, Mapping):
            return
        devices = {str(device).partition(":")[0] for device in device_map.values()}
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            raise ModelError(
                "permtriton checkpoints cannot be offloaded to disk, nor divided between CPU and GPUs, which this "
                'device_map does: choose another, such as "cuda" or "cpu"'
            )

    def _refuse_dividing(self, model: Any) -> None:
        sizes = {"tensor parallelism": "_tp_size", "FSDP2": "_fsdp_size"}
        by = next((way for way, size in sizes.items() if (getattr(model, size, None) or 1) > 1), None)
        if by and self._packed:
            raise ModelError(
                f"packed checkpoints cannot be divided by {by} while they are loaded: export the model as dense "
                "(permtriton export --format dense; if it is in 8 bits, export the folder that it was made from)"
            )
        if by and (self.quantization_config.gathers or by == "FSDP2"):
            raise ModelError(
                f"a model of the layout fused cannot be divided by {by} while it is loaded: compile the model in the "
                "layout portable, or load it whole"
            )

    def _replace(
        self,
        model: Any,
        stored: Mapping[str, StoredTensor],
        names: Mapping[str, str],
        device_map: Mapping[str, Any] | str | None,
    ) -> None:
        """Replaces modules by permuted ones and parameters by packed ones; skips those of a head that the class lacks.

        Args:
            stored: headers of the tensors, by the names under which transformers loads them.
            names: name in the checkpoint -> name under which transformers loads it.
        """
        config = self.quantization_config
        modules = {name for name, _ in model.named_modules() if name}
        permuted = [(name, norm["channels"], norm) for name, norm in config.norms.items()]
        for listed, channels, norm in [*permuted, *((name, size, None) for name, size in config.gathers.items())]:
            if name := find_name(listed, modules, model):
                replace_by_permuted(model, name, channels, norm)
        parameters = {name for name, _ in model.named_parameters()}
        model_names = {listed: find_name(names[listed], parameters, model) for listed in config.packed}
        dims = {name: input_dim(model, name) for name in model_names.values() if name}  # before any is emptied
        for listed, entry in config.packed.items():
            if name := model_names[listed]:
                all_names = [name, *_other_names(model, name)]
                packed = PackedParameter(all_names, names[listed], dims[name], entry, config.pattern_of(listed))
                self._packed.append(packed)
                path, _, _ = name.rpartition(".")
                owner: Any = model.get_submodule(path)
                dtype = self._target_dtype(model, name, model.get_parameter(name))
                is_linear = type(owner) in (nn.Linear, GatheredLinear) and all_names == [name]
                if "values" in entry:
                    replace_module(model, path, SparseLinearFp8.from_linear(owner))
                elif is_linear and runs_packed(owner.in_features, dtype, packed.pattern, device_of(name, device_map)):
                    replace_module(model, path, SparseLinear.from_linear(owner))
                replace_by_packed(model, packed, stored)
        changed = {get_module_from_name(model, name)[0] for packed in self._packed for name in packed.names}
        changed |= set(filter(is_permuted, model.modules()))
        around = {module for module in model.modules() if changed & set(module.children())}
        for module in changed | {module for module in around if not module._non_persistent_buffers_set}:
            # Otherwise transformers would initialize the module, for which some classes read the shapes of weights.
            setattr(module, "_is_hf_initialized", True)  # noqa: B010

    def _check_loaded(self, model: Any) -> None:
        """Checks that every tensor was loaded with its shape and dtype, and removes added dimensions."""
        state = model.state_dict(keep_vars=True)
        loaded = {name for name in self._expected if getattr(state[name], "_is_hf_initialized", False)}
        self.refuse_missing(model, self._expected.keys() - loaded)
        for name, expected in self._expected.items():
            tensor, (owner, kind) = state[name], get_module_from_name(model, name)
            added = (1,) if kind == "weight" and is_permuted(owner) else ()
            if tensor.shape not in (expected.shape, (*added, *expected.shape)):
                raise ModelError(f"{name} was loaded with shape {list(tensor.shape)}, expected {list(expected.shape)}")
            if not tensor.is_floating_point() and tensor.dtype != expected.dtype:
                raise ModelError(f"{name} is stored as {tensor.dtype}, expected {expected.dtype}")
            tensor.data = tensor.data.view(expected.shape)

    def refuse_missing(self, model: Any, missing: Set[str]) -> None:
        """Refuses a checkpoint that lacks tensors, unless they are tied to stored ones or the class needs none."""
        ignored = "|".join(f"({pattern})" for pattern in model._keys_to_ignore_on_load_missing or ())
        pairs = dict(getattr(model, "all_tied_weights_keys", {})).items()
        tied = {name for pair in pairs for name in pair if not set(pair) <= missing}  # pairs with a stored name
        names = sorted(name for name in missing - tied if not (ignored and re.search(ignored, name)))
        if names:
            others = f" and {len(names) - 1} more" if names[1:] else ""
            raise ModelError(
                f"the checkpoint holds no weights for {names[0]}{others}, which {type(model).__name__} needs: the "
                "checkpoint is incomplete, config.json is damaged, or the checkpoint belongs to another class"
            )

    def _target_dtype(self, model: Any, name: str, tensor: Tensor) -> torch.dtype:
        """Returns the dtype for a loaded tensor: the one in which the class keeps its module, or the model's."""
        castable = self._dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1
        plan = model._get_dtype_plan(self._dtype) if castable else {}
        found = (dtype for part, dtype in plan.items() if re.search(rf"(^|\.){re.escape(part)}(\.|$)", name))
        return next(found, tensor.dtype)

    def _keep_or_unpack(self, model: Any, packed: PackedParameter) -> None:
        """Fills the linear of a parameter that stays packed, or unpacks the parameter; casts it unless it is in FP8."""
        name, entry, pattern = packed.names[0], packed.entry, packed.pattern
        owner, attribute = get_module_from_name(model, name)
        values, positions = getattr(owner, f"{attribute}_values"), getattr(owner, f"{attribute}_positions")
        dtype = self._expected[name].dtype
        if isinstance(owner, SparseLinear):
            self._expected.pop(f"{name}_values")
            scale = [owner.weight_scale] if isinstance(owner, SparseLinearFp8) else []
            fill_packed(owner, pattern, dtype, values, positions, *scale)
            return
        weight = unpacked(values, positions, entry["shape"], entry["dim"], pattern)
        delattr(owner, f"{attribute}_values")
        delattr(owner, f"{attribute}_positions")
        set_parameter(model, packed.names, nn.Parameter(weight.to(dtype)))

    def _update_config(self, model: Any) -> None:
        """Sets ``quantization_config`` to the entries of the present modules, and removes it from a plain model."""
        config = checkpoint_config(model, self.quantization_config.sparsity)
        self.remove_quantization_config(model)
        for module in model.modules():
            if hasattr(module, "config") and hasattr(module.config, "_is_quantized"):
                del module.config._is_quantized
        if config is not None:
            self.quantization_config = model.config.quantization_config = config
            model.hf_quantizer = self


def _other_names(model: Any, name: str) -> list[str]:
    """Returns the other names of a parameter that layers share. transformers loads one, and then ties the others."""
    tied = dict(getattr(model, "all_tied_weights_keys", {}))
    source = tied.get(name, name)
    return [other for other in (source, *tied) if tied.get(other, other) == source and other != name]
