# mypy: allow-untyped-defs
"""A norm that writes its output in another channel order: ``y[..., j] = norm(x)[..., index[j]]``.

With ``h = x / sqrt(mean(x^2) + eps)`` computed in float32, and ``cast`` rounding to the dtype of ``x`` (for "rms", to
that of the weight if it is narrower: T5 in float16 has a float32 residual stream):

    "rms"        norm(x) = (offset + weight) * cast(h)             LLaMA, Mistral, Qwen, T5
    "rms_float"  norm(x) = cast((offset + weight) * h)             OLMo 2, gpt-oss; Gemma with offset 1
    "layer"      norm(x) = layer_norm(x, offset + weight, bias)    torch's; Nemotron with offset 1

Sums and roundings follow the Hugging Face modules, in their order, so that outputs are equal bit for bit in float32,
bfloat16 and float16. In float64 the RMS kinds compute in float32, as those modules do; T5 and OLMo 2, which mix float32
and float64 there, agree to within float32 rounding. Gradients are computed in float32 throughout, without the modules'
intermediate roundings.
Shapes: ``x`` ``[..., C]``, ``weight`` and ``bias`` ``[C]`` in the order of ``x``, ``index`` ``[C]`` of any integer
dtype -> ``y`` ``[..., C]``.
Bytes moved: x read once, y written once, as for the norm alone. On a GPU a Triton kernel computes norms in float32,
bfloat16 and float16 of rows that fit into registers (see `permtriton.kernels.quantize.holds`); other norms, and the
backward pass, run the reference.

A program of the kernel holds a row in registers: one read, the norm in float32, a gather through shared memory of the
values rounded to the output's dtype, and one write in runs of 16 bytes.
Other ways to gather within a row cost more than the norm alone, which moves 2 + 2 bytes per channel: a scatter
``y[inverse[j]]`` writes 2 bytes of a 32-byte sector at a time, sixteen times the write traffic of the floor; a second
load ``x[index[j]]`` hits the cache, but a warp touches up to 32 lines, 32 cycles for 64 bytes, where shared memory
takes about four. A program walks over rows and holds weight and index of up to `HELD` channels in registers, so that
they are read once per program, while Triton's pipelining copies the next rows into shared memory. That needs
``num_stages=3``: with 2, the next row is loaded only after the gather and store of this one. Loading the next row into
registers instead, as `permute` does, leaves fewer programs per multiprocessor for four of the six combinations of kind
and dtype.
Floor: x read and y written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import DTYPES, Config, jit, tl, triton
from permtriton.kernels.operator import operator
from permtriton.kernels.permute import check_shapes, load_index, permute, permute_reference, programs_for, warps_for
from permtriton.kernels.quantize import holds, rows_of
from permtriton.util.permutation import inverse

KINDS = ("rms", "rms_float", "layer")  # KIND in a kernel is the index in this tuple

HELD = 8192  # padded channels up to which a program holds weight and index; beyond, it reads them for every row

# num_warps is for rows of 4096 channels and is scaled with their length; longer rows get twice that, so that LLVM
# merges the gather's stores to shared memory into 16-byte ones: see `permtriton.kernels.permute`.
CONFIGS = (Config(num_warps=8), Config(num_warps=16))


@dataclass(frozen=True)
class NormVariant:
    """The norm that a module computes."""

    kind: str  # "rms", "rms_float" or "layer"
    eps: float  # number added to the mean square, or the variance
    offset: float = 0.0  # number added to the weight: 0.0, or 1.0 if the module stores the weight minus 1

    def shifted(self, weight: Tensor) -> Tensor:
        return weight + self.offset if self.offset else weight


def norm_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    variant: NormVariant,
    index: Tensor | None = None,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Returns the norm in the order of ``index``, int64, or else of ``x``; the RMS kinds compute in ``precision``."""
    if variant.kind == "layer":
        y = layer_norm(x, weight.shape, variant.shifted(weight), bias, variant.eps)
        return y if index is None else permute_reference(y, index)
    hidden = x.to(precision)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + variant.eps)
    if index is not None:  # before rounding: on a CPU 32-bit values gather twice as fast as 16-bit ones
        hidden, weight = permute_reference(hidden, index), weight[index]
    if variant.kind == "rms":
        narrow = min(x.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
        return (variant.shifted(weight) * hidden.to(narrow)).to(weight.dtype)
    return (variant.shifted(weight.to(precision)) * hidden).to(x.dtype)


def norm_backward_reference(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    variant: NormVariant,
    precision: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of x, weight and bias (None without bias); ``grad`` is in the order of ``x``.

    RMS kinds: ``dx = r (g - h mean(g h))`` with ``g = grad * (offset + weight)`` and ``r = 1 / sqrt(mean(x^2) + eps)``.
    """
    if variant.kind == "layer":
        wide = torch.promote_types(x.dtype, weight.dtype)  # on a GPU torch takes one dtype for all
        hidden, scale, bias = x.to(wide), variant.shifted(weight).to(wide), None if bias is None else bias.to(wide)
        _, mean, rstd = torch.native_layer_norm(hidden, weight.shape, scale, bias, variant.eps)
        shared = (hidden, weight.shape, mean, rstd, scale, bias, [True, True, bias is not None])
        grads = torch.ops.aten.native_layer_norm_backward(grad.to(wide).contiguous(), *shared)
        return grads[0].to(x.dtype), grads[1].to(weight.dtype), None if bias is None else grads[2].to(weight.dtype)
    hidden, grad = x.to(precision), grad.to(precision)
    root = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + variant.eps)
    hidden = hidden * root
    grad_weight = (grad * hidden).reshape(-1, weight.numel()).sum(0).to(weight.dtype)
    grad = grad * variant.shifted(weight.to(precision))
    grad_x = root * (grad - hidden * (grad * hidden).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), grad_weight, None


@jit
def _normalized(row, inside, C, eps, KIND: tl.constexpr):
    """The normalized float32 row; 0 outside."""
    if KIND == 2:
        row = tl.where(inside, row - tl.sum(row, 0) / C, 0.0)
    return row * tl.rsqrt(tl.sum(row * row, 0) / C + eps)


@jit
def _scaled(hidden, scale, offset, X_DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Float32 (offset + weight) h, rounded as by the modules: for "rms", h to the narrower dtype of x and weight."""
    if KIND == 0:
        if scale.dtype.primitive_bitwidth < X_DTYPE.primitive_bitwidth:
            hidden = hidden.to(scale.dtype).to(tl.float32)
        else:
            hidden = hidden.to(X_DTYPE).to(tl.float32)
    factor = scale.to(tl.float32) + offset
    if KIND != 1:
        factor = factor.to(scale.dtype).to(tl.float32)
    return hidden * factor


@jit
def _added(value, residual_ptr, total_ptr, inside, ADD: tl.constexpr):
    """Returns a row plus its residual, if there is one, and stores the sum, rounded as by torch."""
    if ADD:
        residual = tl.load(residual_ptr, mask=inside, other=0.0)
        value = (value.to(tl.float32) + residual.to(tl.float32)).to(value.dtype)
        tl.store(total_ptr, value, mask=inside)
    return value


@jit
def _norm_permute_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, index_ptr, y_ptr, rows, C, row_stride, eps, offset, residual_ptr, total_ptr,
    residual_stride, BLOCK_C: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, HOLD: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, BLOCK_C)
    inside = channel < C
    if HOLD:
        source = load_index(index_ptr, channel, inside, C)
        scale = tl.load(weight_ptr + channel, mask=inside, other=0.0)
        if BIAS:
            shift = tl.load(bias_ptr + channel, mask=inside, other=0.0)
    # Pipelined only if weight and index are held: pipelining stages all that the loop loads, which should be rows only.
    for row in tl.range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0), num_stages=3 if HOLD else 1):
        value = tl.load(x_ptr + row * row_stride + channel, mask=inside, other=0.0)
        value = _added(
            value, residual_ptr + row * residual_stride + channel, total_ptr + row * C + channel, inside, ADD
        )
        result = _normalized(value.to(tl.float32), inside, C, eps, KIND)
        if not HOLD:
            scale = tl.load(weight_ptr + channel, mask=inside, other=0.0)
        result = _scaled(result, scale, offset, value.dtype, KIND)
        if BIAS:
            if not HOLD:
                shift = tl.load(bias_ptr + channel, mask=inside, other=0.0)
            result += shift.to(tl.float32)
        if not HOLD:
            source = load_index(index_ptr, channel, inside, C)
        result = tl.gather(result.to(scale.dtype if KIND == 0 else value.dtype), source, 0)
        tl.store(y_ptr + row * C + channel, result, mask=inside)


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel supports the dtypes and the length of the rows."""
    return all(tensor is None or tensor.dtype in DTYPES for tensor in (x, weight, bias)) and holds(x)


def norm_permute_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    variant: NormVariant,
    added: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Computes `norm_permute` of inputs that `takes` accepts.

    ``added`` is (residual that is added to ``x``, output for the sum), both in the dtype and shape of ``x``, or None.
    """
    kind = variant.kind
    hidden, dtype = rows_of(x), weight.dtype if kind == "rms" else x.dtype
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    weight, index, bias = weight.contiguous(), index.contiguous(), None if bias is None else bias.contiguous()
    rows, channels = hidden.shape
    block = triton.next_power_of_2(channels)
    residual, total = (hidden, y) if added is None else (rows_of(added[0]), added[1])
    config = config_for("norm_permute", CONFIGS, (rows, channels), x.dtype)
    warps = warps_for(config, block if block <= 4096 else 2 * block)
    resident = 16 if kind == "layer" else 24 if x.dtype == torch.float32 else 32  # warps, at 92, 78 or 64 registers
    grid = (programs_for(x, rows, triton.cdiv(resident, warps)),)
    _norm_permute_fwd_kernel[grid](
        hidden, weight, weight if bias is None else bias, index, y, rows, channels, hidden.stride(0), variant.eps,
        variant.offset, residual, total, residual.stride(0), BLOCK_C=block, KIND=KINDS.index(kind),
        BIAS=bias is not None, HOLD=block <= HELD, ADD=added is not None, num_warps=warps,
    )  # fmt: skip
    return y


def add_norm_permute_triton(
    x: Tensor, residual: Tensor, weight: Tensor, index: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Computes `add_norm_permute` of inputs that `takes` accepts, with ``residual`` in the dtype of ``x``."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return norm_permute_triton(x, weight, None, index, NormVariant("rms", eps), added=(residual, total)), total


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, variant: NormVariant) -> None:
    check_shapes(x, index)
    assert variant.kind in (KINDS if bias is None else ("layer",)), f"a norm of kind {variant.kind}"
    for vector in (weight, bias):
        assert vector is None or vector.shape == x.shape[-1:], f"a vector {list(vector.shape)} for {list(x.shape)}"


def _gradient(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, variant: NormVariant
) -> dict[str, Tensor | None]:
    grads = norm_backward_reference(permute(grad, inverse(index.long())), x, weight, bias, variant)
    return dict(zip(("x", "weight", "bias"), grads, strict=True))


@operator(
    lambda x, weight, bias, index, variant: x.new_empty(
        x.shape, dtype=weight.dtype if variant.kind == "rms" else x.dtype
    ),
    check=_check,
    launcher=norm_permute_triton,
    supports=lambda x, weight, bias, *_: takes(x, weight, bias),
    gradient=_gradient,
    keeps=("x", "weight", "bias", "index", "variant"),
)
def norm_permute(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, variant: NormVariant) -> Tensor:
    """Returns ``norm(x)[..., index]``; differentiable in ``x``, ``weight`` and ``bias``.

    The result is contiguous, in the dtype of ``x``, or of ``weight`` for "rms", as in the Hugging Face modules.

    Args:
        x: ``[..., C]``, floating point.
        weight: ``[C]``, in the order of ``x``.
        bias: ``[C]`` or None; None for the RMS kinds.
        index: ``[C]``, a permutation, any integer dtype.
        variant: The norm.
    """
    return norm_reference(x, weight, bias, variant, index.long())


def _check_added(x: Tensor, residual: Tensor, weight: Tensor, index: Tensor, eps: float) -> None:
    _check(x, weight, None, index, NormVariant("rms", eps))
    assert (residual.shape, residual.dtype) == (x.shape, x.dtype), f"{residual.dtype} {residual.shape} for {x.shape}"


@operator(
    lambda x, residual, weight, index, eps: (x.new_empty(x.shape, dtype=weight.dtype), x.new_empty(x.shape)),
    check=_check_added,
    launcher=add_norm_permute_triton,
    supports=lambda x, residual, weight, *_: takes(x, weight, None),
)
def add_norm_permute(x: Tensor, residual: Tensor, weight: Tensor, index: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns ``norm(x + residual)[..., index]`` of kind "rms", and ``x + residual``, a sum rounded before the norm.

    Bytes moved: ``x`` and ``residual`` read once, both results written once. Not differentiable, because only inference
    engines join the addition to the norm.
    """
    total = (x + residual).contiguous()
    return norm_reference(total, weight, None, NormVariant("rms", eps), index.long()), total
