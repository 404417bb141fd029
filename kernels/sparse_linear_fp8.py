"""A linear layer whose N:M weight is stored packed in FP8, and whose input is quantized per token: W8A8.

The weight is from `permtriton.kernels.packing`, with values in float8 e4m3 and a scale per row:

    W[o, c]    = scale[o] e4m3[o, c]
    Q(x)[t, c] = s[t] e4m3(x[t, c] / s[t]),    s[t] = max over c of |x[t, c]| / 448, in float32
    y          = Q(x[..., index]) W^T + bias

Shapes: ``x`` ``[..., C]``, ``scale`` float32 ``[O]``, ``bias`` ``[O]``, ``index`` ``[C]`` -> ``y`` ``[..., O]`` in the
dtype of ``x``. vLLM computes the same for a checkpoint in FP8_DYNAMIC. At 2:4 the weight takes 5 bits per weight.
The reference unpacks the weight to float32 and multiplies in float32. On a GPU the input is quantized by a kernel, and
a product takes one of three routes:

    mma          the CUDA kernel of sparse_linear_mma.py on Hopper, 1 to 256 tokens of 16 bits, channels a multiple of
                 256: the sparse tensor cores multiply the packed weight as it is
    dense        unpacked to float8 by a kernel, then torch's `_scaled_mm`: bfloat16, both dimensions multiples of 16,
                 on GPUs that multiply float8 (compute capability 8.9 or newer)
    dequantized  weight and input rounded to the dtype of ``x``, then cuBLAS: everything else

Unless `permtriton autotune` measured a faster route (`ROUTE_CONFIGS`), the first possible one is taken. No route has
been measured on a GPU yet. Where up to 256 tokens cannot take mma, each product unpacks the whole weight: a warning
says so.
"""

import functools
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.autotune import decided
from permtriton.kernels.launch import Config, warn_once
from permtriton.kernels.operator import operator
from permtriton.kernels.packing import pack, unpack
from permtriton.kernels.permute import permute
from permtriton.kernels.quantize import FLOAT8, has_float8, quantize, quantize_tokens, round_to_fp8
from permtriton.kernels.sparse_linear import MMA, check_product, choose_route
from permtriton.util.sparsity import NMPattern

DENSE, DEQUANTIZED = 1, 2
ROUTES = {MMA: "mma FP8", DENSE: "dense FP8", DEQUANTIZED: "dequantized"}  # the default ones first
ROUTE_CONFIGS = tuple(Config({"ROUTE": route}) for route in ROUTES)
DENSE_MULTIPLE = 16  # of both dimensions, for `_scaled_mm`


def pack_fp8(weight: Tensor, pattern: NMPattern) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds an N:M weight ``[O, C]`` to float8; returns its float8 values, positions and float32 scales ``[O]``."""
    rounded, scale = round_to_fp8(weight)
    values, positions = pack(rounded.float(), pattern)
    return values.to(rounded.dtype), positions, scale.flatten().float()


def unpack_fp8(values: Tensor, positions: Tensor, scale: Tensor, in_features: int, pattern: NMPattern) -> Tensor:
    """Returns the dense weight, float32 ``[O, C]``."""
    return unpack(values, positions, in_features, pattern).float() * scale.unsqueeze(1)


def routed(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    pattern: NMPattern,
) -> Tensor:
    """Computes the product on a GPU by the fastest measured route, or else by the first possible one."""
    quantized, token_scale = quantize(x, index)
    product = mma.Product(x.numel() // max(in_features, 1), values.shape[0], in_features, x.dtype, fp8=True)
    route, variant = decided(_decide, product, x.device, pattern)
    if route == MMA:
        return variant.launch(quantized, values, positions, bias, (scale.contiguous(), token_scale))
    if route == DENSE:
        weight, tokens = unpack(values, positions, in_features, pattern), quantized.view(-1, in_features)
        scales = (token_scale.view(-1, 1), scale.view(1, -1))
        y = torch._scaled_mm(tokens, weight.t(), *scales, out_dtype=x.dtype)
        return (y if bias is None else y + bias).view(*x.shape[:-1], -1)
    weight = unpack_fp8(values, positions, scale, in_features, pattern).to(x.dtype)
    return linear((quantized.float() * token_scale).to(x.dtype), weight, bias)


def _decide(product: mma.Product, device: torch.device, pattern: NMPattern) -> tuple[int, mma.Variant | None]:
    """Returns the route of a product, and the variant of its kernel if the route is `MMA`."""
    whole = product.out_features % DENSE_MULTIPLE == 0 and product.in_features % DENSE_MULTIPLE == 0
    dense = product.tokens > 0 and product.dtype == torch.bfloat16 and whole and _multiplies_float8(device)
    possible = {MMA: mma.takes(product, pattern, device), DENSE: dense, DEQUANTIZED: True}
    routes = {one: name for one, name in ROUTES.items() if possible[one]}
    route, variant = choose_route("sparse_linear_fp8_route", routes, product, device)
    if 0 < product.tokens <= mma.MAX_TOKENS and MMA not in routes:
        warn_once(
            f"sparse_linear_fp8: packed FP8 weights are unpacked for each product here ({ROUTES[route]}), which is "
            "slower than a dense model: the kernel that multiplies them as they are needs a Hopper GPU, 16-bit "
            "activations, and a multiple of 256 input channels"
        )
    return route, variant


@functools.cache
def _multiplies_float8(device: torch.device) -> bool:
    """Whether torch multiplies float8 with a scale per row and per token on a GPU; tried once."""
    if not has_float8(device):
        return False
    x, scale = torch.zeros(16, 16, device=device).to(FLOAT8), torch.ones(16, 1, device=device)
    with suppress(RuntimeError):
        torch._scaled_mm(x, x.t(), scale, scale.t(), out_dtype=torch.bfloat16)
        return True
    return False


def _check(x: Tensor, values: Tensor, positions: Tensor, scale: Tensor, *others: Any) -> None:
    check_product(x, values, positions, *others, dtypes=(FLOAT8,))
    assert (scale.shape, scale.dtype) == (values.shape[:1], torch.float32), f"{scale.dtype} {scale.shape}"


@operator(
    lambda x, values, *_: x.new_empty((*x.shape[:-1], values.shape[0])),
    check=_check,
    launcher=routed,
)
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
        index, in_features, pattern: as `sparse_linear` takes them.
    """
    quantized, token_scale = quantize_tokens(x if index is None else permute(x, index))
    y = linear(quantized.float(), unpack_fp8(values, positions, scale, in_features, pattern)) * token_scale
    return (y if bias is None else y + bias).to(x.dtype)
