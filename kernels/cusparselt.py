"""2:4 products of many tokens on the sparse tensor cores, by torch's cuSPARSELt: ``y = x W^T + bias``.

cuSPARSELt multiplies a form of the weight of its own, made once: the kept values as `permtriton.kernels.packing` stores
them, then its metadata, together 9/16 of the dense weight in 16 bits, and padding where it wants some. It is what
`torch.sparse.to_sparse_semi_structured` holds; its operators are called directly here, since a tensor of that subclass
cannot pass through an operator.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from permtriton.kernels.launch import has_kernels

DTYPES = (torch.bfloat16, torch.float16)
ROWS = 16  # output and input features come in multiples of it
TOKENS = 8  # and tokens in multiples of this: more are padded


def supports(weight_dtype: torch.dtype, out_features: int, in_features: int, device: torch.device) -> bool:
    """Whether cuSPARSELt is there and takes such a weight: 16 bits, both dimensions multiples of 16.

    It is on NVIDIA's GPUs; on the first one only, since torch's handle belongs to the GPU that used it first.
    """
    fits = weight_dtype in DTYPES and not out_features % ROWS and not in_features % ROWS and out_features * in_features
    there = has_kernels(device) and torch.version.hip is None and device.index in (None, 0)
    return bool(fits) and there and torch.backends.cusparselt.is_available()


def compress(weight_OC: Tensor) -> Tensor:
    """Returns cuSPARSELt's form of a dense 2:4 weight that `supports` names, flat, in its dtype."""
    return torch._cslt_compress(weight_OC.contiguous()).view(-1)


def product(x_TC: Tensor, compressed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """Returns ``x W^T + bias`` ``[T, out_features]``, contiguous, of a compressed weight.

    Args:
        x_TC: ``[T, C]``, in the weight's dtype.
        compressed: what `compress` returned.
        bias: ``[out_features]`` or None.
        out_features: O.
    """
    tokens = x_TC.shape[0]
    padded = pad(x_TC, (0, 0, 0, -tokens % TOKENS)) if tokens % TOKENS else x_TC.contiguous()
    y = torch._cslt_sparse_mm(compressed.view(out_features, -1), padded.t(), bias=bias, transpose_result=True)
    return y if y.shape[0] == tokens else y[:tokens].contiguous()
