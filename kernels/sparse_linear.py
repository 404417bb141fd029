"""A linear layer whose N:M weight is stored packed: ``y = x[..., index] W^T + bias``.

The weight is from `permtriton.kernels.packing`. Shapes: ``x`` ``[..., C]``, ``bias`` ``[O]``, ``index`` ``[C]`` ->
``y`` ``[..., O]``. The reference unpacks the weight and multiplies densely. On a GPU, 2:4 weights take one of 3 routes:

    mma         the CUDA kernels of sparse_linear_mma.py, 1 to 256 tokens, 16 bits: the sparse tensor cores multiply the
                packed weight as it is; only packed bytes of W are read, 9/16 of the dense weight's at 16 bits
    cusparselt  `permtriton.kernels.cusparselt`, if ``compressed`` is given: half of the dense product's operations
    dense       unpacked by a kernel, then cuBLAS: any number of tokens; moves 25/16 of the dense weight's bytes more
                than a dense linear

Unless `permtriton autotune` measured a faster route for the shape, the number of tokens and the GPU (`ROUTE_CONFIGS` is
the table), the first possible one of mma, cusparselt and dense is taken; beyond 256 tokens, and beyond 64 without wgmma
(another GPU than Hopper, or channels that are no multiple of 128), cusparselt comes first. This order was measured on
an H200 (benchmarks/NOTES.md) and on no other GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from permtriton.errors import ModelError
from permtriton.kernels import cusparselt
from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.autotune import config_for, decided, note
from permtriton.kernels.launch import Config
from permtriton.kernels.operator import operator
from permtriton.kernels.packing import DTYPES, PATTERN, check_packed_shapes, unpack
from permtriton.kernels.permute import check_shapes, permute
from permtriton.util.permutation import inverse
from permtriton.util.sparsity import NMPattern

CUSPARSELT, DENSE, MMA = 1, 2, 3
MMA_TOKENS = 64  # most tokens for which mma is the default route without wgmma
ROUTES = {CUSPARSELT: "cusparselt", DENSE: "dense", MMA: "mma"}
ROUTE_CONFIGS: tuple[Config, ...] = tuple(Config({"ROUTE": route}) for route in (MMA, CUSPARSELT, DENSE))


def routed(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    pattern: NMPattern,
    compressed: Tensor | None,
) -> Tensor:
    """Computes the product on a GPU by the fastest measured route, or else by the default one."""
    product = mma.Product(x.numel() // max(in_features, 1), values.shape[0], in_features, x.dtype)
    has_form = compressed is not None and product.tokens > 0 and pattern == PATTERN and cusparselt.serves(x.device)
    route, variant = decided(_decide, product, x.device, pattern, has_form)
    x = x if index is None else permute(x, index)
    if route == MMA:
        return variant.launch(x, values, positions, bias)
    if route == CUSPARSELT:
        assert compressed is not None
        y = cusparselt.product(x.reshape(-1, in_features), compressed, bias, product.out_features)
        return y.view(*x.shape[:-1], product.out_features)
    return linear(x, unpack(values, positions, in_features, pattern), bias)


def _decide(
    product: mma.Product, device: torch.device, pattern: NMPattern, has_form: bool
) -> tuple[int, mma.Variant | None]:
    """Returns the route of a product, and the variant of its kernel if the route is `MMA`."""
    possible = {MMA: mma.takes(product, pattern, device), CUSPARSELT: has_form, DENSE: True}
    few = product.tokens <= (mma.MAX_TOKENS if mma.limits_of(device).is_wide(product.in_features) else MMA_TOKENS)
    routes = (MMA, CUSPARSELT, DENSE) if few else (CUSPARSELT, MMA, DENSE)
    return choose_route("sparse_linear_route", {one: ROUTES[one] for one in routes if possible[one]}, product, device)


def choose_route(
    table: str, routes: Mapping[int, str], product: mma.Product, device: torch.device
) -> tuple[int, mma.Variant | None]:
    """Returns the fastest measured one of ``routes``, or else the first, and the kernel's variant if it is `MMA`."""
    route = next(iter(routes))
    if len(routes) > 1:
        configs = [Config({"ROUTE": one}) for one in routes]
        route = config_for(table, configs, product[:3], product.dtype).constants["ROUTE"]
    variant = mma.chosen(product, device) if route == MMA else None
    if route == MMA and variant is None:  # the kernel failed its check
        return choose_route(table, {one: name for one, name in routes.items() if one != MMA}, product, device)
    note(f"route {product.name}", routes[route])
    return route, variant


def check_product(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    pattern: NMPattern,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """Refuses arguments that do not fit each other, because kernels would read beyond the ends of the tensors."""
    if not x.dim() or x.shape[-1] != in_features:
        raise ModelError(f"a packed linear: an input of shape {list(x.shape)}: expected [..., {in_features}]")
    check_packed_shapes(values, positions, in_features, pattern, dtypes)
    assert bias is None or (bias.shape, bias.dtype) == (values.shape[:1], x.dtype), f"{bias.dtype} {bias.shape}"
    if index is not None:
        check_shapes(x, index)


def _check(x: Tensor, values: Tensor, *others: Any) -> None:
    if x.dtype != values.dtype:
        raise ModelError(f"a packed linear: a {x.dtype} input for values of {values.dtype}: expected one dtype")
    check_product(x, values, *others[:-1])  # all but the compressed form


def _gradient(
    grad: Tensor, values: Tensor, positions: Tensor, index: Tensor | None, in_features: int, pattern: NMPattern
) -> dict[str, Callable[[], Tensor]]:
    def of_x() -> Tensor:
        grad_x = grad @ unpack(values, positions, in_features, pattern)
        return grad_x if index is None else permute(grad_x, inverse(index.long()))

    return {"x": of_x, "bias": lambda: grad.reshape(-1, grad.shape[-1]).sum(0)}


@operator(
    lambda x, values, *_: x.new_empty((*x.shape[:-1], values.shape[0])),
    check=_check,
    launcher=routed,
    gradient=_gradient,
    keeps=("values", "positions", "index", "in_features", "pattern"),
)
def sparse_linear(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    pattern: NMPattern,
    compressed: Tensor | None = None,
) -> Tensor:
    """Returns ``x[..., index] W^T + bias`` of a packed weight; differentiable in ``x`` and ``bias``.

    Args:
        x: ``[..., in_features]``, in the dtype of ``values``.
        values: ``[O, in_features / group * kept]``.
        positions: uint8, from `pack`. Their content is trusted.
        bias: ``[O]`` in the dtype of ``values``, or None.
        index: ``[in_features]``, any integer dtype, or None: the order into which ``x`` is brought first.
        in_features, pattern: C, and the N:M pattern of the weight.
        compressed: The same weight from `permtriton.kernels.cusparselt.compress`, or None; used on a GPU.
    """
    return linear(x if index is None else permute(x, index), unpack(values, positions, in_features, pattern), bias)
