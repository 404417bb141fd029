# mypy: allow-untyped-defs
"""Activations in float8 e4m3 with a scale per token, ``x[..., index][t] ~ scale[t] q[t]``.

    scale[t] = max over c of |x[t, c]| / 448, in float32 (the machine epsilon if all are zeros)
    q[t, c]  = e4m3(x[t, index[c]] / scale[t])

Shapes: ``x`` ``[..., C]``, ``index`` ``[C]`` -> ``q`` float8 ``[..., C]``, ``scale`` float32 ``[..., 1]``.
Bytes moved: the input read once, one byte per value written.
Kernels run on NVIDIA GPUs of compute capability 8.9 or newer, which convert to e4m3; elsewhere the reference runs.

The kernels multiply by 1 / scale: a division would cost more instructions than all the rest. So a value that lies
within a float32 rounding of the middle between two float8 values may be rounded to the other one than in the reference.

A program holds a row of up to `LONGEST` channels in registers and walks over rows. Longer rows are gathered first, then
read twice in tiles, the second time from the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import DTYPES, Config, has_kernels, jit, tl, triton
from permtriton.kernels.operator import operator
from permtriton.kernels.permute import check_shapes, load_index, permute, programs_for, warps_for

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest float8 e4m3
LARGEST_VALUE, SMALLEST_SCALE = tl and tl.constexpr(LARGEST), tl and tl.constexpr(torch.finfo(torch.float32).eps)
LONGEST = 16384  # padded channels of a row in registers; half as many unless C and the stride are multiples of 16
LONG_TILE = 2048

# num_warps: for rows of 4096 channels, scaled with their length. STAGES: pipeline depth: next rows are copied ahead.
CONFIGS = tuple(Config({"STAGES": stages}, num_warps=warps) for warps, stages in ((8, 3), (4, 3), (8, 1), (16, 1)))


def scales_of(rows: Tensor) -> Tensor:
    """Returns the scales of rows ``[..., C]``, ``[..., 1]`` in their dtype: max |x| / 448, or epsilon if that is 0."""
    scale = rows.abs().amax(-1, keepdim=True) / LARGEST
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def to_float8(rows: Tensor, scale: Tensor) -> Tensor:
    """Returns rows divided by their scales, rounded to float8 e4m3; never -0.0."""
    return ((rows / scale).clamp(-LARGEST, LARGEST).to(FLOAT8).float() + 0.0).to(FLOAT8)


def short_scales(largest: Tensor) -> list[Tensor]:
    """Returns eight float32 scales per row, within a factor of 2, in the shape of ``largest``, the rows' largest |w|.

    A scale has four significant bits, as float8 e4m3 has, so that their products are exact in bfloat16. Each scale is
    the smallest one with its significand at which the row does not overflow.
    """
    scales = []
    for eighths in range(8, 16):
        significand, exponent = torch.frexp(largest.float() * (8 / eighths / LARGEST))
        scales.append(torch.ldexp(torch.full_like(significand, eighths / 8), exponent - (significand == 0.5).int()))
    return scales


def round_to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a weight ``[O, C]`` in float8 e4m3 and its scales ``[O, 1]`` in its own dtype.

    A row that is exact in float8 with one of its `short_scales` was rounded before, and keeps its values.
    """
    scale = scales_of(weight)
    for short in short_scales(weight.abs().amax(1, keepdim=True)):
        product = (to_float8(weight, short).float() * short).to(weight.dtype)
        exact = (product == weight).all(1, keepdim=True)
        scale = torch.where(exact & (short > 0), short.to(scale.dtype), scale)
    return to_float8(weight, scale), scale


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """Returns a weight in float8 e4m3 times its scales ``[out, 1]``, in the dtype of the scales."""
    return weight.to(scale.dtype) * scale


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns activations ``[..., C]`` in float8 e4m3, and the scale of each token, float32 ``[..., 1]``."""
    x = x.float()
    scale = scales_of(x)
    return to_float8(x, scale), scale


def has_float8(device: torch.device) -> bool:
    """Whether a GPU converts to float8 e4m3 and multiplies it: NVIDIA's, compute capability 8.9 or newer."""
    return has_kernels(device) and torch.cuda.get_device_capability(device) >= (8, 9)


@jit
def _scale_of(largest):
    """Returns the float32 scale of a row from its largest magnitude."""
    scale = tl.div_rn(largest, LARGEST_VALUE)
    return tl.where(scale == 0.0, SMALLEST_SCALE, scale)


@jit
def _quantize_kernel(
    x_ptr, index_ptr, y_ptr, scale_ptr, rows, C, row_stride,
    BLOCK_C: tl.constexpr, GATHER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, BLOCK_C)
    inside = channel < C
    if GATHER:
        source = load_index(index_ptr, channel, inside, C)
    for row in tl.range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0), num_stages=STAGES):
        value = tl.load(x_ptr + row * row_stride + channel, mask=inside, other=0.0)
        if GATHER:
            value = tl.gather(value, source, 0)
        value = value.to(tl.float32)
        scale = _scale_of(tl.max(tl.abs(value), 0))
        result = (value * tl.div_rn(1.0, scale)).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * C + channel, result, mask=inside)
        tl.store(scale_ptr + row, scale)


@jit
def _quantize_long_kernel(x_ptr, y_ptr, scale_ptr, rows, C, row_stride, TILE: tl.constexpr):
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        largest = tl.zeros([TILE], tl.float32)
        for start in range(0, C, TILE):
            channel = start + tl.arange(0, TILE)
            value = tl.load(x_ptr + row * row_stride + channel, mask=channel < C, other=0.0)
            largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
        scale = _scale_of(tl.max(largest, 0))
        for start in range(0, C, TILE):
            channel = start + tl.arange(0, TILE)
            value = tl.load(x_ptr + row * row_stride + channel, mask=channel < C, other=0.0).to(tl.float32)
            result = (value * tl.div_rn(1.0, scale)).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + row * C + channel, result, mask=channel < C)
        tl.store(scale_ptr + row, scale)


def quantize_triton(x: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    y, scale = _empty_quantized(x)
    hidden = rows_of(x)
    rows, channels = hidden.shape
    if not holds(hidden):
        hidden = hidden if index is None else permute(hidden, index)
        grid = (programs_for(x, rows, 4),)
        _quantize_long_kernel[grid](hidden, y, scale, rows, channels, hidden.stride(0), TILE=LONG_TILE, num_warps=8)
        return y, scale
    config, block = config_for("quantize", CONFIGS, (rows, channels), x.dtype), triton.next_power_of_2(channels)
    warps = warps_for(config, block)
    grid = (programs_for(x, rows, triton.cdiv(32, warps)),)
    _quantize_kernel[grid](
        hidden, hidden if index is None else index.contiguous(), y, scale, rows, channels, hidden.stride(0),
        BLOCK_C=block, GATHER=index is not None, STAGES=config.constants["STAGES"], num_warps=warps,
    )  # fmt: skip
    return y, scale


def holds(x: Tensor) -> bool:
    """Whether a program holds a row of ``[..., C]`` in registers; it takes more of them if rows are not aligned."""
    aligned = x.shape[-1] % 16 == 0 and (x.dim() == 1 or x.stride(-2) % 16 == 0)
    return triton.next_power_of_2(x.shape[-1]) <= (LONGEST if aligned else LONGEST // 2)


def rows_of(x: Tensor) -> Tensor:
    """Returns ``x`` as ``[rows, C]`` with adjacent channels; copies them if they are not, which no model needs."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _empty_quantized(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(x.shape, dtype=FLOAT8, device=x.device),
        torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device),
    )


@operator(
    _empty_quantized,
    check=lambda x, index: None if index is None else check_shapes(x, index),
    launcher=quantize_triton,
    supports=lambda x, index: has_float8(x.device) and x.dtype in DTYPES,
)
def quantize(x: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns ``x[..., index]`` in float8 e4m3, contiguous, and the scale of each token; not differentiable.

    Args:
        x: ``[..., C]``, floating point.
        index: ``[C]``, any integer dtype, or None for the order of ``x``.
    """
    return quantize_tokens(x.contiguous() if index is None else permute(x, index))
