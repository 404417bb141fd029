from collections.abc import Sequence

import torch
from torch import Tensor

from permtriton.kernels import cusparselt
from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.packing import pack, unpack_reference
from permtriton.kernels.permute import permute_reference
from permtriton.kernels.sparse_linear import ROUTE_CONFIGS, sparse_linear
from permtriton.kernels.tools.case import PATTERN, Arguments, Case, Random, Shapes, rounding


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    return [sparse_linear_case(t, o, c, dtype, device) for t in tokens for o, c in shapes]


def sparse_linear_case(
    tokens: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device, gather: bool = False
) -> Case:
    """A linear with a packed 2:4 weight, optionally with a gather of its input; on every route that the GPU has."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        weight = random.two_of_four(out_features, in_features, dtype)
        index = random.stored_order(in_features, True) if gather else None
        there = cusparselt.supports(dtype, out_features, in_features, device)
        compressed = cusparselt.compress(weight) if there else None
        return random.normal(tokens, in_features, dtype=dtype), *pack(weight, PATTERN), index, compressed

    def run(x: Tensor, values: Tensor, positions: Tensor, index: Tensor | None, compressed: Tensor | None) -> Tensor:
        return sparse_linear(x, values, positions, None, index, in_features, PATTERN, compressed)

    def reference(x: Tensor, values: Tensor, positions: Tensor, index: Tensor | None, _: Tensor | None) -> Tensor:
        x = x if index is None else permute_reference(x, index)
        return x.double() @ unpack_reference(values, positions, in_features, PATTERN).double().t()

    weights = out_features * in_features
    packed = weights * dtype.itemsize // 2 + weights // 8
    moved = packed + tokens * (in_features + out_features) * dtype.itemsize
    tables = {"sparse_linear_route": ROUTE_CONFIGS}
    if mma.takes(product := mma.Product(tokens, out_features, in_features, dtype), PATTERN, device):
        tables["sparse_linear_mma"] = mma.configs_for(product, mma.limits_of(device))
    if cusparselt.takes(dtype, out_features, in_features):
        tables["cusparselt"] = cusparselt.CONFIGS
    return Case(
        "sparse_linear" + (" with gather" if gather else ""), f"{tokens} tokens {out_features}x{in_features}", dtype,
        make, run, reference, rounding(dtype), moved, tables, tokens * weights,  # 2 operations per kept weight
    )  # fmt: skip
