"""The Triton kernel of the backward of `permtriton.kernels.nm_mask`, and what launches it.

A program accumulates ``TILE_C x TILE_C`` of one block's dP over ``rows / splits`` rows of W, in float32, both sides in
permuted order: the rows of W and dL/dW_eff that give ``A`` and ``S`` give ``M_soft`` and ``dS_hat`` too, so that a
block of up to 64 padded channels reads each once; larger blocks are cut into pairs of tiles and read again.
The result's rows go to base order when stored. Every split has its own partial sums, added in a fixed order: the same
input gives the same bits. Partial sums take ``4 splits block`` bytes a channel, nothing of W's size is made.
Products: no TF32; each float32 operand is split into two bfloat16 halves and three of the four products of halves are
taken on the tensor cores with float32 accumulation: a relative error of at most 2^-16 a product, where TF32 has 2^-10.
Floor: 4 bytes a weight at 16 bits; 4 TILE_C floating-point operations a weight, three times that on the tensor cores.

A group of padded width ``PADDED`` (the next power of two) takes ``PADDED`` places of a tile; those beyond ``group``
hold zeros and leave the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Build, Config, jit, tl, triton
from permtriton.kernels.nm_mask_triton import contiguous, importance, refuse_unsupported

TILE = (
    64  # padded channels: larger blocks are cut, since tiles of 128 spill on sm_80 and overflow sm_100's tensor memory
)
LEAST_ROWS = 512  # of W in a split
ROWS_STEP = 64  # rows of a split are a multiple of it: the largest TILE_O
ALIGN = 16  # the largest tiles are for rows, strides and block sizes that are multiples of it

# For tiles of 64 channels; others take other numbers of rows and warps, see `_launch`.
CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 32, "PROGRAMS": 1024}, num_warps=8, num_stages=2),
    Config({"TILE_O": 32, "PROGRAMS": 512}, num_warps=8, num_stages=2),
    Config({"TILE_O": 32, "PROGRAMS": 2048}, num_warps=8, num_stages=2),
    Config({"TILE_O": 32, "PROGRAMS": 1024}, num_warps=8, num_stages=3),
    Config({"TILE_O": 32, "PROGRAMS": 1024}, num_warps=4, num_stages=2),
    Config({"TILE_O": 64, "PROGRAMS": 1024}, num_warps=8, num_stages=2),
)


@jit
def _tile(
    grad, weight, scale, row, column, channel, valid, o, end, grad_stride_o, grad_stride_c, stride_o, stride_c,
    POWER: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """(A, S) of a tile of channels and rows, float32 ``[channels, rows]``; zeros outside."""
    mask = valid[:, None] & (o < end)[None, :]
    places, lines = channel[:, None], o.to(tl.int64)[None, :]
    w = tl.load(weight + places * stride_c + lines * stride_o, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + places * grad_stride_c + lines * grad_stride_o, mask=mask, other=0.0).to(tl.float32)
    row_factor, column_factor = 0.0, 0.0
    if STATISTICS:
        row_factor = tl.load(row + o, mask=o < end, other=0.0)[None, :]
        column_factor = tl.load(column + channel, mask=valid, other=0.0)[:, None]
    factor = tl.load(scale + channel, mask=valid, other=0.0)[:, None]
    return g * w, importance(w, factor, row_factor, column_factor, POWER, STATISTICS)


@jit
def _softmax_of_groups(
    agreement, scores, block_mean, GROUP: tl.constexpr, PADDED: tl.constexpr, GROUP_SCALE: tl.constexpr,
    FLOOR: tl.constexpr, TILE_C: tl.constexpr, TILE_O: tl.constexpr,
):  # fmt: skip
    """(M_soft, dS_hat) of a tile in permuted order, both ``[TILE_C, TILE_O]``."""
    grouped = tl.reshape(scores, [TILE_C // PADDED, PADDED, TILE_O])
    if GROUP_SCALE:
        floor = (block_mean * FLOOR)[None, :]
        mean = tl.maximum(tl.sum(grouped, 1) / GROUP, floor)
        sharpness = tl.where(floor > 0, 1.0 / tl.where(floor > 0, mean, 1.0), 0.0)[:, None, :]
        grouped = grouped * sharpness
    if PADDED != GROUP:
        real = (tl.arange(0, PADDED) < GROUP)[None, :, None]
        grouped = tl.where(real, grouped, float("-inf"))
    weights = tl.exp(grouped - tl.max(grouped, 1)[:, None, :])
    soft = weights / tl.sum(weights, 1)[:, None, :]
    grad_scores = tl.reshape(agreement, [TILE_C // PADDED, PADDED, TILE_O]) * soft
    grad_scores -= soft * tl.sum(grad_scores, 1)[:, None, :]
    if GROUP_SCALE:
        grad_scores *= sharpness
    return tl.reshape(soft, [TILE_C, TILE_O]), tl.reshape(grad_scores, [TILE_C, TILE_O])


@jit
def _add_product(product, left, right, INTERPRETED: tl.constexpr):
    """product + left right^T, of float32 tiles."""
    left_high, right_high = left.to(tl.bfloat16), right.to(tl.bfloat16)
    left_low = (left - left_high.to(tl.float32)).to(tl.bfloat16)
    right_low = (right - right_high.to(tl.float32)).to(tl.bfloat16)
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as whole numbers
        left_high, left_low = left_high.to(tl.float32), left_low.to(tl.float32)
        right_high, right_low = right_high.to(tl.float32), right_low.to(tl.float32)
    product = tl.dot(left_low, tl.trans(right_high), product)
    product = tl.dot(left_high, tl.trans(right_low), product)
    return tl.dot(left_high, tl.trans(right_high), product)


@jit
def _nm_mask_bwd_kernel(
    grad, weight, scale, row, column, index, partial, first, size, rows, steps, offset, total,
    grad_stride_o, grad_stride_c, stride_o, stride_c,
    GROUP: tl.constexpr, PADDED: tl.constexpr, POWER: tl.constexpr, STATISTICS: tl.constexpr,
    GROUP_SCALE: tl.constexpr, FLOOR: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
    ALIGN: tl.constexpr, ROWS_STEP: tl.constexpr, TILE_C: tl.constexpr, TILE_O: tl.constexpr,
):  # fmt: skip
    # Known to be multiples of ALIGN, so that loads and stores are wide.
    first, size, rows, offset, total = first * ALIGN, size * ALIGN, rows * ALIGN, offset * ALIGN, total * ALIGN
    grad_stride_c, stride_c = grad_stride_c * ALIGN, stride_c * ALIGN
    block, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(size // GROUP * PADDED, TILE_C)
    start = first + block * size
    place = (tl.program_id(2) % tiles) * TILE_C + tl.arange(0, TILE_C)
    j = place // PADDED * GROUP + place % PADDED
    j_valid = (place % PADDED < GROUP) & (j < size)
    j_channel = tl.load(index + start + j, mask=j_valid, other=0).to(tl.int64)
    c, c_channel, c_valid = (j_channel - start).to(tl.int32), j_channel, j_valid
    if not WHOLE:
        c = (tl.program_id(2) // tiles) * TILE_C + tl.arange(0, TILE_C)
        c_valid = c < size
        c_channel = start + c
    begin = tl.program_id(1) * steps * ROWS_STEP
    end = tl.minimum(begin + steps * ROWS_STEP, rows)
    product = tl.zeros([TILE_C, TILE_C], tl.float32)
    for o_start in range(begin, end, TILE_O):
        o = o_start + tl.arange(0, TILE_O)
        agreement, scores = _tile(
            grad, weight, scale, row, column, j_channel, j_valid, o, end, grad_stride_o, grad_stride_c, stride_o,
            stride_c, POWER, STATISTICS,
        )  # fmt: skip
        block_mean = tl.sum(scores, 0)
        if GROUP_SCALE and not WHOLE:
            block_mean = tl.zeros([TILE_O], tl.float32)
            for other in range(0, size, TILE_C):
                others = start + other + tl.arange(0, TILE_C)
                _, more = _tile(
                    grad, weight, scale, row, column, others, others < start + size, o, end, grad_stride_o,
                    grad_stride_c, stride_o, stride_c, POWER, STATISTICS,
                )  # fmt: skip
                block_mean += tl.sum(more, 0)
        soft, grad_scores = _softmax_of_groups(
            agreement, scores, block_mean / size, GROUP, PADDED, GROUP_SCALE, FLOOR, TILE_C, TILE_O
        )
        if not WHOLE:
            agreement, scores = _tile(
                grad, weight, scale, row, column, c_channel, c_valid, o, end, grad_stride_o, grad_stride_c, stride_o,
                stride_c, POWER, STATISTICS,
            )  # fmt: skip
        product = _add_product(product, agreement, soft, INTERPRETED)
        product = _add_product(product, scores, grad_scores, INTERPRETED)
    out = partial + split * total + offset + block * size * size
    places = c[:, None] * size + j[None, :]
    tl.store(out + places, product, mask=c_valid[:, None] & j_valid[None, :])


def nm_mask_backward_triton(
    grad: Tensor,
    weight: Tensor,
    scale: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    power: int,
    index: Tensor,
    block_sizes: Sequence[int],
    group: int,
    group_scale: bool,
    floor: float,
) -> Tensor:
    """`nm_mask_backward_reference` by a Triton kernel: float32 ``[sum of sizes^2]``.

    Args:
        floor: the least sharpened mean of a group, as a part of its block's: FLOOR of the reference.

    Raises:
        ModelError: a dtype that `supports` does not name.
    """
    refuse_unsupported(weight, scale)
    total, rows = sum(size * size for size in block_sizes), weight.shape[0]
    if not total or not rows:
        return torch.zeros(total, device=weight.device)
    config = config_for("nm_mask_backward", CONFIGS, (rows, weight.shape[1], max(block_sizes)), weight.dtype)
    aligned = grad.stride(0) == weight.stride(0) == 1 and not any(
        number % ALIGN for number in (rows, grad.stride(1), weight.stride(1), *block_sizes)
    )
    runs = [(size, len(list(run)), *_launch(config, size, group, aligned)) for size, run in groupby(block_sizes)]
    programs = sum(count * tiles for _, count, _, tiles in runs)
    splits = max(min(config.constants["PROGRAMS"] // programs, triton.cdiv(rows, LEAST_ROWS)), 1)
    steps = triton.cdiv(triton.cdiv(rows, splits), ROWS_STEP)
    splits = triton.cdiv(rows, steps * ROWS_STEP)
    partial = torch.empty((splits, total), device=weight.device)
    tensors, first, offset = (grad, weight, *contiguous(scale, row, column), index.contiguous(), partial), 0, 0
    for size, count, launch, tiles in runs:
        align = launch.constants["ALIGN"]
        _nm_mask_bwd_kernel[(count, splits, tiles)](
            *tensors, first // align, size // align, rows // align, steps, offset // align, total // align,
            grad.stride(0), grad.stride(1) // align, weight.stride(0), weight.stride(1) // align,
            POWER=power, STATISTICS=row is not None, GROUP_SCALE=group_scale, FLOOR=floor,
            INTERPRETED=triton.knobs.runtime.interpret, **launch.arguments(),
        )  # fmt: skip
        first, offset = first + size * count, offset + size * size * count
    return partial.sum(0) if splits > 1 else partial[0]


def _launch(config: Config, size: int, group: int, aligned: bool) -> tuple[Config, int]:
    """Returns (how blocks of one size are launched, tiles of one block's dP).

    Of aligned rows, small tiles have fewer warps, which the products would leave idle. Other rows are read in narrow
    loads, which take more registers and are not copied ahead of their use.
    """
    padded_group = triton.next_power_of_2(group)
    padded = size // group * padded_group
    whole = padded <= TILE
    tile_c = max(triton.next_power_of_2(padded), 16) if whole else TILE
    rows, warps, stages = config.constants["TILE_O"], config.num_warps, config.num_stages
    if not aligned:
        rows, stages = rows // 2, 1
    elif tile_c < TILE:
        warps //= 2
    constants = {
        "GROUP": group, "PADDED": padded_group, "WHOLE": whole, "ALIGN": ALIGN if aligned else 1,
        "ROWS_STEP": ROWS_STEP, "TILE_C": tile_c, "TILE_O": rows,
    }  # fmt: skip
    return Config(constants, warps, stages), 1 if whole else triton.cdiv(padded, TILE) ** 2


def builds() -> Iterator[Build]:
    """Yields the kernel in every configuration and tile at 2:4; at 8:16 too where registers are short."""
    aligned = [(16, 4), (32, 4), (64, 4), (128, 4), (64, 16), (128, 16)]
    found: dict[str, Build] = {}  # `PROGRAMS` makes no other kernel
    for dtype, (number, config) in product(("bf16", "fp32"), enumerate(CONFIGS)):
        made = [_build(dtype, _launch(config, *shape, True)[0], "", number == 0) for shape in aligned]
        for size, layout in product((16, 32, 64, 128), (" any length", " any strides")):
            made.append(_build(dtype, _launch(config, size, 4, False)[0], layout, number == 0))
        for build in made:
            found.setdefault(build.name, build)
    yield from found.values()


def _build(dtype: str, launch: Config, layout: str, default: bool) -> Build:
    of = launch.constants
    constants = {
        "POWER": 1, "STATISTICS": True, "GROUP_SCALE": True, "FLOOR": 0.1, "INTERPRETED": False, **of,
        **({} if "strides" in layout else {"grad_stride_o": 1, "stride_o": 1}),
    }  # fmt: skip
    if of["TILE_C"] == of["ALIGN"]:  # the block is one ALIGN, and Triton makes a constant of every 1
        constants["size"] = 1
    numbers = ("first", "size", "rows", "steps", "offset", "total", "grad_stride_o", "grad_stride_c", "stride_o",
               "stride_c")  # fmt: skip
    signature = {
        "grad": f"*{dtype}", "weight": f"*{dtype}", "scale": "*fp32", "row": "*fp32", "column": "*fp32",
        "index": "*i64", "partial": "*fp32", **dict.fromkeys(numbers, "i32"), **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    tile = f"{of['TILE_C']}{'' if of['WHOLE'] else ' of a larger block'} x {of['TILE_O']}{layout}"
    group = f"{of['GROUP'] // 2}:{of['GROUP']}"
    name = f"nm_mask backward {group} {dtype} {tile} {launch.num_warps} warps {launch.num_stages} stages"
    return Build(name, _nm_mask_bwd_kernel, signature, constants, launch, default)
