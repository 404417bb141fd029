"""A linear of vLLM whose weight is packed, or that gathers its input, or both."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from permtriton.checkpoint.packed import fill_packed, runs_packed, unpacked
from permtriton.errors import ModelError
from permtriton.kernels.packing import packed_shapes, position_bits
from permtriton.kernels.permute import permute
from permtriton.kernels.quantize import FLOAT8
from permtriton.model.modules import SparseLinear, SparseLinearFp8
from permtriton.serving.order import Order
from permtriton.util.sparsity import NMPattern


class Stored(NamedTuple):
    """How a packed weight is stored."""

    dtype: torch.dtype  # of its values
    pattern: NMPattern


@register_weight_loader_v2_supported_method
class PermTritonLinearMethod(LinearMethodBase):
    """Loads a packed weight as values and positions, or the dense weight of a linear that gathers its input.

    A packed weight stays packed in FP8, or if `runs_packed` (2:4 in 16 bits on a GPU); else it is unpacked.

    vLLM divides values and positions among the ranks of tensor parallelism as it divides dense weights. Their rows are
    those of the weight, and the columns of a rank must be whole groups and whole bytes of positions.
    """

    def __init__(self, name: str, stored: Stored | None, gathers: bool) -> None:
        """Takes the linear's name, for errors; how its weight is packed, or None; and whether it gathers its input."""
        self.name, self.stored, self.gathers = name, stored, gathers
        self.dense = UnquantizedLinearMethod()

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Adds the parameters that vLLM loads."""
        load = extra_weight_attrs.pop("weight_loader")
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        self.rows, self.columns, self.dtype = rows, columns, params_dtype
        if self.gathers:
            layer.gather = Order(self.name, input_size)
        stored = self.stored
        if stored is None:  # a linear that gathers: its stored weight has an additional first dimension

            def load_rows(parameter: nn.Parameter, tensor: Tensor, *part: Any) -> None:
                load(parameter, tensor.squeeze(0), *part)

            self._add(layer, "weight", torch.empty(rows, columns, dtype=params_dtype), load_rows)
            return
        self._refuse_division(input_size, stored.pattern)
        values, positions = packed_shapes(rows, columns, stored.pattern)
        self._add(layer, "weight", torch.empty(0, dtype=stored.dtype), lambda *_: None)  # an empty tensor is stored
        self._add(layer, "weight_values", torch.empty(values, dtype=stored.dtype), load)
        self._add(layer, "weight_positions", torch.empty(positions, dtype=torch.uint8), load)
        if stored.dtype == FLOAT8:
            scale = ChannelQuantScaleParameter(data=torch.empty(rows), output_dim=0, weight_loader=load)
            layer.register_parameter("weight_scale", scale)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Converts the loaded weight to the form that `apply` multiplies."""
        if self.gathers:
            layer.gather.finish(layer.tp_rank * self.columns, self.columns)
        if self.stored is not None:
            in_fp8, pattern = self.stored.dtype == FLOAT8, self.stored.pattern
            parts = ("", "_values", "_positions", *(["_scale"] if in_fp8 else []))
            _, values, positions, *scale = [layer._parameters.pop(f"weight{part}").data for part in parts]
            if in_fp8 or runs_packed(self.columns, self.dtype, pattern, values.device):
                kind = SparseLinearFp8 if in_fp8 else SparseLinear
                linear = kind(self.columns, self.rows, bias=False, device="meta")
                layer.packed = fill_packed(linear, pattern, self.dtype, values, positions, *scale)
                return
            weight = unpacked(values, positions, (self.rows, self.columns), 1, pattern)
            layer.weight = nn.Parameter(weight.to(self.dtype), requires_grad=False)
        self.dense.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns ``x[..., index] W^T + bias``."""
        packed: SparseLinear | None = getattr(layer, "packed", None)
        index = layer.gather.index if self.gathers else None
        if packed is not None:
            return packed.packed_product(x, bias, index)
        return self.dense.apply(layer, x if index is None else permute(x, index), bias)

    def _add(self, layer: Any, name: str, data: Tensor, load: Callable[..., None]) -> None:
        parameter = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=load)
        layer.register_parameter(name, parameter)

    def _refuse_division(self, input_size: int, pattern: NMPattern) -> None:
        kept = self.columns // pattern.group * pattern.kept
        whole = self.columns % pattern.group == 0 and kept * position_bits(pattern.group) % 8 == 0
        if self.columns != input_size and not whole:
            raise ModelError(
                f"{self.name}: tensor parallelism would divide {input_size} packed input channels into parts of "
                f"{self.columns}, which does not fit groups at {pattern} and whole bytes of their positions: use "
                "fewer ranks, or export the folder again with --format dense"
            )
