"""A norm that writes its output in another order of channels: ``y[..., j] = norm(x)[..., index[j]]``.

With ``h = x / sqrt(mean(x^2) + eps)`` computed in float32 and ``cast`` the rounding to the dtype of ``x``:

    "rms"        norm(x) = (offset + weight) * cast(h)             LLaMA, Mistral, Qwen, T5
    "rms_float"  norm(x) = cast((offset + weight) * h)             OLMo 2, gpt-oss; Gemma with offset 1
    "layer"      norm(x) = layer_norm(x, offset + weight, bias)    torch's; Nemotron with offset 1

These are the sums and roundings of the Hugging Face modules, in their order, so that outputs are equal bit for bit in
float32, bfloat16 and float16. In float64 the RMS kinds compute in float32, as those modules do; T5 and OLMo 2, which
mix both there, agree to float32's rounding. Gradients are computed in float32 throughout, without the roundings that
the modules have in between.
Shapes: ``x`` ``[..., C]``, ``weight`` and ``bias`` ``[C]`` in the order of ``x``, ``index`` ``[C]`` of any integer
dtype -> ``y`` ``[..., C]``.
Bytes moved: x read once, y written once, as the norm alone. Triton runs the float32, bfloat16 and float16 norms, see
`permtriton.kernels.norm_permute_triton`; the reference the others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from permtriton.errors import ConfigError, ModelError
from permtriton.kernels import norm_permute_triton as kernels
from permtriton.kernels.launch import on_gpu
from permtriton.kernels.permute import check_shapes, permute, permute_reference
from permtriton.permutation import inverse

KINDS = ("rms", "rms_float", "layer")


@dataclass(frozen=True)
class NormVariant:
    """Which norm a module computes.

    Attributes:
        kind: "rms", "rms_float" or "layer".
        eps: added to the mean square, or the variance.
        offset: added to the weight: 0.0, or 1.0 where the module stores the weight's distance from 1.
    """

    kind: str
    eps: float
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"a norm of kind {self.kind!r}: expected one of {', '.join(KINDS)}")


def norm_variants(eps: float, bias: bool) -> list[NormVariant]:
    """Returns every variant with this ``eps`` that a norm with, or without, a bias can be."""
    kinds = ("layer",) if bias else KINDS
    return [NormVariant(kind, eps, offset) for offset in (0.0, 1.0) for kind in kinds]


def norm_permute(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, eps: float, offset: float, kind: str
) -> Tensor:
    """Returns ``norm(x)[..., index]``; differentiable in ``x``, ``weight`` and ``bias``.

    Args:
        x: ``[..., C]``, floating point.
        weight: ``[C]``, in the order of ``x``.
        bias: ``[C]`` or None; None for the kinds without a mean.
        index: ``[C]``, a permutation, any integer dtype.
        eps: added to the mean square, or the variance.
        offset: added to ``weight``.
        kind: "rms", "rms_float" or "layer".

    Returns:
        ``[..., C]``, contiguous, in the dtype of ``x``; "rms" promotes it with the weight's, as the modules do.

    Raises:
        ModelError: shapes that do not fit, a kind that is none, a bias where none can be.
    """
    return torch.ops.permtriton.norm_permute(x, weight, bias, index, eps, offset, kind)


def norm_permute_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, eps: float, offset: float, kind: str
) -> Tensor:
    """The norm and the gather in plain torch."""
    return norm_reference(x, weight, bias, eps, offset, kind, index.long())


def norm_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
    kind: str,
    index: Tensor | None = None,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """The norm, in the order of ``x`` without an int64 ``index``; the RMS kinds compute in ``precision``."""
    if kind == "layer":
        y = layer_norm(x, weight.shape, _shifted(weight, offset), bias, eps)
        return y if index is None else permute_reference(y, index)
    hidden = x.to(precision)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    if index is not None:  # before it is rounded: on a CPU 32-bit values gather twice as fast as 16-bit ones
        hidden, weight = permute_reference(hidden, index), weight[index]
    if kind == "rms":
        return _shifted(weight, offset) * hidden.to(x.dtype)
    return (_shifted(weight.to(precision), offset) * hidden).to(x.dtype)


def norm_backward_reference(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
    kind: str,
    precision: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of x, weight and bias; ``grad`` is in the order of ``x``.

    With ``g = grad * (offset + weight)`` and ``r = 1 / sqrt(mean(x^2) + eps)``: ``dx = r (g - h mean(g h))``.
    """
    if kind == "layer":
        scale = _shifted(weight, offset)
        _, mean, rstd = torch.native_layer_norm(x, weight.shape, scale, bias, eps)
        arguments = (grad.contiguous(), x, weight.shape, mean, rstd, scale, bias, [True, True, bias is not None])
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(*arguments)
        return grad_x, grad_weight, None if bias is None else grad_bias
    hidden, grad = x.to(precision), grad.to(precision)
    root = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    hidden = hidden * root
    grad_weight = (grad * hidden).reshape(-1, weight.numel()).sum(0).to(weight.dtype)
    grad = grad * _shifted(weight.to(precision), offset)
    grad_x = root * (grad - hidden * (grad * hidden).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), grad_weight, None


def _shifted(weight: Tensor, offset: float) -> Tensor:
    return weight + offset if offset else weight


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, kind: str) -> None:
    check_shapes("norm_permute", x, index)
    if kind not in KINDS:
        raise ModelError(f"norm_permute: a norm of kind {kind!r}: expected one of {', '.join(KINDS)}")
    if bias is not None and kind != "layer":
        raise ModelError(f"norm_permute: a bias in a norm of kind {kind!r}: only 'layer' has one")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise ModelError(
                f"norm_permute: a {name} of shape {list(tensor.shape)} for an input of shape {list(x.shape)}: "
                f"expected [{x.shape[-1]}]"
            )
    if not x.is_floating_point():
        raise ModelError(f"norm_permute: an input of {x.dtype}: expected a floating-point one")


@torch.library.custom_op("permtriton::norm_permute", mutates_args=())
def _norm_permute(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, eps: float, offset: float, kind: str
) -> Tensor:
    _check(x, weight, bias, index, kind)
    return norm_permute_reference(x, weight, bias, index, eps, offset, kind)


@_norm_permute.register_fake
def _(x, weight, bias, index, eps, offset, kind):  # type: ignore[no-untyped-def]
    _check(x, weight, bias, index, kind)
    dtype = torch.promote_types(x.dtype, weight.dtype) if kind == "rms" else x.dtype
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("permtriton::norm_permute_backward", mutates_args=())
def _norm_permute_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, eps: float, offset: float, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of a bias that is None is empty: an operator returns tensors only."""
    ordered = permute_reference(grad, inverse(index.long()))
    return _three(*norm_backward_reference(ordered, x, weight, bias, eps, offset, kind))


@_norm_permute_backward.register_fake
def _(grad, x, weight, bias, index, eps, offset, kind):  # type: ignore[no-untyped-def]
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, weight.new_empty(weight.shape), weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)


def _three(grad_x: Tensor, grad_weight: Tensor, grad_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return grad_x.contiguous(), grad_weight, grad_weight.new_empty(0) if grad_bias is None else grad_bias


@on_gpu(_norm_permute)
def _(x, weight, bias, index, eps, offset, kind):  # type: ignore[no-untyped-def]
    _check(x, weight, bias, index, kind)
    run = kernels.norm_permute_triton if kernels.takes(x, weight, bias) else norm_permute_reference
    return run(x, weight, bias, index, eps, offset, kind)


@on_gpu(_norm_permute_backward)
def _(grad, x, weight, bias, index, eps, offset, kind):  # type: ignore[no-untyped-def]
    if not kernels.takes(x, weight, bias):
        ordered = permute(grad, inverse(index.long()))
        return _three(*norm_backward_reference(ordered, x, weight, bias, eps, offset, kind))
    return _three(*kernels.norm_permute_backward_triton(grad, x, weight, bias, index, eps, offset, kind))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, index, ctx.eps, ctx.offset, ctx.kind = inputs
    ctx.save_for_backward(x, weight, bias, index)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    x, weight, bias, index = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = torch.ops.permtriton.norm_permute_backward(
        grad, x, weight, bias, index, ctx.eps, ctx.offset, ctx.kind
    )
    return grad_x, grad_weight, None if bias is None else grad_bias, None, None, None, None


_norm_permute.register_autograd(_backward, setup_context=_setup_context)
