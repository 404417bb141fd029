# mypy: allow-untyped-defs
"""The Triton kernel of `permtriton.kernels.swap_gains`.

A program of one warp holds the sums of one tile of pairs in registers and goes over the rows, one at a time. Of either
side it loads one vector per term, so positions should lie next to each other in memory; the launcher copies terms that
do not. Vectors are copied to shared memory two rows ahead. Each thread owns four columns of the tile: it reads their
terms once, and those of the lines as broadcasts, four at a time; a ``[rows, I, J]`` tensor never exists.

Floor: per pair and row 2 comparisons, which write 1.0 or 0.0, 2 subtractions, and 2 multiply-adds of what is selected.
A multiply-add by the comparison is one instruction, and as exact as adding. A predicated addition is one too, but
keeping the predicates of a row costs more than it saves. 8 programs fit on a multiprocessor, 1056 on an H200: a call
should have 4 million pairs or more.

128 sums per thread fill the registers: where sizes are not known to be multiples of `ALIGN`, whose vectors are copied
one number at a time, tiles are half as wide, or sums would be spilled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Config, Kernel, jit, tl, triton

ALIGN = 16  # positions and strides that are multiples of it are copied four numbers at a time
CONFIGS: tuple[Config, ...] = (
    Config({"TILE_I": 32, "TILE_J": 128, "STAGES": 3}, num_warps=1, num_stages=1),
    Config({"TILE_I": 32, "TILE_J": 64, "STAGES": 2}, num_warps=1, num_stages=1),
    Config({"TILE_I": 32, "TILE_J": 32, "STAGES": 2}, num_warps=1, num_stages=1),
)


@jit
def _added(total, score, threshold, agreement, displaced):
    """The total, and the difference of the agreements where the score exceeds the threshold."""
    return tl.fma((score > threshold).to(tl.float32), agreement - displaced, total)


@jit
def _row(scores_ptr, agreement_ptr, threshold_ptr, displaced_ptr, places, valid):
    """(S, A, t, a) of one row; zeros outside."""
    return (
        tl.load(scores_ptr + places, mask=valid, other=0.0),
        tl.load(agreement_ptr + places, mask=valid, other=0.0),
        tl.load(threshold_ptr + places, mask=valid, other=0.0),
        tl.load(displaced_ptr + places, mask=valid, other=0.0),
    )


@Kernel
def _swap_gains_kernel(
    s_left_ptr, a_left_ptr, t_left_ptr, d_left_ptr, own_left_ptr,
    s_right_ptr, a_right_ptr, t_right_ptr, d_right_ptr, own_right_ptr, gains_ptr,
    rows, left, right, left_block_stride, left_row_stride, right_block_stride, right_row_stride,
    ALIGN: tl.constexpr, TILE_I: tl.constexpr, TILE_J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Known to be multiples of ALIGN, so that loads and stores are wide.
    left, left_block_stride, left_row_stride = left * ALIGN, left_block_stride * ALIGN, left_row_stride * ALIGN
    right, right_block_stride, right_row_stride = right * ALIGN, right_block_stride * ALIGN, right_row_stride * ALIGN
    i = tl.program_id(1) * TILE_I + tl.arange(0, TILE_I)
    j = tl.program_id(0) * TILE_J + tl.arange(0, TILE_J)
    i_valid, j_valid = i < left, j < right
    block = tl.program_id(2).to(tl.int64)
    at_i, at_j = block * left_block_stride + i, block * right_block_stride + j
    moved = tl.zeros([TILE_I, TILE_J], tl.float32)
    for _ in tl.range(rows, num_stages=STAGES):
        s_i, a_i, t_i, d_i = _row(s_left_ptr, a_left_ptr, t_left_ptr, d_left_ptr, at_i, i_valid)
        s_j, a_j, t_j, d_j = _row(s_right_ptr, a_right_ptr, t_right_ptr, d_right_ptr, at_j, j_valid)
        moved = _added(moved, s_i[:, None], t_j[None, :], a_i[:, None], d_j[None, :])
        moved = _added(moved, s_j[None, :], t_i[:, None], a_j[None, :], d_i[:, None])
        at_i += left_row_stride
        at_j += right_row_stride
    own_i = tl.load(own_left_ptr + block * left + i, mask=i_valid, other=0.0)
    own_j = tl.load(own_right_ptr + block * right + j, mask=j_valid, other=0.0)
    places = (block * left + i)[:, None] * right + j[None, :]
    tl.store(gains_ptr + places, own_i[:, None] + own_j[None, :] - moved, mask=i_valid[:, None] & j_valid[None, :])


def supports(dtype: torch.dtype) -> bool:
    """Whether the kernel supports the terms: float32."""
    return dtype == torch.float32


def swap_gains_triton(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Computes `swap_gains_reference` of terms that `supports` accepts.

    Args:
        left: The five tensors of terms ``[n, I, O]``.
        right: Those of terms ``[n, J, O]``.
    """
    (blocks, lines, rows), columns = left[0].shape, right[0].shape[1]
    if not blocks * lines * columns * rows:
        return left[4].unsqueeze(2) + right[4].unsqueeze(1)
    gains = torch.empty((blocks, lines, columns), dtype=torch.float32, device=left[0].device)
    by_row = [_row_major(side[:4]) for side in (left, right)]
    sizes = [lines, columns, *(stride for side in by_row for stride in side[0].stride()[:2])]
    options = _launch(config_for("swap_gains", CONFIGS, (rows,), torch.float32), sizes)
    grid = (triton.cdiv(columns, options["TILE_J"]), triton.cdiv(lines, options["TILE_I"]), blocks)
    _swap_gains_kernel[grid](
        *by_row[0], left[4].contiguous(), *by_row[1], right[4].contiguous(), gains,
        rows, *(size // options["ALIGN"] for size in sizes), **options,
    )  # fmt: skip
    return gains


def _launch(config: Config, sizes: Sequence[int]) -> dict[str, int]:
    """Returns the constants and options for positions and strides of some sizes; see `ALIGN`."""
    arguments = config.arguments()
    if not any(size % ALIGN for size in sizes):
        return {"ALIGN": ALIGN, **arguments}
    return {"ALIGN": 1, **arguments, "TILE_J": min(arguments["TILE_J"], 64)}


def _row_major(parts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the terms as ``[n, O, positions]`` in one layout, positions next to each other."""
    turned = [part.mT for part in parts]
    if len({part.stride() for part in turned}) == 1 and turned[0].stride(2) == 1:
        return turned
    return [part.clone(memory_format=torch.contiguous_format) for part in turned]
