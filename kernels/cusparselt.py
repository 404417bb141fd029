"""2:4 products of many tokens on the sparse tensor cores, by torch's cuSPARSELt: ``y = x W^T + bias``.

cuSPARSELt multiplies its own form of the weight, which is made once: the kept values as `permtriton.kernels.packing`
stores them, then its metadata, together 9/16 of the dense weight at 16 bits, plus any padding. This is what
`torch.sparse.to_sparse_semi_structured` holds; its operators are called directly here, because a tensor of that
subclass cannot pass through an operator.

The library has dozens of algorithms and ways to split the sum. While tuning, its own search (``mm_search``) times them
all for a shape; what it finds is a trial of the table ``cusparselt``, beside the default, and used if it was faster.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from permtriton.kernels.autotune import collecting, config_for
from permtriton.kernels.launch import Config, has_kernels

DTYPES = (torch.bfloat16, torch.float16)
ROWS = 16  # output and input features must be multiples of it
TOKENS = 8  # the number of tokens is padded to a multiple of it
CONFIGS = (Config({"ALGORITHM": 0, "SPLIT_K": 1, "SPLIT_K_MODE": -1}),)  # the library's defaults


def supports(weight_dtype: torch.dtype, out_features: int, in_features: int, device: torch.device) -> bool:
    """Whether cuSPARSELt is available and takes such a weight: 16 bits, both dimensions multiples of 16.

    Only on NVIDIA GPUs, and only on the first one: torch's handle belongs to the GPU that used it first.
    """
    there = has_kernels(device) and torch.version.hip is None and device.index in (None, 0)
    return takes(weight_dtype, out_features, in_features) and there and torch.backends.cusparselt.is_available()


def takes(weight_dtype: torch.dtype, out_features: int, in_features: int) -> bool:
    """Whether cuSPARSELt takes such a weight, where it is available: 16 bits, both dimensions multiples of 16."""
    fits = not out_features % ROWS and not in_features % ROWS and out_features * in_features > 0
    return fits and weight_dtype in DTYPES


def compress(weight_OC: Tensor) -> Tensor:
    """Returns cuSPARSELt's form of a dense 2:4 weight that it supports: flat, in the weight's dtype."""
    return torch._cslt_compress(weight_OC.contiguous()).view(-1)


def product(x_TC: Tensor, compressed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """Returns ``x W^T + bias`` for a compressed weight: ``[T, out_features]``, contiguous.

    Args:
        x_TC: ``[T, C]``, in the weight's dtype.
        compressed: The weight, from `compress`.
        bias: ``[out_features]`` or None.
        out_features: O.
    """
    tokens = x_TC.shape[0]
    padded = pad(x_TC, (0, 0, 0, -tokens % TOKENS)) if tokens % TOKENS else x_TC.contiguous()
    weight = compressed.view(out_features, -1)
    configs = (*CONFIGS, *_searched(weight, padded, bias)) if collecting() else CONFIGS
    shape = (tokens, out_features, x_TC.shape[1])
    chosen = config_for("cusparselt", configs, shape, x_TC.dtype, searched=True).constants
    y = torch._cslt_sparse_mm(
        weight, padded.t(), bias=bias, transpose_result=True, alg_id=chosen["ALGORITHM"], split_k=chosen["SPLIT_K"],
        split_k_mode=chosen["SPLIT_K_MODE"],
    )  # fmt: skip
    return y if y.shape[0] == tokens else y[:tokens].contiguous()


def _searched(weight: Tensor, padded: Tensor, bias: Tensor | None) -> tuple[Config, ...]:
    """Returns what the library's search finds for a product, unless that is the default or there is no search."""
    library: Any = getattr(torch._C, "_cusparselt", None)
    if not hasattr(library, "mm_search"):
        return ()
    algorithm, split_k, mode, _ = library.mm_search(weight, padded.t(), bias, None, None, True)
    found = Config({"ALGORITHM": algorithm, "SPLIT_K": split_k, "SPLIT_K_MODE": mode})
    return () if found in CONFIGS else (found,)
