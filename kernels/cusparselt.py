"""2:4 products of many tokens on the sparse tensor cores, by torch's cuSPARSELt: ``y = x W^T + bias``.

cuSPARSELt multiplies its own form of the weight, which is made once: the kept values as `permtriton.kernels.packing`
stores them, then its metadata, together 9/16 of the dense weight at 16 bits, plus any padding. This is what
`torch.sparse.to_sparse_semi_structured` holds; torch's cuSPARSELt operators are called directly here, because a tensor
of that subclass cannot pass through a custom operator.

The library has dozens of algorithms and ways to split the sum. Its own search (``mm_search``) times them all. It runs
at the first bfloat16 product of a shape (the number of tokens rounded up to a power of two), unless a CUDA graph is
captured. What one search chooses can be a tenth too slow, so the most frequent choice of `SEARCHES` searches is taken
and kept in the user's cache; `permtriton autotune` compares it with the default once more.
"""

import threading
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from permtriton.kernels.autotune import bucket, config_for
from permtriton.kernels.launch import Config, has_kernels, number_of, warn_once

DTYPES = (torch.bfloat16, torch.float16)
ROWS = 16  # output and input features must be multiples of it
TOKENS = 8  # the number of tokens is padded to a multiple of it
# In float16 the search of cuSPARSELt 0.8.0 ran into an illegal instruction on an H200, which ends the use of the GPU.
SEARCHED = (torch.bfloat16,)
SEARCHES = 5
CONFIGS = (Config({"ALGORITHM": 0, "SPLIT_K": 1, "SPLIT_K_MODE": -1}),)  # the library's defaults


def supports(weight_dtype: torch.dtype, out_features: int, in_features: int, device: torch.device) -> bool:
    """Whether cuSPARSELt is available and takes such a weight: 16 bits, both dimensions multiples of 16.

    cuSPARSELt runs on NVIDIA GPUs only, and each thread can use it on only one of them, see `serves`.
    """
    there = has_kernels(device) and torch.backends.cusparselt.is_available()
    return takes(weight_dtype, out_features, in_features) and there and serves(device)


_THREAD = threading.local()


def serves(device: torch.device) -> bool:
    """Whether cuSPARSELt runs on a GPU in this thread: only on the first it used, since torch's handle is for that GPU.

    So each rank of a group of processes can use cuSPARSELt on its GPU; one process with several GPUs, on one only.
    """
    first = getattr(_THREAD, "device", None)
    if first is None or first == (number := number_of(device)):
        return True
    warn_once(
        f"sparse_linear: cuSPARSELt runs on one GPU of a process, here on GPU {first}: on GPU {number}, packed weights "
        "are unpacked for many tokens, which is slower than a dense model; start a process for each GPU"
    )
    return False


def _used_on(tensor: Tensor) -> None:
    if tensor.is_cuda and not hasattr(_THREAD, "device"):
        _THREAD.device = number_of(tensor.device)


def takes(weight_dtype: torch.dtype, out_features: int, in_features: int) -> bool:
    """Whether cuSPARSELt takes such a weight, where it is available: 16 bits, both dimensions multiples of 16."""
    fits = not out_features % ROWS and not in_features % ROWS and out_features * in_features > 0
    return fits and weight_dtype in DTYPES


def compress(weight_OC: Tensor) -> Tensor:
    """Returns cuSPARSELt's form of a dense 2:4 weight that it supports: flat, in the weight's dtype."""
    _used_on(weight_OC)
    return torch._cslt_compress(weight_OC.contiguous()).view(-1)


def product(
    x_TC: Tensor, compressed: Tensor, bias: Tensor | None, out_features: int, config: Config | None = None
) -> Tensor:
    """Returns ``x W^T + bias``, ``[T, out_features]``, contiguous, for a weight from `compress` in the dtype of ``x``.

    ``config`` is the algorithm, by default the fastest one known.
    """
    _used_on(x_TC)
    tokens = x_TC.shape[0]
    padded, weight = _padded(x_TC), compressed.view(out_features, -1)
    bias = None if bias is None else bias.contiguous()  # cuSPARSELt reads it as contiguous
    chosen = (config or _chosen(x_TC, compressed, bias, out_features)).constants
    y = torch._cslt_sparse_mm(
        weight, padded.t(), bias=bias, transpose_result=True, alg_id=chosen["ALGORITHM"], split_k=chosen["SPLIT_K"],
        split_k_mode=chosen["SPLIT_K_MODE"],
    )  # fmt: skip
    return y if y.shape[0] == tokens else y[:tokens].contiguous()


def _chosen(x_TC: Tensor, compressed: Tensor, bias: Tensor | None, out_features: int) -> Config:
    shape = x_TC.shape[0], out_features, x_TC.shape[1]

    def search() -> Config | None:
        if not torch.cuda.is_current_stream_capturing():
            return searched(x_TC, compressed, bias, out_features)
        if x_TC.dtype in SEARCHED:
            warn_once(
                f"sparse_linear: cuSPARSELt's algorithm for {'x'.join(map(str, bucket(shape)))} was not searched "
                "before this CUDA graph is captured, so that the graph keeps its default, which may be 1.5 times "
                "slower: run each number of tokens once before"
            )
        return None

    return config_for("cusparselt", CONFIGS, shape, x_TC.dtype, search)


def searched(x_TC: Tensor, compressed: Tensor, bias: Tensor | None, out_features: int) -> Config:
    """Returns the most frequent result of `SEARCHES` searches for a product; the default where there is no search."""
    library: Any = getattr(torch._C, "_cusparselt", None)
    if x_TC.dtype not in SEARCHED or not hasattr(library, "mm_search"):
        return CONFIGS[0]
    weight = compressed.view(out_features, -1)
    x_CT = _padded(x_TC).t()
    votes = Counter(tuple(library.mm_search(weight, x_CT, bias, None, None, True)[:3]) for _ in range(SEARCHES))
    algorithm, split_k, mode = votes.most_common(1)[0][0]
    return Config({"ALGORITHM": algorithm, "SPLIT_K": split_k, "SPLIT_K_MODE": mode})


def _padded(x_TC: Tensor) -> Tensor:
    missing = -x_TC.shape[0] % TOKENS
    return pad(x_TC, (0, 0, 0, missing)) if missing else x_TC.contiguous()
