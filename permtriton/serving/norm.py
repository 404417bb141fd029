"""vLLM's RMS norm, which permutes its output where a folder of layout ``fused`` has an index for it."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm

from permtriton.checkpoint.quantization_config import METHOD
from permtriton.errors import ModelError
from permtriton.kernels.norm_permute import NormVariant, add_norm_permute, norm_permute
from permtriton.model.modules import check_index
from permtriton.serving.order import USE_PORTABLE
from permtriton.util.permutation import index_dtype


class VllmPermutedRMSNorm(RMSNorm):
    """vLLM's RMS norm, whose instances in a permtriton model may permute their output.

    The loaded weights decide which of them do: those with a stored ``index``, whose stored ``weight`` has one more
    dimension. Instances in other models do what vLLM's norm does.
    """

    permutes = False

    def __init__(self, hidden_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(hidden_size, *args, **kwargs)
        self.variant = NormVariant("rms", self.variance_epsilon)
        config = get_current_vllm_config_or_none()
        quant_config = None if config is None else config.quant_config
        if quant_config is None or quant_config.get_name() != METHOD or not self.has_weight:
            return
        self.index = nn.Parameter(torch.empty(0, dtype=index_dtype(hidden_size)), requires_grad=False)
        self.index.weight_loader = self._load_index  # type: ignore[attr-defined]
        self.weight.weight_loader = self._load_weight

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Returns ``norm(x)[..., index]``; with a residual, ``norm(x + residual)[..., index]`` and ``x + residual``."""
        if not self.permutes:
            return super().forward(x, residual)
        if residual is None:
            return norm_permute(x, self.weight, None, self.index, self.variant)
        return add_norm_permute(x, residual, self.weight, self.index, self.variance_epsilon)

    def _load_weight(self, parameter: nn.Parameter, tensor: Tensor) -> None:
        self.permutes = tensor.dim() == 2
        parameter.data.copy_(tensor.view(parameter.shape))

    def _load_index(self, parameter: nn.Parameter, tensor: Tensor) -> None:
        check_index(tensor, self.hidden_size, "a norm")
        parameter.data = tensor.to(parameter.device, parameter.dtype, copy=True)


def use_permuted_norms() -> None:
    """Makes vLLM construct a `VllmPermutedRMSNorm` in place of each ``RMSNorm`` in this process from now on."""
    present = op_registry_oot.get(RMSNorm.__name__)
    if present is None:
        CustomOp.register_oot(VllmPermutedRMSNorm, name=RMSNorm.__name__)
    elif present is not VllmPermutedRMSNorm:
        raise ModelError(
            f"another plugin of vLLM replaced its RMS norm by {present.__name__}, so that no norm can permute: "
            f"{USE_PORTABLE}"
        )
