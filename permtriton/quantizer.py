"""Loads and saves permtriton checkpoints inside ``from_pretrained`` and ``save_pretrained``: a transformers quantizer.

Loading is strict: whatever is missing, damaged or of another shape is an error, and no model comes out. On a GPU the
linears whose packed weights have kernels keep them packed; whatever else is packed becomes dense. What is left without
packed and permuted modules is a plain transformers model, with nothing of permtriton in it. Otherwise the model keeps
its ``quantization_config``, and ``save_pretrained`` writes what it holds: format "packed", or "dense".

So that transformers without permtriton, which would only warn, refuses such a checkpoint, the tensors that it looks for
have another shape: a packed parameter leaves an empty tensor in its place, the weight of a permuted norm or linear has
one more dimension.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer

from permtriton.checkpoint import StoredTensor, check_hashes, read_headers
from permtriton.errors import ModelError
from permtriton.kernels import autotune
from permtriton.kernels.norm_permute import NormVariant
from permtriton.match_norm import match_norm
from permtriton.modules import (
    ChannelGather,
    PermutedLayerNorm,
    PermutedRMSNorm,
    SparseLinear,
    check_index,
)
from permtriton.placement import (
    check_content,
    device_of,
    find,
    is_packed,
    is_permuted,
    owner_of,
    packed_as,
    resolve,
    stays_packed,
    swap_gather,
    swap_linear,
    swap_norm,
    swap_parameter,
    unpacked,
)
from permtriton.schema import VERSION, PermTritonQuantizationConfig

MORE_LAYERS = 64  # than the weights name that config.json may claim before any is built


def checkpoint_config(model: nn.Module, sparsity: str) -> PermTritonQuantizationConfig | None:
    """Returns the entries that describe a model's permuted and packed modules; None for a plain model."""
    norms, gathers, packed = {}, {}, {}
    for name, module in model.named_modules():
        if is_packed(module):
            packed[f"{name}.weight"] = {"shape": [module.out_features, module.in_features], "dim": 1}
        if isinstance(module, PermutedRMSNorm | PermutedLayerNorm):
            variant = module.variant
            norms[name] = {
                "kind": variant.kind,
                "offset": variant.offset,
                "eps": variant.eps,
                "channels": module.index.numel(),
            }
        elif isinstance(module, SparseLinear) and module.gather is not None:
            gathers[name] = module.gather.index.numel()
    if not norms and not gathers and not packed:
        return None
    return PermTritonQuantizationConfig(
        version=VERSION,
        format="packed" if packed else "dense",
        sparsity=sparsity,
        packed=packed,
        gathers=gathers,
        norms=norms,
    )


def attach(model: Any, sparsity: str) -> bool:
    """Makes ``save_pretrained`` of a model with permuted or packed modules write a permtriton checkpoint.

    Returns:
        Whether the model has such modules; a plain model stays as it is.
    """
    config = checkpoint_config(model, sparsity)
    if config is None:
        return False
    model.config.quantization_config = config
    model.hf_quantizer = PermTritonQuantizer(config)
    return True


class PermTritonQuantizer(HfQuantizer):
    """Swaps modules and parameters before the weights are loaded, and checks and unpacks them afterwards.

    Raises:
        ModelError: anything about the checkpoint that is not as it must be.
    """

    quantization_config: PermTritonQuantizationConfig

    def __init__(self, quantization_config: PermTritonQuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise ModelError(
                "permtriton prunes no model while it is loaded: use `permtriton compile`, then load its output"
            )
        self._packed: dict[str, str] = {}  # parameter of the model -> its name in the config
        self._stays_packed: set[str] = set()  # those that are multiplied as they are
        self._norms: dict[str, nn.Module] = {}  # norm -> the module that it replaced
        self._shapes: dict[str, torch.Size] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._dtype: torch.dtype | None = None

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = dtype
        return dtype

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """True, which leaves checking shapes to this class; nothing is quantized."""
        return True

    def update_attn_implementation(self, config: Any) -> Any:
        """Called before the model is built: refuses a config that claims many more layers than the weights name."""
        names = [*self.quantization_config.packed, *self.quantization_config.permuted]
        numbers = [int(number) for name in names for number in re.findall(r"\.(\d{1,9})\.", name)]
        limit = 4 * max(numbers, default=0) + MORE_LAYERS
        for key, value in config.to_dict().items():
            for inner, number in value.items() if isinstance(value, dict) else [(key, value)]:
                if "layer" in str(inner) and type(number) is int and number > limit:
                    raise ModelError(
                        f"config.json: {inner} is {number}, but the checkpoint names no layer beyond "
                        f"{max(numbers, default=0)}: the file is damaged"
                    )
        return config

    update_tp_plan = update_attn_implementation  # the call at this place in older versions of transformers

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: Sequence[str] | None = None,
        device_map: Mapping[str, Any] | str | None = None,
        **kwargs: Any,
    ) -> None:
        self._refuse_offloading(device_map)
        files = [Path(os.path.abspath(file)) for file in checkpoint_files or []]
        folder = Path(os.path.abspath(model.config.name_or_path))
        self._check_files(files, folder)
        stored = read_headers(files)
        self._swap(model, stored, device_map)
        autotune.use_beside(folder)
        for name, tensor in model.state_dict().items():
            self._shapes[name], self._dtypes[name] = tensor.shape, self._target_dtype(model, name, tensor)
        self._check_stored(model, stored)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self._refuse_offloading(getattr(model, "hf_device_map", None))
        if self._packed and (getattr(model, "_tp_size", None) or 1) > 1:
            raise ModelError(
                "packed checkpoints cannot be divided by tensor parallelism: export the model as dense "
                "(permtriton export --format dense), or leave tp_plan out"
            )
        self._check_loaded(model)
        for name in self._packed:
            self._place_packed(model, name)
        for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
            target = self._dtypes.get(name)
            if target is not None and tensor.dtype != target and tensor.is_floating_point():
                tensor.data = tensor.data.to(target)
        self._check_norms(model)
        for name, module in model.named_modules():
            if isinstance(module, ChannelGather | PermutedRMSNorm | PermutedLayerNorm):
                check_index(module.index, module.index.numel(), name)
        self._release(model)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns what is saved: the state dict, with one more dimension where transformers alone shall stumble."""
        state = dict(model.state_dict())
        for name, module in model.named_modules():
            key = f"{name}.weight"
            if is_packed(module):
                assert module.pattern is not None
                values, positions = module.weight_values, module.weight_positions
                state[key] = values.new_empty(0)
                # Anew: a cast since then may have made zeros of small weights.
                parts = packed_as(values, positions, module.in_features, module.pattern, values.dtype)
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

    def _swap(self, model: Any, stored: Mapping[str, StoredTensor], device_map: Mapping[str, Any] | str | None) -> None:
        """Puts permuted modules and packed parameters in their places; those of another class's head are left out."""
        config = self.quantization_config
        modules = {name for name, _ in model.named_modules() if name}
        for name, entry in config.norms.items():
            if found := find(name, modules, model):
                self._norms[found] = swap_norm(model, found, entry)
        for name, channels in config.gathers.items():
            if found := find(name, modules, model):
                swap_gather(model, found, channels)
        parameters = {name for name, _ in model.named_parameters()}
        for name, entry in config.packed.items():
            if found := find(name, parameters, model):
                owner, attribute = owner_of(model, found)
                dtype = self._target_dtype(model, found, getattr(owner, attribute))
                if stays_packed(owner, attribute, dtype, config.pattern, device_of(found, device_map)):
                    swap_linear(model, found)
                    self._stays_packed.add(found)
                swap_parameter(model, found, name, entry, stored, config)
                self._packed[found] = name

    def _check_files(self, files: Sequence[Path], folder: Path) -> None:
        for file in files:
            if file.parent != files[0].parent or (folder.is_dir() and not file.is_relative_to(folder)):
                raise ModelError(
                    f"the index of the weights names {file}, outside the checkpoint's folder: it is damaged"
                )
        hashes = self.quantization_config.sha256
        if hashes and (unknown := sorted({file.name for file in files} - set(hashes))):
            raise ModelError(
                f"{unknown[0]} has no SHA-256 in config.json, quantization_config: the checkpoint is damaged"
            )
        if files:
            check_hashes(files[0].parent, hashes, "config.json, quantization_config")

    def _check_stored(self, model: Any, stored: Mapping[str, StoredTensor]) -> None:
        """Compares names and shapes before anything is allocated; names that transformers converts come later."""
        expected, prefix = self._shapes, model.base_model_prefix
        modules = {name for name, _ in model.named_modules() if name}
        found, converted = set(), False
        for name, tensor in stored.items():
            target = resolve(name, expected, prefix)
            if target is None:
                owner = re.sub(r"(\.gather)?\.index$", "", name)
                if owner != name and resolve(owner, modules, prefix):
                    raise ModelError(
                        f"{tensor.file} holds {name}, a permutation that config.json, quantization_config does not "
                        "tell of: one of the files is damaged"
                    )
                converted = True
                continue
            found.add(target)
            if tensor.shape not in self._allowed(model, target):
                raise ModelError(
                    f"{tensor.file}: {name} has shape {list(tensor.shape)}, the model that config.json describes needs "
                    f"{list(expected[target])}: one of the files is damaged, or they do not belong together"
                )
        if not converted:
            self._refuse_missing(model, set(expected) - found)

    def _check_loaded(self, model: Any) -> None:
        """Compares what transformers loaded with what it should have, and takes the additional dimensions off."""
        state = model.state_dict(keep_vars=True)
        self._refuse_missing(model, {n for n in self._shapes if not getattr(state[n], "_is_hf_initialized", False)})
        for name, shape in self._shapes.items():
            if tuple(state[name].shape) not in self._allowed(model, name):
                raise ModelError(f"{name} was loaded with shape {list(state[name].shape)}, expected {list(shape)}")
            if not state[name].is_floating_point() and state[name].dtype != self._dtypes[name]:
                raise ModelError(f"{name} is stored as {state[name].dtype}, expected {self._dtypes[name]}")
            state[name].data = state[name].data.view(shape)

    def _allowed(self, model: Any, name: str) -> set[tuple[int, ...]]:
        shape = tuple(self._shapes[name])
        owner, _, kind = name.rpartition(".")
        return {shape, (1, *shape)} if kind == "weight" and is_permuted(model.get_submodule(owner)) else {shape}

    def _refuse_missing(self, model: Any, missing: set[str]) -> None:
        ignored = "|".join(f"({pattern})" for pattern in model._keys_to_ignore_on_load_missing or ())
        tied = {**getattr(model, "all_tied_weights_keys", {})}
        both = {name for pair in tied.items() for name in pair if not set(pair) <= missing}
        left = sorted(n for n in missing - both if not (ignored and re.search(ignored, n)))
        if left:
            raise ModelError(
                f"the checkpoint holds no weights for {left[0]}" + (f" and {len(left) - 1} more" if left[1:] else "")
                + f", which {type(model).__name__} needs: it is incomplete, or config.json is damaged, or it belongs "
                "to another class"
            )  # fmt: skip

    def _target_dtype(self, model: Any, name: str, tensor: Tensor) -> torch.dtype:
        for pattern, dtype in model._get_dtype_plan(self._dtype).items() if self._dtype else ():
            if tensor.is_floating_point() and re.search(rf"(^|\.){re.escape(pattern)}(\.|$)", name):
                return dtype
        return tensor.dtype

    def _place_packed(self, model: Any, name: str) -> None:
        """Keeps a loaded packed parameter where it has kernels, else unpacks it, bit for bit as it was packed.

        Only then is it cast to the dtype asked for, as the dense weight would be.
        """
        entry, pattern = self.quantization_config.packed[self._packed[name]], self.quantization_config.pattern
        owner, attribute = owner_of(model, name)
        values, positions = getattr(owner, f"{attribute}_values"), getattr(owner, f"{attribute}_positions")
        arguments = (name, values, positions, entry["shape"], entry["dim"], pattern.kept, pattern.group)
        if name in self._stays_packed:
            assert isinstance(owner, SparseLinear)
            check_content(*arguments)
            dtype = self._dtypes[f"{name}_values"] = self._dtypes[name]
            if values.dtype != dtype:
                values, positions = packed_as(values, positions, owner.in_features, pattern, dtype)
            owner.set_packed(values, positions, pattern).compress()
            return
        weight = unpacked(*arguments)
        delattr(owner, f"{attribute}_values")
        delattr(owner, f"{attribute}_positions")
        setattr(owner, attribute, nn.Parameter(weight.to(self._dtypes[name])))

    def _check_norms(self, model: Any) -> None:
        """Compares each permuted norm with what the module that it replaced computes; norms of one kind once."""
        seen: dict[tuple[Any, ...], NormVariant | None] = {}
        for name, original in self._norms.items():
            variant = model.get_submodule(name).variant
            channels = original.get_parameter("weight").numel()
            told = tuple(sorted((k, v) for k, v in vars(original).items() if isinstance(v, int | float)))
            key = (type(original), channels, told)
            if key not in seen:
                seen[key] = match_norm(original, channels)
            if seen[key] != variant:
                raise ModelError(
                    f"config.json, quantization_config: norm {name} is {variant}, but the model's is {seen[key]}: the "
                    "file is damaged"
                )

    def _release(self, model: Any) -> None:
        """Leaves a plain model, or one that is saved as what it is; either may be cast and moved as any other."""
        config = checkpoint_config(model, self.quantization_config.sparsity)
        self.remove_quantization_config(model)
        for module in model.modules():
            if hasattr(module, "config") and hasattr(module.config, "_is_quantized"):
                del module.config._is_quantized
        self._norms.clear()
        if config is not None:
            self.quantization_config = model.config.quantization_config = config
            model.hf_quantizer = self
