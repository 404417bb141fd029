"""A linear layer whose N:M weight is stored packed: ``y = x[..., index] W^T + bias``.

The weight is `permtriton.kernels.packing`'s. Shapes: ``x`` ``[..., C]``, ``bias`` ``[O]``, ``index`` ``[C]`` -> ``y``
``[..., O]``. The reference unpacks the weight and multiplies densely. On a GPU a 2:4 weight takes one of three routes:

    packed      the Triton kernels of sparse_linear_triton.py, 1 to 64 tokens: packed bytes are all that is read of W,
                at 16 bits 9/16 of the dense weight's
    cusparselt  `permtriton.kernels.cusparselt`, where ``compressed`` is given: half of the dense product's operations
    dense       unpacked by a kernel, then cuBLAS: any number of tokens; 25/16 of the dense weight's bytes beside it

The first that is possible is taken, unless `permtriton autotune` measured another one to be faster for the shape, the
number of tokens and the GPU (`ROUTE_CONFIGS` is the table).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from permtriton.errors import ModelError
from permtriton.kernels import cusparselt
from permtriton.kernels import sparse_linear_triton as kernels
from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Config, on_gpu
from permtriton.kernels.packing import check_packed_shapes, unpack
from permtriton.kernels.permute import check_shapes, permute
from permtriton.permutation import inverse

PACKED, CUSPARSELT, DENSE = 0, 1, 2
ROUTE_CONFIGS: tuple[Config, ...] = tuple(Config({"ROUTE": route}) for route in (PACKED, CUSPARSELT, DENSE))


def sparse_linear(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    kept: int,
    group: int,
    compressed: Tensor | None = None,
) -> Tensor:
    """Returns ``x[..., index] W^T + bias`` of a packed weight; differentiable in ``x`` and ``bias``.

    Args:
        x: ``[..., in_features]``, in the dtype of ``values``.
        values: ``[O, in_features / group * kept]``.
        positions: uint8, as `pack` makes them. Their content is trusted: see `check_packed`.
        bias: ``[O]`` or None.
        index: ``[in_features]``, any integer dtype, or None: the order that ``x`` is brought into first.
        in_features: C.
        kept: weights kept in a group.
        group: consecutive channels in a group.
        compressed: the same weight as `permtriton.kernels.cusparselt.compress` makes it, or None; used on a GPU.

    Raises:
        ModelError: shapes or dtypes that do not fit.
    """
    return torch.ops.permtriton.sparse_linear(x, values, positions, bias, index, in_features, kept, group, compressed)


def sparse_linear_reference(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    kept: int,
    group: int,
) -> Tensor:
    """Unpacks the weight and multiplies densely: the same product, bit for bit, as with the weight before packing."""
    x = x if index is None else permute(x, index)
    return linear(x, unpack(values, positions, in_features, kept, group), bias)


def routed(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    kept: int,
    group: int,
    compressed: Tensor | None,
) -> Tensor:
    """The same by the route that was measured to be the fastest, or the first that is possible."""
    tokens, out_features = x.numel() // max(in_features, 1), values.shape[0]
    arguments = (x, values, positions, bias, index, in_features, kept, group)
    possible: dict[int, Callable[[], Tensor]] = {}
    if kernels.supports(x, values, in_features, kept, group):
        possible[PACKED] = partial(kernels.sparse_linear_triton, *arguments)
    if compressed is not None and tokens and (kept, group) == (2, 4):
        possible[CUSPARSELT] = partial(_by_cusparselt, x, compressed, bias, index, out_features)
    possible[DENSE] = partial(sparse_linear_reference, *arguments)
    configs = [config for config in ROUTE_CONFIGS if config.constants["ROUTE"] in possible]
    config = configs[0]
    if len(configs) > 1:
        config = config_for("sparse_linear_route", configs, (tokens, out_features, in_features), x.dtype)
    return possible[config.constants["ROUTE"]]()


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
    kept: int,
    group: int,
    compressed: Tensor | None,
) -> None:
    if values.dim() != 2 or not x.dim() or x.shape[-1] != in_features or x.dtype != values.dtype:
        raise ModelError(
            f"sparse_linear: a {x.dtype} input of shape {list(x.shape)} for {values.dtype} values of shape "
            f"{list(values.shape)}: expected [..., {in_features}] and two dimensions of one dtype"
        )
    check_packed_shapes(values, positions, values.shape[0], in_features, kept, group)
    if bias is not None and bias.shape != values.shape[:1]:
        raise ModelError(f"sparse_linear: a bias of shape {list(bias.shape)}: expected [{values.shape[0]}]")
    if index is not None:
        check_shapes("sparse_linear", x, index)
    if compressed is not None:
        least, rows = values.shape[0] * in_features * 9 // 16, max(values.shape[0], 1)
        if compressed.dtype != values.dtype or compressed.numel() < least or compressed.numel() % rows:
            raise ModelError(
                f"sparse_linear: a compressed weight of {compressed.numel()} {compressed.dtype}: expected at least "
                f"{least} {values.dtype}, {rows} equal rows, for a 2:4 weight [{values.shape[0]}, {in_features}]"
            )


@torch.library.custom_op("permtriton::sparse_linear", mutates_args=())
def _sparse_linear(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    kept: int,
    group: int,
    compressed: Tensor | None = None,
) -> Tensor:
    _check(x, values, positions, bias, index, in_features, kept, group, compressed)
    return sparse_linear_reference(x, values, positions, bias, index, in_features, kept, group)


@on_gpu(_sparse_linear)
def _sparse_linear_cuda(x, values, positions, bias, index, in_features, kept, group, compressed=None):  # type: ignore[no-untyped-def]
    arguments = (x, values, positions, bias, index, in_features, kept, group, compressed)
    _check(*arguments)
    return routed(*arguments)


@_sparse_linear.register_fake
def _(x, values, positions, bias, index, in_features, kept, group, compressed=None):  # type: ignore[no-untyped-def]
    _check(x, values, positions, bias, index, in_features, kept, group, compressed)
    return x.new_empty((*x.shape[:-1], values.shape[0]))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, values, positions, _, index, ctx.in_features, ctx.kept, ctx.group, _ = inputs
    ctx.save_for_backward(values, positions, index)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    values, positions, index = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = grad @ unpack(values, positions, ctx.in_features, ctx.kept, ctx.group)
        if index is not None:
            grad_x = permute(grad_x, inverse(index.long()))
    if ctx.needs_input_grad[3]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return grad_x, None, None, grad_bias, None, None, None, None, None


_sparse_linear.register_autograd(_backward, setup_context=_setup_context)
