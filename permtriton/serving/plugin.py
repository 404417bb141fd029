"""vLLM's quantization ``permtriton``: how vLLM serves fused and packed folders. Only vLLM imports this module.

vLLM finds `register` by the entry point ``vllm.general_plugins`` and calls it in each of its processes. It then makes a
`PermTritonConfig` from the ``quantization_config`` in config.json. This object checks the folder before an engine
starts, and says how each layer holds its weight.
"""

from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from permtriton.checkpoint.quantization_config import METHOD, PermTritonQuantizationConfig
from permtriton.errors import ModelError
from permtriton.kernels.quantize import FLOAT8
from permtriton.model.headers import DTYPES
from permtriton.serving.linear import PermTritonLinearMethod, Stored
from permtriton.serving.norm import use_permuted_norms
from permtriton.serving.order import USE_PORTABLE
from permtriton.serving.servable import check_folder, refuse_unknown_class, refuse_unservable

LOAD_FORMATS = ("auto", "hf", "safetensors")  # of vLLM; they read the safetensors files that `check_folder` checks


class PermTritonConfig(QuantizationConfig):
    """What vLLM knows of a folder: which linears are packed, and which modules permute.

    Names become those of vLLM's model, which differ from transformers' in some models, by `apply_vllm_mapper`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.packed: dict[str, Stored] = {}  # packed parameter -> how it is stored
        self.gathers: dict[str, int] = {}  # linear that gathers its input -> number of its input channels
        self.has_norms = False  # whether norms permute their output
        self.is_checked = False  # whether `maybe_update_config` checked the folder, and set the three attributes above

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PermTritonConfig":
        """Checks the entries of ``quantization_config``."""
        PermTritonQuantizationConfig(**config)
        return cls()

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Checks the folder, hashes included; vLLM calls this before it starts an engine."""
        folder = check_folder(model_name)
        refuse_unservable(folder)
        self.packed = {
            name: Stored(
                FLOAT8 if "values" in entry else DTYPES[folder.stored[f"{name}_values"].dtype],
                folder.entries.pattern_of(name),
            )
            for name, entry in folder.entries.packed.items()
        }
        self.gathers, self.has_norms = dict(folder.entries.gathers), bool(folder.entries.norms)
        self.is_checked = True

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Gives parameters and modules the names that they have in vLLM's model."""
        self.packed = hf_to_vllm_mapper.apply_dict(self.packed)
        self.gathers = hf_to_vllm_mapper.apply_dict(self.gathers)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the object that holds a linear's weight; None for other layers, which vLLM runs as always."""
        self._prepare()
        if not isinstance(layer, LinearBase):
            inside = (name for name in (*self.packed, *self.gathers) if f"{name}.".startswith(f"{prefix}."))
            if prefix and (name := next(inside, None)) is not None:
                raise ModelError(
                    f"{name}: vLLM holds it in a {type(layer).__name__}, but permtriton serves linears only; export "
                    "the folder again with --format dense"
                )
            return None
        parts = self._parts(prefix)
        stored = [self.packed.get(f"{part}.weight") for part in parts]
        gathers = [part in self.gathers for part in parts]
        if not any(stored) and not any(gathers):
            return UnquantizedLinearMethod()
        if not all(gathers) and any(gathers):
            raise ModelError(
                f"{prefix}: vLLM joins {', '.join(parts)} to one linear, but only some of them gather their input: "
                f"{USE_PORTABLE}"
            )
        if len(set(stored)) > 1:
            raise ModelError(
                f"{prefix}: vLLM joins {', '.join(parts)} to one linear, but only some of them are packed, or they "
                "differ in their pattern or the dtype of their values: export the folder again with --format dense"
            )
        return PermTritonLinearMethod(prefix, stored[0], gathers[0])

    def _prepare(self) -> None:
        """Checks the load format and the class in the process that builds the model; registers norms that permute."""
        if not self.is_checked:
            raise ModelError("vLLM did not let permtriton check the folder before this: expected vLLM 0.32 or newer")
        config = get_current_vllm_config()
        if config.load_config.load_format not in LOAD_FORMATS:
            raise ModelError(
                f"load format {config.load_config.load_format}: expected one of {', '.join(LOAD_FORMATS)}, which read "
                "the files that permtriton checked"
            )
        refuse_unknown_class(config.model_config.architecture, permuted=self.has_norms or bool(self.gathers))
        if self.has_norms:
            use_permuted_norms()

    def _parts(self, prefix: str) -> list[str]:
        """Returns the names of the linears that vLLM joins into its linear ``prefix``, in vLLM's order.

        For ``qkv_proj`` these are the names of q, k and v; for a linear that joins none, ``prefix`` itself.
        """
        parent, dot, name = prefix.rpartition(".")
        return [f"{parent}{dot}{part}" for part in self.packed_modules_mapping.get(name, [name])]


def register() -> None:
    """Makes vLLM know the quantization ``permtriton``. May be called many times in a process."""
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(PermTritonConfig)
