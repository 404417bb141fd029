"""The Triton kernels of `permtriton.kernels.norm_permute`, and what launches them.

A program holds a row of up to `LONGEST` channels in registers: one read, the norm in float32, then a gather through
shared memory of what is rounded to the output's dtype, and one write in runs of 16 bytes. The other ways to gather
inside a row cost more than the 2 + 2 bytes a channel of the norm alone: a scatter ``y[inverse[j]]`` writes 2 bytes of a
32-byte sector at a time, sixteen times the write traffic of the floor; a second load ``x[index[j]]`` hits the cache,
but a warp of it touches up to 32 lines, 32 turns for 64 bytes where shared memory takes about four. A program walks
over rows with the weight and the index in registers, so that they are read once a program.
Floor: forward x read, y written. Backward x and the gradient read, dx written; the gradient comes into the order of x
by the same gather, with the inverse index. Weight gradients: each program adds its rows in registers, in float32, and
writes ``[programs, C]``, which one sum in a fixed order finishes: no atomics, the same input gives the same bits; 2
programs a processor, one percent of the traffic at 16384 rows. Rows of more than `LONGEST_BACKWARD` channels, whose
sums and values no registers hold, are gathered first and then read in tiles, again from the cache; their sums live in
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Build, Config, jit, tl, triton
from permtriton.kernels.permute_triton import gather_rows, programs_for, warps_for
from permtriton.permutation import inverse

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RMS, RMS_FLOAT, LAYER = 0, 1, 2
CODES = {"rms": RMS, "rms_float": RMS_FLOAT, "layer": LAYER}
LONGEST = 16384  # padded channels of a row in registers; half of it where C or its stride is no multiple of 16
LONGEST_BACKWARD = 4096  # padded channels; longer rows are read in tiles
LONG_TILE = 2048
HELD = 4096  # padded channels of which a program holds the weight and the index; of more it reads them for each row
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 4, 2  # a processor

# num_warps for rows of 4096 channels.
CONFIGS = (Config(num_warps=8), Config(num_warps=4), Config(num_warps=16))
BACKWARD_CONFIGS = (Config(num_warps=8), Config(num_warps=16))


@jit
def _normalized(row, inside, C, eps, KIND: tl.constexpr):
    """Returns (h, 1 / deviation) of a float32 row; zeros outside."""
    if KIND == 2:
        row = tl.where(inside, row - tl.sum(row, 0) / C, 0.0)
    root = tl.rsqrt(tl.sum(row * row, 0) / C + eps)
    return row * root, root


@jit
def _source(index, channel, inside, C):
    source = tl.load(index + channel, mask=inside, other=0).to(tl.int32)
    return tl.where((source >= 0) & (source < C), source, 0)


@jit
def _norm_permute_fwd_kernel(
    x, weight, bias, index, y, rows, C, stride_row, eps, offset,
    BLOCK_C: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, BLOCK_C)
    inside = channel < C
    if HOLD:
        source = _source(index, channel, inside, C)
        scale = tl.load(weight + channel, mask=inside, other=0.0)
        if BIAS:
            shift = tl.load(bias + channel, mask=inside, other=0.0)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        value = tl.load(x + row * stride_row + channel, mask=inside, other=0.0)
        result, _ = _normalized(value.to(tl.float32), inside, C, eps, KIND)
        if KIND == 0:
            result = result.to(value.dtype).to(tl.float32)
        if not HOLD:
            scale = tl.load(weight + channel, mask=inside, other=0.0)
        factor = scale.to(tl.float32) + offset
        if KIND != 1:
            factor = factor.to(scale.dtype).to(tl.float32)  # rounded, as the modules do
        result = result * factor
        if BIAS:
            if not HOLD:
                shift = tl.load(bias + channel, mask=inside, other=0.0)
            result += shift.to(tl.float32)
        if not HOLD:
            source = _source(index, channel, inside, C)
        result = tl.gather(result.to(y.dtype.element_ty), source, 0)
        tl.store(y + row * C + channel, result, mask=inside)


@jit
def _norm_long_fwd_kernel(
    x, weight, bias, index, y, rows, C, stride_row, eps, offset,
    TILE: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Rows that registers do not hold, read again from the cache in the order of the index."""
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        mean = 0.0
        if KIND == 2:
            total = tl.zeros([TILE], tl.float32)
            for start in range(0, C, TILE):
                channel = start + tl.arange(0, TILE)
                total += tl.load(x + row * stride_row + channel, mask=channel < C, other=0.0).to(tl.float32)
            mean = tl.sum(total, 0) / C
        square = tl.zeros([TILE], tl.float32)
        for start in range(0, C, TILE):
            channel = start + tl.arange(0, TILE)
            hidden = tl.load(x + row * stride_row + channel, mask=channel < C, other=0.0).to(tl.float32)
            hidden = tl.where(channel < C, hidden - mean, 0.0)
            square += hidden * hidden
        root = tl.rsqrt(tl.sum(square, 0) / C + eps)
        for start in range(0, C, TILE):
            channel = start + tl.arange(0, TILE)
            inside = channel < C
            source = _source(index, channel, inside, C)
            value = tl.load(x + row * stride_row + source, mask=inside, other=0.0)
            result = (value.to(tl.float32) - mean) * root
            if KIND == 0:
                result = result.to(value.dtype).to(tl.float32)
            scale = tl.load(weight + source, mask=inside, other=0.0)
            factor = scale.to(tl.float32) + offset
            if KIND != 1:
                factor = factor.to(scale.dtype).to(tl.float32)
            result = result * factor
            if BIAS:
                result += tl.load(bias + source, mask=inside, other=0.0).to(tl.float32)
            tl.store(y + row * C + channel, result.to(y.dtype.element_ty), mask=inside)


@jit
def _norm_permute_bwd_kernel(
    grad, x, weight, back, grad_x, weight_sums, bias_sums, rows, C, grad_stride_row, stride_row, eps, offset,
    BLOCK_C: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """``back`` is the inverse index, the sums are ``[programs, C]``."""
    channel = tl.arange(0, BLOCK_C)
    inside = channel < C
    source = tl.load(back + channel, mask=inside, other=0)
    program = tl.program_id(0).to(tl.int64)
    weight_sum = tl.zeros([BLOCK_C], tl.float32)
    bias_sum = tl.zeros([BLOCK_C], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        outer = tl.load(grad + row * grad_stride_row + channel, mask=inside, other=0.0)
        outer = tl.gather(outer, source, 0).to(tl.float32)
        hidden = tl.load(x + row * stride_row + channel, mask=inside, other=0.0).to(tl.float32)
        hidden, root = _normalized(hidden, inside, C, eps, KIND)
        weight_sum += outer * hidden
        if BIAS:
            bias_sum += outer
        inner = outer * (tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32) + offset)
        inner = tl.where(inside, inner, 0.0)
        result = inner - hidden * (tl.sum(inner * hidden, 0) / C)
        if KIND == 2:
            result -= tl.sum(inner, 0) / C
        tl.store(grad_x + row * C + channel, (result * root).to(grad_x.dtype.element_ty), mask=inside)
    tl.store(weight_sums + program * C + channel, weight_sum, mask=inside)
    if BIAS:
        tl.store(bias_sums + program * C + channel, bias_sum, mask=inside)


@jit
def _norm_long_bwd_kernel(
    grad, x, weight, grad_x, weight_sums, bias_sums, rows, C, stride_row, eps, offset,
    TILE: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Rows that registers do not hold; ``grad`` is in the order of x, the sums ``[programs, C]`` begin as zeros."""
    program = tl.program_id(0).to(tl.int64)
    for row in range(program, rows, tl.num_programs(0)):
        mean = 0.0
        if KIND == 2:
            total = tl.zeros([TILE], tl.float32)
            for start in range(0, C, TILE):
                channel = start + tl.arange(0, TILE)
                total += tl.load(x + row * stride_row + channel, mask=channel < C, other=0.0).to(tl.float32)
            mean = tl.sum(total, 0) / C
        square = tl.zeros([TILE], tl.float32)
        for start in range(0, C, TILE):
            channel = start + tl.arange(0, TILE)
            hidden = tl.load(x + row * stride_row + channel, mask=channel < C, other=0.0).to(tl.float32)
            hidden = tl.where(channel < C, hidden - mean, 0.0)
            square += hidden * hidden
        root = tl.rsqrt(tl.sum(square, 0) / C + eps)
        product = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE], tl.float32)
        for start in range(0, C, TILE):
            channel = start + tl.arange(0, TILE)
            inside = channel < C
            hidden = (tl.load(x + row * stride_row + channel, mask=inside, other=0.0).to(tl.float32) - mean) * root
            outer = tl.load(grad + row * C + channel, mask=inside, other=0.0).to(tl.float32)
            inner = outer * (tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32) + offset)
            product += inner * hidden
            total += inner
            place = program * C + channel
            before = tl.load(weight_sums + place, mask=inside, other=0.0)
            tl.store(weight_sums + place, before + outer * hidden, mask=inside)
            if BIAS:
                before = tl.load(bias_sums + place, mask=inside, other=0.0)
                tl.store(bias_sums + place, before + outer, mask=inside)
        product = tl.sum(product, 0) / C
        common = 0.0
        if KIND == 2:
            common = tl.sum(total, 0) / C
        for start in range(0, C, TILE):
            channel = start + tl.arange(0, TILE)
            inside = channel < C
            hidden = (tl.load(x + row * stride_row + channel, mask=inside, other=0.0).to(tl.float32) - mean) * root
            outer = tl.load(grad + row * C + channel, mask=inside, other=0.0).to(tl.float32)
            inner = outer * (tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32) + offset)
            result = (inner - hidden * product - common) * root
            tl.store(grad_x + row * C + channel, result.to(grad_x.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # the sums of this row are seen by the next


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels compute this; float64 runs the reference."""
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    return dtypes <= set(DTYPES) and x.numel() > 0


def norm_permute_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    eps: float,
    offset: float,
    kind: str,
    config: Config | None = None,
) -> Tensor:
    """The arguments of `norm_permute_reference`, and a configuration in place of the tuned one; see `takes`."""
    hidden, dtype = _rows(x), torch.promote_types(x.dtype, weight.dtype) if kind == "rms" else x.dtype
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    weight, index, bias = weight.contiguous(), index.contiguous(), None if bias is None else bias.contiguous()
    rows, channels = hidden.shape
    block = triton.next_power_of_2(channels)
    arguments = (
        hidden,
        weight,
        weight if bias is None else bias,
        index,
        y,
        rows,
        channels,
        hidden.stride(0),
        eps,
        offset,
    )
    shared = {"KIND": CODES[kind], "BIAS": bias is not None}
    grid = (programs_for(x, rows, FORWARD_PROGRAMS),)
    aligned = channels % 16 == 0 and hidden.stride(0) % 16 == 0
    if block > (LONGEST if aligned else LONGEST // 2):
        _norm_long_fwd_kernel[grid](*arguments, TILE=LONG_TILE, num_warps=8, **shared)
        return y
    config = config or config_for("norm_permute", CONFIGS, (rows, channels), x.dtype)
    warps = warps_for(config, block)
    _norm_permute_fwd_kernel[grid](*arguments, BLOCK_C=block, HOLD=block <= HELD, num_warps=warps, **shared)
    return y


def norm_permute_backward_triton(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    eps: float,
    offset: float,
    kind: str,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of x, weight and bias; ``grad`` is in the order of the output. See `takes`."""
    hidden, outer, back = _rows(x), _rows(grad), inverse(index.long()).int()
    rows, channels = hidden.shape
    block, weight = triton.next_power_of_2(channels), weight.contiguous()
    programs = programs_for(x, rows, BACKWARD_PROGRAMS)
    make = torch.empty if block <= LONGEST_BACKWARD else torch.zeros
    weight_sums = make((programs, channels), dtype=torch.float32, device=x.device)
    bias_sums = weight_sums if bias is None else make((programs, channels), dtype=torch.float32, device=x.device)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shared = {"KIND": CODES[kind], "BIAS": bias is not None}
    results = (grad_x, weight_sums, bias_sums, rows, channels)
    if block <= LONGEST_BACKWARD:
        config = config or config_for("norm_permute_backward", BACKWARD_CONFIGS, (rows, channels), x.dtype)
        _norm_permute_bwd_kernel[(programs,)](
            outer, hidden, weight, back, *results, outer.stride(0), hidden.stride(0), eps, offset,
            BLOCK_C=block, num_warps=warps_for(config, block), **shared,
        )  # fmt: skip
    else:
        _norm_long_bwd_kernel[(programs,)](
            gather_rows(outer, back), hidden, weight, *results, hidden.stride(0), eps, offset,
            TILE=LONG_TILE, num_warps=8, **shared,
        )  # fmt: skip
    grad_bias = None if bias is None else bias_sums.sum(0).to(bias.dtype)
    return grad_x, weight_sums.sum(0).to(weight.dtype), grad_bias


def _rows(x: Tensor) -> Tensor:
    """``[rows, C]`` with channels side by side; copied where they are not, which no model's activations are."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def builds() -> Iterator[Build]:
    """Yields the kernels in every configuration, for bfloat16 and float32, each kind, short and long rows."""
    scalars = {"rows": "i32", "C": "i32", "stride_row": "i32", "eps": "fp32", "offset": "fp32"}
    shapes = [
        (kind, dtype, block) for kind in CODES for dtype in ("bf16", "fp32") for block in (128, 4096, 8192, LONGEST)
    ]
    for kind, dtype, block in shapes:
        pointer, shared = f"*{dtype}", {"KIND": CODES[kind], "BIAS": kind == "layer"}
        name = f"{kind} {dtype} x {block}"
        for config in CONFIGS:
            signature = dict.fromkeys(("x", "weight", "bias"), pointer) | {"index": "*i16", "y": pointer} | scalars
            constants = {"BLOCK_C": block, **shared, "HOLD": block <= HELD}
            yield _build(f"norm_permute {name}", _norm_permute_fwd_kernel, signature, constants, config, CONFIGS)
        sums = {"grad_x": pointer, "weight_sums": "*fp32", "bias_sums": "*fp32"}
        if block <= LONGEST_BACKWARD:
            for config in BACKWARD_CONFIGS:
                signature = dict.fromkeys(("grad", "x", "weight"), pointer) | {"back": "*i32"} | sums
                signature |= {"rows": "i32", "C": "i32", "grad_stride_row": "i32"} | scalars
                constants, kernel = {"BLOCK_C": block, **shared}, _norm_permute_bwd_kernel
                yield _build(f"norm_permute backward {name}", kernel, signature, constants, config, BACKWARD_CONFIGS)
        elif block == LONGEST:
            constants = {"TILE": LONG_TILE, **shared}
            signature = dict.fromkeys(("x", "weight", "bias"), pointer) | {"index": "*i32", "y": pointer} | scalars
            signature |= dict.fromkeys(constants, "constexpr")
            title, config = f"norm_permute long {kind} {dtype}", Config(num_warps=8)
            yield Build(title, _norm_long_fwd_kernel, signature, constants, config, True)
            signature = dict.fromkeys(("grad", "x", "weight"), pointer) | sums | scalars
            constants = {"TILE": LONG_TILE, **shared}
            signature |= dict.fromkeys(constants, "constexpr")
            name, config = f"norm_permute backward long {kind} {dtype}", Config(num_warps=8)
            yield Build(name, _norm_long_bwd_kernel, signature, constants, config, True)


def _build(
    name: str,
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, int],
    config: Config,
    configs: tuple[Config, ...],
) -> Build:
    tuned = Config(num_warps=warps_for(config, constants["BLOCK_C"]))
    signature |= dict.fromkeys(constants, "constexpr")
    # The longest are launched with multiples of 16 only, as those that are no default are compiled.
    default = config == configs[0] and constants["BLOCK_C"] < LONGEST
    return Build(f"{name}, {tuned.num_warps} warps", kernel, signature, constants, tuned, default)
