"""The Triton kernels of `permtriton.kernels.nm_mask`, and what launches them.

Forward. A program holds ``TILE_O`` rows of W times ``TILE_GROUPS`` groups of the permuted order, one tensor for each
slot of a group, so that a score's rank is counted by comparing tensors and nothing crosses threads. The channels of a
group are written where they were read: W is read once and W_eff written once, and no order but ``index`` is needed.
Where channels lie in rows of memory (``weight.stride(0) == 1``) a channel's tile is one run of ``2 TILE_O`` bytes at
16 bits; other strides take narrower tiles over a whole block of channels, and transpose in registers.
Floor: 4 bytes a weight at 16 bits; ``group`` (compare, add) a weight, below the floor up to 16 in a group.
Groups of more than four count ranks in a loop that reads the group's rows again, from the cache.

Backward. A program accumulates ``TILE_C x TILE_C`` of one block's dP over ``rows / splits`` rows of W, in float32, both
sides in permuted order: the rows of W and dL/dW_eff that give ``A`` and ``S`` give ``M_soft`` and ``dS_hat`` too, so
that a block of up to 128 padded channels reads each once; larger blocks are cut into pairs of tiles and read again.
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
from itertools import groupby

import torch
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Build, Config, jit, tl, triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WHOLE_BLOCK = 128  # padded channels: the largest block whose dP is one tile
PART_OF_BLOCK = 64  # tile of larger blocks
MOST_SLOTS = 4  # of a group whose slots are tensors of their own; beyond, ranks are counted in a loop, rows read twice
WIDE_TILE = 4096
LEAST_ROWS = 512  # of W in a split of the backward
MOST_TILE_O = 128
ALIGN = 16  # the largest tiles are for rows, strides and block sizes that are multiples of it
ROW_MAJOR = Config({"TILE_O": 32, "TILE_GROUPS": 16}, num_warps=4, num_stages=1)

# Tiles for groups of four; larger groups take fewer rows.
CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 1024, "TILE_GROUPS": 1}, num_warps=4, num_stages=1),
    Config({"TILE_O": 512, "TILE_GROUPS": 1}, num_warps=2, num_stages=1),
    Config({"TILE_O": 512, "TILE_GROUPS": 1}, num_warps=4, num_stages=1),
    Config({"TILE_O": 1024, "TILE_GROUPS": 2}, num_warps=8, num_stages=1),
    Config({"TILE_O": 2048, "TILE_GROUPS": 1}, num_warps=8, num_stages=1),
    Config({"TILE_O": 256, "TILE_GROUPS": 4}, num_warps=4, num_stages=1),
)
# For blocks of 64 channels; other tiles take other numbers of rows, see `_backward_rows`.
BACKWARD_CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 32, "PROGRAMS": 1024}, num_warps=8, num_stages=2),
    Config({"TILE_O": 32, "PROGRAMS": 512}, num_warps=8, num_stages=2),
    Config({"TILE_O": 32, "PROGRAMS": 2048}, num_warps=8, num_stages=2),
    Config({"TILE_O": 32, "PROGRAMS": 1024}, num_warps=8, num_stages=3),
    Config({"TILE_O": 32, "PROGRAMS": 1024}, num_warps=4, num_stages=2),
    Config({"TILE_O": 64, "PROGRAMS": 1024}, num_warps=8, num_stages=2),
)


@jit
def _scores(weight, scale, row, column, POWER: tl.constexpr, STATISTICS: tl.constexpr):
    """|W|^power * (row + column) * scale, rounded after each step as the reference does: ties are the same."""
    scores = tl.abs(weight)
    if POWER == 2:
        scores = scores * scores
    if STATISTICS:
        scores = scores * (row + column)
    return scores * scale


@jit
def _nm_mask_fwd_kernel(
    weight, scale, row, column, index, masked, rows, groups, stride_o, stride_c, out_stride_c,
    KEPT: tl.constexpr, GROUP: tl.constexpr, POWER: tl.constexpr, STATISTICS: tl.constexpr,
    TILE_O: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    g = (tl.program_id(0) * TILE_GROUPS + tl.arange(0, TILE_GROUPS))[None, :]
    o = (tl.program_id(1) * TILE_O + tl.arange(0, TILE_O))[:, None]
    inside = (o < rows) & (g < groups)
    o_long = o.to(tl.int64)
    row_factor = 0.0
    if STATISTICS:
        row_factor = tl.load(row + o, mask=o < rows, other=0.0)
    weights, scores = (), ()
    for k in tl.static_range(GROUP):
        channel = tl.load(index + g * GROUP + k, mask=g < groups, other=0).to(tl.int64)
        value = tl.load(weight + o_long * stride_o + channel * stride_c, mask=inside, other=0.0)
        column_factor = 0.0
        if STATISTICS:
            column_factor = tl.load(column + channel)
        score = _scores(value.to(tl.float32), tl.load(scale + channel), row_factor, column_factor, POWER, STATISTICS)
        weights, scores = weights + (value,), scores + (score,)  # type: ignore[assignment]  # noqa: RUF005
    for k in tl.static_range(GROUP):
        rank = tl.zeros([TILE_O, TILE_GROUPS], tl.int32)
        for other in tl.static_range(GROUP):
            if other < k:
                rank += (scores[other] >= scores[k]).to(tl.int32)
            elif other > k:
                rank += 1 - (scores[k] >= scores[other]).to(tl.int32)
        result = tl.where((rank < KEPT) & (weights[k] != 0.0), weights[k], 0.0)  # -0.0 becomes 0.0
        channel = tl.load(index + g * GROUP + k, mask=g < groups, other=0).to(tl.int64)
        tl.store(masked + channel * out_stride_c + o_long, result.to(weights[k].dtype), mask=inside)


@jit
def _nm_mask_fwd_wide_kernel(
    weight, scale, row, column, index, masked, rows, stride_o, stride_c, out_stride_c,
    KEPT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, POWER: tl.constexpr, STATISTICS: tl.constexpr,
    TILE_O: tl.constexpr,
):  # fmt: skip
    first = index + tl.program_id(0) * GROUP
    k = tl.arange(0, PADDED)[None, :]
    o = (tl.program_id(1) * TILE_O + tl.arange(0, TILE_O))[:, None]
    inside, o_long = (o < rows) & (k < GROUP), o.to(tl.int64)
    channel = tl.load(first + k, mask=k < GROUP, other=0).to(tl.int64)
    row_factor, column_factor = 0.0, 0.0
    if STATISTICS:
        row_factor, column_factor = tl.load(row + o, mask=o < rows, other=0.0), tl.load(column + channel)
    value = tl.load(weight + o_long * stride_o + channel * stride_c, mask=inside, other=0.0)
    scores = _scores(value.to(tl.float32), tl.load(scale + channel), row_factor, column_factor, POWER, STATISTICS)
    rank = tl.zeros([TILE_O, PADDED], tl.int32)
    for j in range(GROUP):
        other = tl.load(first + j).to(tl.int64)
        rival = tl.load(weight + o_long * stride_o + other * stride_c, mask=o < rows, other=0.0).to(tl.float32)
        rival_factor = 0.0
        if STATISTICS:
            rival_factor = tl.load(column + other)
        rival = _scores(rival, tl.load(scale + other), row_factor, rival_factor, POWER, STATISTICS)
        ahead = ((j < k) & (rival >= scores)) | ((j > k) & ~(scores >= rival))
        rank += ahead.to(tl.int32)
    result = tl.where((rank < KEPT) & (value != 0.0), value, 0.0)
    tl.store(masked + channel * out_stride_c + o_long, result.to(value.dtype), mask=inside)


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
    return g * w, _scores(w, factor, row_factor, column_factor, POWER, STATISTICS)


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
    grad, weight, scale, row, column, index, partial, first, size, rows, rows_a_split, offset, total,
    grad_stride_o, grad_stride_c, stride_o, stride_c,
    GROUP: tl.constexpr, PADDED: tl.constexpr, POWER: tl.constexpr, STATISTICS: tl.constexpr,
    GROUP_SCALE: tl.constexpr, FLOOR: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
    ALIGN: tl.constexpr, MOST_TILE_O: tl.constexpr, TILE_C: tl.constexpr, TILE_O: tl.constexpr,
):  # fmt: skip
    rows, grad_stride_c, stride_c = rows * ALIGN, grad_stride_c * ALIGN, stride_c * ALIGN
    rows_a_split *= MOST_TILE_O
    block, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(size // GROUP * PADDED, TILE_C)
    start = first + block * size
    place = (tl.program_id(2) % tiles) * TILE_C + tl.arange(0, TILE_C)
    j = place // PADDED * GROUP + place % PADDED
    j_valid = (place % PADDED < GROUP) & (j < size)
    j_channel = tl.load(index + start + j, mask=j_valid, other=0).to(tl.int64)
    c_channel, c_valid = j_channel, j_valid
    if not WHOLE:
        c = (tl.program_id(2) // tiles) * TILE_C + tl.arange(0, TILE_C)
        c_valid = c < size
        c_channel = start + c
    begin = tl.program_id(1) * rows_a_split
    end = tl.minimum(begin + rows_a_split, rows)
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
    places = (c_channel - start)[:, None] * size + j[None, :]
    tl.store(out + places, product, mask=c_valid[:, None] & j_valid[None, :])


def nm_mask_triton(
    weight: Tensor,
    scale: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    power: int,
    index: Tensor,
    block_sizes: Sequence[int],
    kept: int,
    group: int,
) -> Tensor:
    """`nm_mask_reference` by a Triton kernel, bit for bit, for finite weights and statistics.

    Raises:
        ModelError: a dtype that `supports` does not name.
    """
    _refuse_unsupported(weight, scale)
    rows, channels = weight.shape
    masked = torch.empty((channels, rows), dtype=weight.dtype, device=weight.device)
    if not masked.numel():
        return masked.t()
    factors, options = _factors(scale, row, column), {"KEPT": kept, "GROUP": group, "POWER": power}
    options["STATISTICS"] = row is not None
    if group > MOST_SLOTS:
        padded = triton.next_power_of_2(group)
        tile_o = WIDE_TILE // padded
        _nm_mask_fwd_wide_kernel[(channels // group, triton.cdiv(rows, tile_o))](
            weight, *factors, index.contiguous(), masked, rows, *weight.stride(), rows, PADDED=padded, TILE_O=tile_o,
            **options,
        )  # fmt: skip
        return masked.t()
    config = ROW_MAJOR
    if weight.stride(0) == 1:
        config = config_for("nm_mask", CONFIGS, (rows, channels, kept, group), weight.dtype)
    tile_o, tile_groups = _forward_tile(config, group)
    grid = (triton.cdiv(channels // group, tile_groups), triton.cdiv(rows, tile_o))
    _nm_mask_fwd_kernel[grid](
        weight, *factors, index.contiguous(), masked, rows, channels // group, *weight.stride(), rows,
        TILE_O=tile_o, TILE_GROUPS=tile_groups, num_warps=config.num_warps, num_stages=config.num_stages, **options,
    )  # fmt: skip
    return masked.t()


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
    _refuse_unsupported(weight, scale)
    total = sum(size * size for size in block_sizes)
    rows = weight.shape[0]
    if not total or not rows:
        return torch.zeros(total, device=weight.device)
    config = config_for("nm_mask_backward", BACKWARD_CONFIGS, (rows, weight.shape[1], max(block_sizes)), weight.dtype)
    aligned = grad.stride(0) == weight.stride(0) == 1 and not any(
        number % ALIGN for number in (rows, grad.stride(1), weight.stride(1), *block_sizes)
    )
    align = ALIGN if aligned else 1
    runs = [(size, len(list(run))) for size, run in groupby(block_sizes)]
    programs = sum(count * _backward_tile(size, group, aligned)[2] for size, count in runs)
    splits = max(min(config.constants["PROGRAMS"] // programs, triton.cdiv(rows, LEAST_ROWS)), 1)
    tiles_a_split = triton.cdiv(triton.cdiv(rows, splits), MOST_TILE_O)
    splits = triton.cdiv(rows, tiles_a_split * MOST_TILE_O)
    partial = torch.empty((splits, total), device=weight.device)
    factors, index, first, offset = _factors(scale, row, column), index.contiguous(), 0, 0
    for size, count in runs:
        tile_c, whole, pairs = _backward_tile(size, group, aligned)
        _nm_mask_bwd_kernel[(count, splits, pairs)](
            grad, weight, *factors, index, partial, first, size, rows // align, tiles_a_split, offset, total,
            grad.stride(0), grad.stride(1) // align, weight.stride(0), weight.stride(1) // align, GROUP=group,
            PADDED=triton.next_power_of_2(group), POWER=power,
            STATISTICS=row is not None, GROUP_SCALE=group_scale, FLOOR=floor, WHOLE=whole,
            INTERPRETED=triton.knobs.runtime.interpret, ALIGN=align, MOST_TILE_O=MOST_TILE_O,
            TILE_C=tile_c, TILE_O=_backward_rows(config, tile_c, aligned), num_warps=config.num_warps,
            num_stages=config.num_stages,
        )  # fmt: skip
        first, offset = first + size * count, offset + size * size * count
    return partial.sum(0) if splits > 1 else partial[0]


def supports(weight: Tensor, scale: Tensor) -> bool:
    """Whether the kernels take these: bfloat16, float16 or float32 weights with float32 statistics."""
    return weight.dtype in DTYPES and scale.dtype == torch.float32


def _refuse_unsupported(weight: Tensor, scale: Tensor) -> None:
    if not supports(weight, scale):
        raise ModelError(
            f"nm_mask: a {weight.dtype} weight with {scale.dtype} statistics: the Triton kernels expect a weight of "
            "bfloat16, float16 or float32 with statistics of float32; the reference takes float64"
        )


def _factors(scale: Tensor, row: Tensor | None, column: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns contiguous statistics; those not given are never read."""
    scale = scale.contiguous()
    if row is None or column is None:
        return scale, scale, scale
    return scale, row.contiguous(), column.contiguous()


def _forward_tile(config: Config, group: int) -> tuple[int, int]:
    """Returns (rows, groups) of a forward tile: about as many weights as the configuration gives a group of four."""
    tile_o, tile_groups = config.constants["TILE_O"], config.constants["TILE_GROUPS"]
    shrink = max(triton.next_power_of_2(group) // 4, 1)
    while shrink > 1 and tile_groups > 1:
        tile_groups, shrink = tile_groups // 2, shrink // 2
    return max(tile_o // shrink, 16), tile_groups


def _backward_tile(size: int, group: int, aligned: bool) -> tuple[int, bool, int]:
    """Returns (tile of channels, whether it is the whole block, tiles of one block's dP).

    Narrow loads of rows that are not aligned take more registers: there is no room for the largest tile.
    """
    padded = size // group * triton.next_power_of_2(group)
    if padded <= (WHOLE_BLOCK if aligned else PART_OF_BLOCK):
        return max(triton.next_power_of_2(padded), 16), True, 1
    return PART_OF_BLOCK, False, triton.cdiv(padded, PART_OF_BLOCK) ** 2


def _backward_rows(config: Config, tile_c: int, aligned: bool) -> int:
    """Returns the rows of a backward tile: with more channels fewer, so that a tile stays in registers."""
    tile_o = config.constants["TILE_O"] if aligned else config.constants["TILE_O"] // 2
    return min(max(tile_o * 64 // tile_c, 16), MOST_TILE_O)


def builds() -> Iterator[Build]:
    """Yields every kernel in every configuration, for weights whose channels are rows of memory, at 2:4."""
    for dtype in ("bf16", "fp32"):
        for number, config in enumerate((*CONFIGS, ROW_MAJOR)):
            yield _forward_build(dtype, config, 2, 4, number == 0)
        yield _wide_build(dtype, 4, 8)
        yield _wide_build(dtype, 8, 16)
        for number, config in enumerate(BACKWARD_CONFIGS):
            for tile_c, whole in ((64, True), (128, True), (PART_OF_BLOCK, False)):
                yield _backward_build(dtype, config, tile_c, whole, True, number == 0 and tile_c <= PART_OF_BLOCK)
        for whole in (True, False):
            yield _backward_build(dtype, BACKWARD_CONFIGS[0], PART_OF_BLOCK, whole, False, True)


def _forward_build(dtype: str, config: Config, kept: int, group: int, default: bool) -> Build:
    row_major = config is ROW_MAJOR
    tile_o, tile_groups = _forward_tile(config, group)
    constants = {
        "stride_c" if row_major else "stride_o": 1, "KEPT": kept, "GROUP": group, "POWER": 1, "STATISTICS": True,
        "TILE_O": tile_o, "TILE_GROUPS": tile_groups,
    }  # fmt: skip
    signature = {
        "weight": f"*{dtype}", "scale": "*fp32", "row": "*fp32", "column": "*fp32", "index": "*i64",
        "masked": f"*{dtype}", "rows": "i32", "groups": "i32", "stride_o": "i32", "stride_c": "i32",
        "out_stride_c": "i32",
    }  # fmt: skip
    signature |= dict.fromkeys(constants, "constexpr")
    tile = f"{'row-major ' if row_major else ''}{tile_o}x{tile_groups}"
    name = f"nm_mask forward {kept}:{group} {dtype} {tile} {config.num_warps} warps"
    return Build(name, _nm_mask_fwd_kernel, signature, constants, config, default)


def _wide_build(dtype: str, kept: int, group: int) -> Build:
    constants = {
        "stride_o": 1, "KEPT": kept, "GROUP": group, "PADDED": group, "POWER": 1, "STATISTICS": True,
        "TILE_O": WIDE_TILE // group,
    }  # fmt: skip
    signature = {
        "weight": f"*{dtype}", "scale": "*fp32", "row": "*fp32", "column": "*fp32", "index": "*i64",
        "masked": f"*{dtype}", "rows": "i32", "stride_o": "i32", "stride_c": "i32", "out_stride_c": "i32",
    }  # fmt: skip
    signature |= dict.fromkeys(constants, "constexpr")
    return Build(
        f"nm_mask forward {kept}:{group} {dtype}", _nm_mask_fwd_wide_kernel, signature, constants, Config(), True
    )


def _backward_build(dtype: str, config: Config, tile_c: int, whole: bool, aligned: bool, default: bool) -> Build:
    tile_o = _backward_rows(config, tile_c, aligned)
    constants = {
        "grad_stride_o": 1, "stride_o": 1, "GROUP": 4, "PADDED": 4, "POWER": 1, "STATISTICS": True,
        "GROUP_SCALE": True, "FLOOR": 0.1, "WHOLE": whole, "INTERPRETED": False,
        "ALIGN": ALIGN if aligned else 1, "MOST_TILE_O": MOST_TILE_O, "TILE_C": tile_c, "TILE_O": tile_o,
    }  # fmt: skip
    signature = {
        "grad": f"*{dtype}", "weight": f"*{dtype}", "scale": "*fp32", "row": "*fp32", "column": "*fp32",
        "index": "*i64", "partial": "*fp32", "first": "i32", "size": "i32", "rows": "i32", "rows_a_split": "i32",
        "offset": "i32", "total": "i32", "grad_stride_o": "i32", "grad_stride_c": "i32", "stride_o": "i32",
        "stride_c": "i32",
    }  # fmt: skip
    signature |= dict.fromkeys(constants, "constexpr")
    block = f"{tile_c}{'' if whole else ' of a larger block'} x {tile_o}{'' if aligned else ' any strides'}"
    name = f"nm_mask backward {dtype} {block} {config.num_warps} warps {config.num_stages} stages"
    return Build(name, _nm_mask_bwd_kernel, signature, constants, config, default)
