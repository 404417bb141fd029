"""A norm that writes its output in another channel order: ``y[..., j] = norm(x)[..., index[j]]``.

With ``h = x / sqrt(mean(x^2) + eps)`` computed in float32, and ``cast`` rounding to the dtype of ``x`` (of "rms", to
that of the weight where it is narrower: T5 in float16 has a float32 stream):

    "rms"        norm(x) = (offset + weight) * cast(h)             LLaMA, Mistral, Qwen, T5
    "rms_float"  norm(x) = cast((offset + weight) * h)             OLMo 2, gpt-oss; Gemma with offset 1
    "layer"      norm(x) = layer_norm(x, offset + weight, bias)    torch's; Nemotron with offset 1

Sums and roundings follow the Hugging Face modules, in their order, so that outputs are equal bit for bit in float32,
bfloat16 and float16. In float64 the RMS kinds compute in float32, as those modules do; T5 and OLMo 2, which mix both
there, agree to within float32 rounding. Gradients are computed in float32 throughout, without the modules' intermediate
roundings.
Shapes: ``x`` ``[..., C]``, ``weight`` and ``bias`` ``[C]`` in the order of ``x``, ``index`` ``[C]`` of any integer
dtype -> ``y`` ``[..., C]``.
Bytes moved: x read once, y written once, as for the norm alone. On a GPU Triton runs the float32, bfloat16 and float16
norms, see `permtriton.kernels.norm_permute_triton`; the reference runs the others.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from permtriton.errors import ModelError
from permtriton.kernels import norm_permute_triton as kernels
from permtriton.kernels.operator import operator
from permtriton.kernels.permute import check_shapes, permute, permute_reference
from permtriton.util.permutation import inverse

KINDS = ("rms", "rms_float", "layer")


@dataclass(frozen=True)
class NormVariant:
    """The norm that a module computes.

    Attributes:
        kind: "rms", "rms_float" or "layer".
        eps: Number added to the mean square, or the variance.
        offset: Number added to the weight: 0.0, or 1.0 if the module stores the weight minus 1.
    """

    kind: str
    eps: float
    offset: float = 0.0

    def __post_init__(self) -> None:
        _check_kind(self.kind)


def norm_variants(eps: float, bias: bool) -> list[NormVariant]:
    """Returns the variants with this ``eps`` that a norm with (or without) a bias may compute."""
    kinds = ("layer",) if bias else KINDS
    return [NormVariant(kind, eps, offset) for offset in (0.0, 1.0) for kind in kinds]


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
    """The norm, in the order of ``x`` if there is no int64 ``index``; the RMS kinds compute in ``precision``."""
    if kind == "layer":
        y = layer_norm(x, weight.shape, _shifted(weight, offset), bias, eps)
        return y if index is None else permute_reference(y, index)
    hidden = x.to(precision)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    if index is not None:  # before rounding: on a CPU 32-bit values gather twice as fast as 16-bit ones
        hidden, weight = permute_reference(hidden, index), weight[index]
    if kind == "rms":
        narrow = min(x.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
        return (_shifted(weight, offset) * hidden.to(narrow)).to(weight.dtype)
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


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ModelError(f"a norm of kind {kind!r}: expected one of {', '.join(KINDS)}")


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, _eps: float, _offset: float, kind: str
) -> None:
    check_shapes("norm_permute", x, index)
    _check_kind(kind)
    if bias is not None and kind != "layer":
        raise ModelError(f"norm_permute: a bias in a norm of kind {kind!r}: only 'layer' takes one")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise ModelError(
                f"norm_permute: a {name} of shape {list(tensor.shape)} for an input of shape {list(x.shape)}: "
                f"expected [{x.shape[-1]}]"
            )
    if not x.is_floating_point():
        raise ModelError(f"norm_permute: an input of {x.dtype}: expected a floating-point dtype")


def _backward_on_gpu(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _three(*kernels.norm_permute_backward_triton(*arguments))


def _three(grad_x: Tensor, grad_weight: Tensor, grad_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return grad_x.contiguous(), grad_weight, grad_weight.new_empty(0) if grad_bias is None else grad_bias


@operator(
    "norm_permute_backward",
    lambda grad, x, weight, bias, *_: _three(
        torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight),
        None if bias is None else torch.empty_like(bias),
    ),
    launcher=_backward_on_gpu,
    supports=lambda grad, x, weight, bias, *_: kernels.takes(x, weight, bias),
)  # fmt: skip
def norm_permute_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, eps: float, offset: float, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, weight and bias, of which that of a bias that is None is empty."""
    ordered = permute(grad, inverse(index.long()))
    return _three(*norm_backward_reference(ordered, x, weight, bias, eps, offset, kind))


def _gradient(grad: Tensor, *inputs: Any) -> dict[str, Tensor | None]:
    bias = inputs[2]
    grad_x, grad_weight, grad_bias = norm_permute_backward(grad, *inputs)
    return {"x": grad_x, "weight": grad_weight, "bias": None if bias is None else grad_bias}


@operator(
    "norm_permute",
    lambda x, weight, bias, index, eps, offset, kind: x.new_empty(
        x.shape, dtype=weight.dtype if kind == "rms" else x.dtype
    ),
    check=_check,
    launcher=kernels.norm_permute_triton,
    supports=lambda x, weight, bias, *_: kernels.takes(x, weight, bias),
    gradient=_gradient,
    keeps=("x", "weight", "bias", "index", "eps", "offset", "kind"),
)
def norm_permute(
    x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, eps: float, offset: float, kind: str
) -> Tensor:
    """Returns ``norm(x)[..., index]``; differentiable in ``x``, ``weight`` and ``bias``.

    Args:
        x: ``[..., C]``, floating point.
        weight: ``[C]``, in the order of ``x``.
        bias: ``[C]`` or None; None for the RMS kinds.
        index: ``[C]``, a permutation, any integer dtype.
        eps: Number added to the mean square, or the variance.
        offset: Number added to ``weight``.
        kind: "rms", "rms_float" or "layer".

    Returns:
        ``[..., C]``, contiguous, in the dtype of ``x``, or of the weight for "rms", as the modules do.

    Raises:
        ModelError: shapes that do not fit, an unknown kind, or a bias with an RMS kind.
    """
    return norm_reference(x, weight, bias, eps, offset, kind, index.long())
