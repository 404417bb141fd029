"""A linear layer whose N:M weight is stored packed in FP8, and whose input is quantized per token: W8A8.

The weight is `permtriton.kernels.packing`'s, with values in float8 e4m3 and a scale per row:

    W[o, c]    = scale[o] e4m3[o, c]
    Q(x)[t, c] = s[t] e4m3(x[t, c] / s[t]),    s[t] = max over c of |x[t, c]| / 448, in float32
    y          = Q(x[..., index]) W^T + bias

Shapes: ``x`` ``[..., C]``, ``scale`` float32 ``[O]``, ``bias`` ``[O]``, ``index`` ``[C]`` -> ``y`` ``[..., O]`` in the
dtype of ``x``. That is what vLLM computes of a checkpoint in FP8_DYNAMIC. At 2:4 the weight takes 5 bits per weight.
The reference unpacks the weight to float32 and multiplies in float32.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from permtriton.errors import ModelError
from permtriton.kernels.operator import operator
from permtriton.kernels.packing import check_packed_shapes, pack, unpack
from permtriton.kernels.permute import check_shapes, permute
from permtriton.kernels.quantize import FLOAT8, quantize_tokens, round_to_fp8
from permtriton.util.sparsity import NMPattern


def pack_fp8(weight: Tensor, pattern: NMPattern) -> tuple[Tensor, Tensor, Tensor]:
    """Returns values, positions and scales of an N:M weight ``[O, C]``, rounded."""
    rounded, scale = round_to_fp8(weight)
    values, positions = pack(rounded.float(), pattern)
    return values.to(rounded.dtype), positions, scale.flatten().float()


def unpack_fp8(values: Tensor, positions: Tensor, scale: Tensor, in_features: int, pattern: NMPattern) -> Tensor:
    """Returns the dense weight, float32 ``[O, C]``."""
    return unpack(values.float(), positions, in_features, pattern) * scale.unsqueeze(1)


def sparse_linear_fp8_reference(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    pattern: NMPattern,
) -> Tensor:
    """Unpacks the weight, quantizes the input, and multiplies densely in float32."""
    quantized, token_scale = quantize_tokens(x if index is None else permute(x, index))
    y = linear(quantized.float(), unpack_fp8(values, positions, scale, in_features, pattern)) * token_scale
    return (y if bias is None else y + bias).to(x.dtype)


def _check(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    pattern: NMPattern,
) -> None:
    rows = values.shape[:1]
    if values.dim() != 2 or not x.dim() or x.shape[-1] != in_features:
        raise ModelError(
            f"sparse_linear_fp8: an input of shape {list(x.shape)} for values of shape {list(values.shape)}: expected "
            f"[..., {in_features}] and two dimensions"
        )
    check_packed_shapes(values, positions, values.shape[0], in_features, pattern, (FLOAT8,))
    if scale.shape != rows or scale.dtype != torch.float32:
        raise ModelError(
            f"sparse_linear_fp8: a scale of {scale.dtype} {list(scale.shape)}: expected torch.float32 {list(rows)}"
        )
    assert bias is None or (bias.shape, bias.dtype) == (rows, x.dtype), f"{bias.dtype} {bias.shape}"
    if index is not None:
        check_shapes(x, index)


@operator("sparse_linear_fp8", lambda x, values, *_: x.new_empty((*x.shape[:-1], values.shape[0])), check=_check)
def sparse_linear_fp8(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    pattern: NMPattern,
) -> Tensor:
    """Returns ``Q(x[..., index]) W^T + bias`` of a packed FP8 weight; not differentiable.

    Args:
        x: ``[..., in_features]``, bfloat16, float16 or float32.
        values: float8 e4m3 ``[O, in_features / group * kept]``, no NaN and no -0.0.
        positions: uint8, from `permtriton.kernels.packing.pack`. Their content is trusted.
        scale: float32 ``[O]``.
        bias: ``[O]`` in the dtype of ``x``, or None.
        index: ``[in_features]``, any integer dtype, or None: the order into which ``x`` is brought first.
        in_features: C.
        pattern: What each group keeps.

    Raises:
        ModelError: ``x``, the packed weight or its scale have another shape or dtype.
    """
    return sparse_linear_fp8_reference(x, values, positions, scale, bias, index, in_features, pattern)
