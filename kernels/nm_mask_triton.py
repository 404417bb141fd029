"""The Triton kernels of the forward of `permtriton.kernels.nm_mask`, and what launches them.

A program holds ``TILE_O`` rows of W times ``TILE_GROUPS`` groups of the permuted order, one tensor for each slot of a
group, so that a score's rank is counted by comparing tensors and nothing crosses threads. The channels of a group are
written where they were read: W is read once and W_eff written once, and no order but ``index`` is needed. Where
channels lie in rows of memory (``weight.stride(0) == 1``) a channel's tile is one run of ``2 TILE_O`` bytes at 16 bits;
other strides take narrower tiles over a whole block of channels, and transpose in registers.
Floor: 4 bytes a weight at 16 bits; ``group`` (compare, add) a weight, below the floor up to 16 in a group.
Groups of more than four are padded to a power of two, and count ranks in a loop that reads the group's rows again, from
the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Build, Config, jit, tl, triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_SLOTS = 4  # of a group whose slots are tensors of their own; beyond, ranks are counted in a loop, rows read twice
WIDE_TILE = 4096  # weights, of larger groups

CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 1024, "TILE_GROUPS": 1}, num_warps=4, num_stages=1),
    Config({"TILE_O": 512, "TILE_GROUPS": 1}, num_warps=2, num_stages=1),
    Config({"TILE_O": 512, "TILE_GROUPS": 1}, num_warps=4, num_stages=1),
    Config({"TILE_O": 1024, "TILE_GROUPS": 2}, num_warps=8, num_stages=1),
    Config({"TILE_O": 2048, "TILE_GROUPS": 1}, num_warps=8, num_stages=1),
    Config({"TILE_O": 256, "TILE_GROUPS": 4}, num_warps=4, num_stages=1),
)
ROW_MAJOR = Config({"TILE_O": 32, "TILE_GROUPS": 16}, num_warps=4, num_stages=1)  # and strides of any other kind


@jit
def importance(weight, scale, row, column, POWER: tl.constexpr, STATISTICS: tl.constexpr):
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
        score = importance(value.to(tl.float32), tl.load(scale + channel), row_factor, column_factor, POWER, STATISTICS)
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
    scores = importance(value.to(tl.float32), tl.load(scale + channel), row_factor, column_factor, POWER, STATISTICS)
    rank = tl.zeros([TILE_O, PADDED], tl.int32)
    for j in range(GROUP):
        other = tl.load(first + j).to(tl.int64)
        rival = tl.load(weight + o_long * stride_o + other * stride_c, mask=o < rows, other=0.0).to(tl.float32)
        rival_factor = 0.0
        if STATISTICS:
            rival_factor = tl.load(column + other)
        rival = importance(rival, tl.load(scale + other), row_factor, rival_factor, POWER, STATISTICS)
        ahead = ((j < k) & (rival >= scores)) | ((j > k) & ~(scores >= rival))
        rank += ahead.to(tl.int32)
    result = tl.where((rank < KEPT) & (value != 0.0), value, 0.0)
    tl.store(masked + channel * out_stride_c + o_long, result.to(value.dtype), mask=inside)


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
    refuse_unsupported(weight, scale)
    rows, channels = weight.shape
    masked = torch.empty((channels, rows), dtype=weight.dtype, device=weight.device)
    if not masked.numel():
        return masked.t()
    tensors = (weight, *contiguous(scale, row, column), index.contiguous(), masked)
    options = {"KEPT": kept, "GROUP": group, "POWER": power, "STATISTICS": row is not None}
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
    """Whether the kernels take these: bfloat16, float16 or float32 weights with float32 statistics."""
    return weight.dtype in DTYPES and scale.dtype == torch.float32


def refuse_unsupported(weight: Tensor, scale: Tensor) -> None:
    """Refuses what `supports` does not name, forward and backward.

    Raises:
        ModelError: with both dtypes.
    """
    if not supports(weight, scale):
        raise ModelError(
            f"nm_mask: a {weight.dtype} weight with {scale.dtype} statistics: the Triton kernels expect a weight of "
            "bfloat16, float16 or float32 with statistics of float32; the reference takes float64"
        )


def contiguous(scale: Tensor, row: Tensor | None, column: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns contiguous statistics; those not given are never read."""
    scale = scale.contiguous()
    if row is None or column is None:
        return scale, scale, scale
    return scale, row.contiguous(), column.contiguous()


def _wide_config(group: int) -> Config:
    padded = triton.next_power_of_2(group)
    return Config({"PADDED": padded, "TILE_O": WIDE_TILE // padded}, num_warps=4, num_stages=1)


def builds() -> Iterator[Build]:
    """Yields the kernels in every configuration, at 2:4, 4:8, 8:16 and 16:32."""
    for dtype in ("bf16", "fp32"):
        for number, config in enumerate(CONFIGS):
            yield _build(dtype, config, 2, 4, "stride_o", number == 0)
        yield _build(dtype, ROW_MAJOR, 2, 4, "stride_c", True)
        for group in (8, 16, 32):
            for contiguous_stride in ("stride_o", "stride_c"):
                yield _build(dtype, _wide_config(group), group // 2, group, contiguous_stride, True)


def _build(dtype: str, config: Config, kept: int, group: int, contiguous_stride: str, default: bool) -> Build:
    wide = group > MOST_SLOTS
    constants = {contiguous_stride: 1, "KEPT": kept, "GROUP": group, "POWER": 1, "STATISTICS": True, **config.constants}
    numbers = ("rows", *(() if wide else ("groups",)), "stride_o", "stride_c", "out_stride_c")
    signature = {
        "weight": f"*{dtype}", "scale": "*fp32", "row": "*fp32", "column": "*fp32", "index": "*i64",
        "masked": f"*{dtype}", **dict.fromkeys(numbers, "i32"), **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    tile = f"{config.constants['TILE_O']}x{config.constants.get('TILE_GROUPS', 1)}"
    layout = "" if contiguous_stride == "stride_o" else " row-major"
    name = f"nm_mask forward {kept}:{group} {dtype}{layout} {tile} {config.num_warps} warps"
    return Build(name, _nm_mask_fwd_wide_kernel if wide else _nm_mask_fwd_kernel, signature, constants, config, default)
