from collections.abc import Sequence

import torch
from torch import Tensor

from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.quantize import quantize_tokens
from permtriton.kernels.sparse_linear_fp8 import ROUTE_CONFIGS, pack_fp8, sparse_linear_fp8, unpack_fp8
from permtriton.kernels.tools.case import PATTERN, Arguments, Case, Random, Shapes

LIMIT = 1e-2  # a value halfway between two float8 values may be rounded to either


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    return [sparse_linear_fp8_case(t, o, c, dtype, device) for t in tokens for o, c in shapes]


def sparse_linear_fp8_case(
    tokens: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """A linear with a packed 2:4 weight in FP8, and its input quantized; on every route that the GPU has."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        weight = random.two_of_four(out_features, in_features, dtype)
        return random.normal(tokens, in_features, dtype=dtype), *pack_fp8(weight, PATTERN)

    def run(x: Tensor, values: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
        return sparse_linear_fp8(x, values, positions, scale, None, None, in_features, PATTERN)

    def reference(x: Tensor, values: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
        quantized, token_scale = quantize_tokens(x)
        weight = unpack_fp8(values, positions, scale, in_features, PATTERN)
        return (quantized.double() * token_scale) @ weight.double().t()

    weights = out_features * in_features
    moved = weights * 5 // 8 + 4 * out_features + tokens * (in_features + out_features) * dtype.itemsize
    tables = {"sparse_linear_fp8_route": ROUTE_CONFIGS}
    if mma.takes(mma.Product(tokens, out_features, in_features, dtype, fp8=True), PATTERN, device):
        tables["sparse_linear_fp8"] = mma.WIDE_CONFIGS
    return Case(
        "sparse_linear_fp8", f"{tokens} tokens {out_features}x{in_features}", dtype, make, run, reference,
        LIMIT, moved, tables, tokens * weights // 2,  # 2 operations per kept weight, at twice the rate of 16 bits
    )  # fmt: skip
