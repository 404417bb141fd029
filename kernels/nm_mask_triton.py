# mypy: allow-untyped-defs
"""The Triton kernels of the forward pass of `permtriton.kernels.nm_mask`, and their launcher.

A program holds ``TILE_O`` rows of W times ``TILE_GROUPS`` groups of the permuted order, with one tensor per slot of a
group, so that scores are compared tensor by tensor and no data crosses threads. A comparison is the sign bit of a
difference, and one instruction combines three of them into whether a slot is kept. The channels of a group are written
where they were read: W is read once, W_eff is written once, and no index but ``index`` is needed. If channels are rows
in memory (``weight.stride(0) == 1``), a channel's tile is one run of ``2 TILE_O`` bytes at 16 bits; other strides take
narrower tiles over a whole block of channels and transpose in registers.
Floor: 4 bytes per weight at 16 bits.
Groups of more than four are padded to a power of two. Their ranks are counted in a loop that reads the group's rows
again, from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.launch import Config, Kernel, jit, tl, triton
from permtriton.util.sparsity import NMPattern

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_SLOTS = 4  # larger groups do not hold each slot as a tensor: ranks are counted in a loop, rows read twice
WIDE_TILE = 4096  # weights per program, for those larger groups

CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 1024, "TILE_GROUPS": 1}, num_warps=4, num_stages=1),
    Config({"TILE_O": 512, "TILE_GROUPS": 1}, num_warps=4, num_stages=1),
    Config({"TILE_O": 512, "TILE_GROUPS": 1}, num_warps=2, num_stages=1),
    Config({"TILE_O": 2048, "TILE_GROUPS": 1}, num_warps=8, num_stages=1),
)
ROW_MAJOR = Config({"TILE_O": 32, "TILE_GROUPS": 16}, num_warps=4, num_stages=1)  # for all other strides


@jit
def importance(weight, scale, row, column, POWER: tl.constexpr, STATISTICS: tl.constexpr):
    """|W|^power * (row + column) * scale, rounded after each step as the reference does: ties are the same."""
    scores = tl.abs(weight)
    if POWER == 2:
        scores = scores * scores
    if STATISTICS:
        scores = scores * (row + column)
    return tl.fma(scores, scale, 0.0)  # a product that a later difference of two scores cannot be fused with


@jit
def _kept(scores, k: tl.constexpr, KEPT: tl.constexpr, GROUP: tl.constexpr):
    """int32 whose sign bit says whether slot k of a group of up to four is kept.

    It is if it wins at least ``GROUP - KEPT`` of its comparisons. A comparison is the sign bit of a difference: three
    of them are combined in one instruction, where predicates would have to be moved.
    """
    one, every, two = 0, -1, 0
    for other in tl.static_range(GROUP):
        if other != k:
            if other < k:  # k wins if its score is larger
                wins = (scores[other] - scores[k]).to(tl.int32, bitcast=True)
            else:  # k wins if its score is as large, too
                wins = ~(scores[k] - scores[other]).to(tl.int32, bitcast=True)
            two = two | (one & wins)
            one = one | wins
            every = every & wins
    if GROUP - KEPT == 1:
        return one
    if GROUP - KEPT == 2 and GROUP == 4:
        return two
    return every


@Kernel
def _nm_mask_fwd_kernel(
    weight_ptr, scale_ptr, row_ptr, column_ptr, index_ptr, masked_ptr,
    rows, groups, row_stride, channel_stride, masked_channel_stride,
    KEPT: tl.constexpr, GROUP: tl.constexpr, POWER: tl.constexpr, STATISTICS: tl.constexpr,
    TILE_O: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    g = (tl.program_id(0) * TILE_GROUPS + tl.arange(0, TILE_GROUPS))[None, :]
    o = (tl.program_id(1) * TILE_O + tl.arange(0, TILE_O))[:, None]
    inside = (o < rows) & (g < groups)
    o_long = o.to(tl.int64)
    row_factor = 0.0
    if STATISTICS:
        row_factor = tl.load(row_ptr + o, mask=o < rows, other=0.0)
    weights, scores = (), ()
    for k in tl.static_range(GROUP):
        channel = tl.load(index_ptr + g * GROUP + k, mask=g < groups, other=0).to(tl.int64)
        value = tl.load(weight_ptr + o_long * row_stride + channel * channel_stride, mask=inside)
        column_factor = 0.0
        if STATISTICS:
            column_factor = tl.load(column_ptr + channel)
        value = value.to(tl.float32) + 0.0  # -0.0 becomes 0.0
        score = importance(value, tl.load(scale_ptr + channel), row_factor, column_factor, POWER, STATISTICS)
        weights, scores = weights + (value,), scores + (score,)  # type: ignore[assignment]  # noqa: RUF005
    for k in tl.static_range(GROUP):
        kept = _kept(scores, k, KEPT, GROUP) >> 31
        result = (weights[k].to(tl.int32, bitcast=True) & kept).to(tl.float32, bitcast=True)
        channel = tl.load(index_ptr + g * GROUP + k, mask=g < groups, other=0).to(tl.int64)
        tl.store(
            masked_ptr + channel * masked_channel_stride + o_long, result.to(masked_ptr.dtype.element_ty), mask=inside
        )


@Kernel
def _nm_mask_fwd_wide_kernel(
    weight_ptr, scale_ptr, row_ptr, column_ptr, index_ptr, masked_ptr,
    rows, row_stride, channel_stride, masked_channel_stride,
    KEPT: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, POWER: tl.constexpr, STATISTICS: tl.constexpr,
    TILE_O: tl.constexpr,
):  # fmt: skip
    group_ptr = index_ptr + tl.program_id(0) * GROUP
    k = tl.arange(0, PADDED)[None, :]
    o = (tl.program_id(1) * TILE_O + tl.arange(0, TILE_O))[:, None]
    inside, o_long = (o < rows) & (k < GROUP), o.to(tl.int64)
    channel = tl.load(group_ptr + k, mask=k < GROUP, other=0).to(tl.int64)
    row_factor, column_factor = 0.0, 0.0
    if STATISTICS:
        row_factor, column_factor = tl.load(row_ptr + o, mask=o < rows, other=0.0), tl.load(column_ptr + channel)
    value = tl.load(weight_ptr + o_long * row_stride + channel * channel_stride, mask=inside, other=0.0)
    scores = importance(
        value.to(tl.float32), tl.load(scale_ptr + channel), row_factor, column_factor, POWER, STATISTICS
    )
    rank = tl.zeros([TILE_O, PADDED], tl.int32)
    for j in range(GROUP):
        other = tl.load(group_ptr + j).to(tl.int64)
        rival = tl.load(weight_ptr + o_long * row_stride + other * channel_stride, mask=o < rows, other=0.0).to(
            tl.float32
        )
        rival_factor = 0.0
        if STATISTICS:
            rival_factor = tl.load(column_ptr + other)
        rival = importance(rival, tl.load(scale_ptr + other), row_factor, rival_factor, POWER, STATISTICS)
        ahead = ((j < k) & (rival >= scores)) | ((j > k) & ~(scores >= rival))
        rank += ahead.to(tl.int32)
    result = tl.where((rank < KEPT) & (value != 0.0), value, 0.0)
    tl.store(masked_ptr + channel * masked_channel_stride + o_long, result.to(value.dtype), mask=inside)


def nm_mask_triton(
    weight: Tensor, factors: ImportanceFactors, index: Tensor, blocks: Sequence[int], pattern: NMPattern
) -> Tensor:
    """Computes `nm_mask_reference` of what `supports` accepts: the same bits, for finite scores."""
    rows, channels = weight.shape
    masked = torch.empty((channels, rows), dtype=weight.dtype, device=weight.device)
    if not masked.numel():
        return masked.t()
    tensors = (weight, *contiguous(factors), index.contiguous(), masked)
    kept, group = pattern.kept, pattern.group
    options = {"KEPT": kept, "GROUP": group, "POWER": factors.power, "STATISTICS": factors.row is not None}
    if group > MOST_SLOTS:
        config = _wide_config(group)
        grid = (channels // group, triton.cdiv(rows, config.constants["TILE_O"]))
        _nm_mask_fwd_wide_kernel[grid](*tensors, rows, *weight.stride(), rows, **config.arguments(), **options)
        return masked.t()
    config = ROW_MAJOR
    if weight.stride(0) == 1:
        config = config_for("nm_mask", CONFIGS, (rows, channels, kept, group), weight.dtype)
    groups, tile_o, tile_groups = channels // group, config.constants["TILE_O"], config.constants["TILE_GROUPS"]
    grid = (triton.cdiv(groups, tile_groups), triton.cdiv(rows, tile_o))
    _nm_mask_fwd_kernel[grid](*tensors, rows, groups, *weight.stride(), rows, **config.arguments(), **options)
    return masked.t()


def supports(weight: Tensor, scale: Tensor) -> bool:
    """Whether the kernels support the dtypes: bfloat16, float16 or float32 weights with float32 statistics."""
    return weight.dtype in DTYPES and scale.dtype == torch.float32


def contiguous(factors: ImportanceFactors) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (scale, row, column), contiguous; a factor that is None is never read, and ``scale`` stands for it."""
    scale = factors.scale.contiguous()
    if factors.row is None or factors.column is None:
        return scale, scale, scale
    return scale, factors.row.contiguous(), factors.column.contiguous()


def _wide_config(group: int) -> Config:
    padded = triton.next_power_of_2(group)
    return Config({"PADDED": padded, "TILE_O": WIDE_TILE // padded}, num_warps=4, num_stages=1)
