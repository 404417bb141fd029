"""A linear layer whose N:M weight is stored packed: ``y = x[..., index] W^T + bias``.

The weight is from `permtriton.kernels.packing`. Shapes: ``x`` ``[..., C]``, ``bias`` ``[O]``, ``index`` ``[C]`` ->
``y`` ``[..., O]``. The reference unpacks the weight and multiplies densely. On a GPU, 2:4 weights take one of 3 routes:

    mma         the CUDA kernels of sparse_linear_mma.py, 1 to 256 tokens, 16 bits: the sparse tensor cores multiply the
                packed weight as it is; only packed bytes are read of W, 9/16 of the dense weight's at 16 bits
    cusparselt  `permtriton.kernels.cusparselt`, if ``compressed`` is given: half of the dense product's operations
    dense       unpacked by a kernel, then cuBLAS: any number of tokens; moves 25/16 of the dense weight's bytes more
                than a dense linear

Unless `permtriton autotune` measured a faster route for the shape, the number of tokens and the GPU (`ROUTE_CONFIGS` is
the table), the first possible one of mma, cusparselt and dense is taken; beyond 256 tokens, and beyond 64 without wgmma
(another GPU than Hopper, or channels that are no multiple of 128), cusparselt comes first. This order was measured on
an H200 (benchmarks/NOTES.md) and on no other GPU.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from permtriton.errors import ModelError
from permtriton.kernels import cusparselt
from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.autotune import config_for, decided, note
from permtriton.kernels.launch import Config
from permtriton.kernels.operator import operator
from permtriton.kernels.packing import PATTERN, check_packed_shapes, unpack
from permtriton.kernels.permute import check_shapes, permute
from permtriton.util.permutation import inverse
from permtriton.util.sparsity import NMPattern

CUSPARSELT, DENSE, MMA = 1, 2, 3
MMA_TOKENS = 64  # most tokens for which mma is the default route without wgmma
ROUTES = {CUSPARSELT: "cusparselt", DENSE: "dense", MMA: "mma"}
ROUTE_CONFIGS: tuple[Config, ...] = tuple(Config({"ROUTE": route}) for route in (MMA, CUSPARSELT, DENSE))


def sparse_linear_reference(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    pattern: NMPattern,
) -> Tensor:
    """Unpacks the weight and multiplies densely: the same bits as the product with the weight before packing."""
    x = x if index is None else permute(x, index)
    return linear(x, unpack(values, positions, in_features, pattern), bias)


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
    tokens = x.numel() // max(in_features, 1)
    shape = (tokens, values.shape[0], in_features, x.dtype)
    has_form = compressed is not None and tokens > 0 and pattern == PATTERN and cusparselt.serves(x.device)
    route, variant = decided(("sparse_linear", shape, x.device, pattern, has_form), _decide)
    if route == MMA:
        return mma.sparse_linear_mma(x, values, positions, bias, index, in_features, pattern, variant)
    if route == CUSPARSELT:
        assert compressed is not None
        return _by_cusparselt(x, compressed, bias, index, values.shape[0])
    return sparse_linear_reference(x, values, positions, bias, index, in_features, pattern)


def _decide(
    _: str, shape: tuple[int, int, int, torch.dtype], device: torch.device, pattern: NMPattern, has_form: bool
) -> tuple[int, mma.Variant | None]:
    """Returns the route of a product ``(tokens, O, C, dtype)``, and the variant of its kernel."""
    tokens, out_features, in_features, _dtype = shape
    by_mma = mma.runs_on(device) and mma.takes(*shape, pattern)
    possible = [route for route, can in ((MMA, by_mma), (CUSPARSELT, has_form), (DENSE, True)) if can]
    first = MMA if tokens <= (mma.MAX_TOKENS if mma.is_wide(in_features, device) else MMA_TOKENS) else CUSPARSELT
    route, variant = _route(*shape, first, possible), None
    if route == MMA and (variant := mma.chosen(*shape, device)) is None:  # the kernel failed its check
        route = _route(*shape, first, [other for other in possible if other != MMA])
    note(f"route {tokens}x{out_features}x{in_features}", ROUTES[route])
    return route, variant


def _route(
    tokens: int, out_features: int, in_features: int, dtype: torch.dtype, first: int, possible: Sequence[int]
) -> int:
    configs = [config for config in ROUTE_CONFIGS if config.constants["ROUTE"] in possible]
    configs.sort(key=lambda config: config.constants["ROUTE"] != first)
    config = configs[0]
    if len(configs) > 1:
        config = config_for("sparse_linear_route", configs, (tokens, out_features, in_features), dtype)
    return config.constants["ROUTE"]


def _by_cusparselt(
    x: Tensor, compressed: Tensor, bias: Tensor | None, index: Tensor | None, out_features: int
) -> Tensor:
    rows = (x if index is None else permute(x, index)).reshape(-1, x.shape[-1])
    return cusparselt.product(rows, compressed, bias, out_features).view(*x.shape[:-1], out_features)


def _check(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    pattern: NMPattern,
    _compressed: Tensor | None,
) -> None:
    if values.dim() != 2 or not x.dim() or x.shape[-1] != in_features or x.dtype != values.dtype:
        raise ModelError(
            f"sparse_linear: a {x.dtype} input of shape {list(x.shape)} for {values.dtype} values of shape "
            f"{list(values.shape)}: expected [..., {in_features}] and two dimensions of one dtype"
        )
    check_packed_shapes(values, positions, values.shape[0], in_features, pattern)
    assert bias is None or (bias.shape, bias.dtype) == (values.shape[:1], values.dtype), f"{bias.dtype} {bias.shape}"
    if index is not None:
        check_shapes(x, index)


def _gradient(
    grad: Tensor, values: Tensor, positions: Tensor, index: Tensor | None, in_features: int, pattern: NMPattern
) -> dict[str, Callable[[], Tensor]]:
    def of_x() -> Tensor:
        grad_x = grad @ unpack(values, positions, in_features, pattern)
        return grad_x if index is None else permute(grad_x, inverse(index.long()))

    return {"x": of_x, "bias": lambda: grad.reshape(-1, grad.shape[-1]).sum(0)}


@operator(
    "sparse_linear",
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
        in_features: C.
        pattern: N:M pattern of the weight.
        compressed: The same weight from `permtriton.kernels.cusparselt.compress`, or None; used on a GPU.
    """
    return sparse_linear_reference(x, values, positions, bias, index, in_features, pattern)
