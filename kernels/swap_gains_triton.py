# mypy: allow-untyped-defs
"""The Triton kernel of `permtriton.kernels.swap_gains`.

A program holds the sums of one tile of pairs in registers and goes over the rows, one at a time. Of either side it
loads one vector per term, so positions should lie next to each other in memory; the launcher copies terms that do not.
Each vector goes through shared memory once and meets the other side's in registers: as outer comparisons, never as a
``[rows, I, J]`` tensor. The next row's vectors are loaded before the present one is added.

Floor: per pair and row 2 comparisons, which write 1.0 or 0.0, 2 subtractions, and 2 multiply-adds of what is selected.
A multiply-add by the comparison is one instruction, and as exact as adding. A predicated addition is one too, but
keeping the predicates of a row costs more than it saves. At 132 multiprocessors, 128 lanes and 1.98 GHz, six
instructions are 5.6e12 pairs and rows a second: 3.3 s for every pair of every linear of LLaMA-2-7B (3.6e13
comparisons). The tile of 64 by 64 in two warps takes 8.2 instructions on sm_90; 5 programs fit on a multiprocessor,
660 on an H200: a call should have 3 million pairs or more. It reads 2 KiB per row and tile, half a byte per pair and
row, mostly from the L2 cache. None of this was measured.

Tiles are no wider than the program's threads, or Triton would load each vector in every thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.builds import Build, builds_of
from permtriton.kernels.launch import Config, Kernel, jit, refuse_unsupported, tl, triton

CONFIGS: tuple[Config, ...] = (
    Config({"TILE_I": 64, "TILE_J": 64}, num_warps=2, num_stages=1),
    Config({"TILE_I": 32, "TILE_J": 64}, num_warps=1, num_stages=1),
    Config({"TILE_I": 32, "TILE_J": 32}, num_warps=1, num_stages=1),
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
    TILE_I: tl.constexpr, TILE_J: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(1) * TILE_I + tl.arange(0, TILE_I)
    j = tl.program_id(0) * TILE_J + tl.arange(0, TILE_J)
    i_valid, j_valid = i < left, j < right
    block = tl.program_id(2).to(tl.int64)
    at_i, at_j = block * left_block_stride + i, block * right_block_stride + j
    s_i, a_i, t_i, d_i = _row(s_left_ptr, a_left_ptr, t_left_ptr, d_left_ptr, at_i, i_valid)
    s_j, a_j, t_j, d_j = _row(s_right_ptr, a_right_ptr, t_right_ptr, d_right_ptr, at_j, j_valid)
    moved = tl.zeros([TILE_I, TILE_J], tl.float32)
    for row in range(rows):
        last = row + 1 == rows
        at_i += left_row_stride
        at_j += right_row_stride
        next_i = _row(s_left_ptr, a_left_ptr, t_left_ptr, d_left_ptr, at_i, i < tl.where(last, 0, left))
        next_j = _row(s_right_ptr, a_right_ptr, t_right_ptr, d_right_ptr, at_j, j < tl.where(last, 0, right))
        moved = _added(moved, s_i[:, None], t_j[None, :], a_i[:, None], d_j[None, :])
        moved = _added(moved, s_j[None, :], t_i[:, None], a_j[None, :], d_i[:, None])
        s_i, a_i, t_i, d_i = next_i
        s_j, a_j, t_j, d_j = next_j
    own_i = tl.load(own_left_ptr + block * left + i, mask=i_valid, other=0.0)
    own_j = tl.load(own_right_ptr + block * right + j, mask=j_valid, other=0.0)
    places = (block * left + i)[:, None] * right + j[None, :]
    tl.store(gains_ptr + places, own_i[:, None] + own_j[None, :] - moved, mask=i_valid[:, None] & j_valid[None, :])


def supports(dtype: torch.dtype) -> bool:
    """Whether the kernel supports the terms: float32."""
    return dtype == torch.float32


def swap_gains_triton(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Computes `swap_gains_reference` with a Triton kernel.

    Args:
        left: The five tensors of terms ``[n, I, O]``.
        right: Those of terms ``[n, J, O]``.

    Raises:
        ModelError: terms that `supports` refuses.
    """
    refuse_unsupported("swap_gains", supports(left[0].dtype), f"{left[0].dtype} terms", "float32")
    (blocks, lines, rows), columns = left[0].shape, right[0].shape[1]
    if not blocks * lines * columns * rows:  # the kernel begins with the first row
        return left[4].unsqueeze(2) + right[4].unsqueeze(1)
    gains = torch.empty((blocks, lines, columns), dtype=torch.float32, device=left[0].device)
    options = config_for("swap_gains", CONFIGS, (rows,), torch.float32).arguments()
    grid = (triton.cdiv(columns, options["TILE_J"]), triton.cdiv(lines, options["TILE_I"]), blocks)
    by_row = [_row_major(side[:4]) for side in (left, right)]
    strides = [stride for side in by_row for stride in side[0].stride()[:2]]
    _swap_gains_kernel[grid](
        *by_row[0], left[4].contiguous(), *by_row[1], right[4].contiguous(), gains,
        rows, lines, columns, *strides, **options,
    )  # fmt: skip
    return gains


def _row_major(parts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the terms as ``[n, O, positions]`` in one layout, positions next to each other."""
    turned = [part.mT for part in parts]
    if len({part.stride() for part in turned}) == 1 and turned[0].stride(2) == 1:
        return turned
    return [part.clone(memory_format=torch.contiguous_format) for part in turned]


def builds() -> Iterator[Build]:
    """Yields the kernel in every configuration, for one block and for several."""

    def searched() -> object:
        def side(positions: int) -> list[Tensor]:
            return [*(torch.empty(8, 4096, positions).mT for _ in range(4)), torch.empty(8, positions)]

        return swap_gains_triton(side(256), side(512))

    yield from builds_of("fp32", searched, "swap_gains", CONFIGS)
