# mypy: allow-untyped-defs, disable-error-code=assignment
"""Sinkhorn normalisation of a batch of square matrices (eq. 2-5 of the paper).

    E = exp((logits - rowmax) / tau);   S = diag(r) E diag(c)
    one round, from c = 1:  r = 1 / (E c),  c = 1 / (E^T r);        0 rounds: r = 1 / (E 1), c = 1, a row softmax

Shapes: ``logits``, ``soft`` ``[n, B, B]``; scales ``[rounds, n, B]`` float32. The backward pass replays the rounds from
the saved scale vectors, 2 x rounds x B float32 per block, instead of from ``rounds`` saved matrices.
Bytes moved: logits read once, soft written once, and the scales.

The Triton kernels take float32 blocks of up to 128 and one round or more; everything else runs the reference.

A program holds one block in registers from its one read to its one write, and runs every round on it. The block is a
tuple of panels, each ``WIDTH`` columns wide, and every panel has the same layout. With panels of 32 columns, eight
lanes share a row and four a column. One warp then holds a block of 64, so that no sum crosses warps: a round takes 64
shuffles and no barrier between warps. Padding counts as zero.

Forward: writes the scales of every round. Floor: 4 bytes per entry read, 4 written, and 8 rounds / B for the scales.

Backward: ``g`` is the gradient of ``S = diag(r) E diag(c)``, r and c are a round's scales divided by the last round's,
and c_before is the c of the round before. From the last round to the first,

    D = g,  dr = (g S) 1,  dc = (g S)^T 1;
    per round:  s = -dc c^2,  D += r s^T,  dr += S s;    s = -dr r^2,  D += s c_before^T,  dc = S^T s,  dr = 0;

and the logits' gradient is ``D S / tau``. Unlike the scales, which may grow without bound where no doubly stochastic
matrix is near, ``S`` is at most 1. ``S`` and ``D`` stay in registers. A block of 64 takes two warps, and column sums
cross from one to the other through shared memory. Floor: gradient, logits and scales read, the logits' gradient
written.

Deterministic: no atomics, every sum in a fixed order. Inputs that are not contiguous are copied first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Config, jit, tl, triton
from permtriton.kernels.operator import operator

# Smaller sums count as this, so that the reciprocal of one that underflows is finite. A column whose entries are all
# smaller (69 tau below the maxima of their rows) ends with a sum below 1.
TINY = 1e-30
LARGEST = 128  # a larger block does not fit into the registers of one program
TUNED_BLOCK = 64
LARGEST_FLOAT = torch.finfo(torch.float32).max

# WIDTH columns make a panel. num_warps is for blocks of 64 and is scaled for other sizes, so that a thread always holds
# the same number of entries.
CONFIGS: tuple[Config, ...] = (
    Config({"WIDTH": 32}, num_warps=1),
    Config({"WIDTH": 16}, num_warps=1),
    Config({"WIDTH": 32}, num_warps=2),
)
BACKWARD_CONFIGS: tuple[Config, ...] = (Config({"WIDTH": 32}, num_warps=2), Config({"WIDTH": 32}, num_warps=4))


def sinkhorn_reference(logits: Tensor, tau: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (soft ``[n, B, B]``, row scales, column scales ``[rounds, n, B]``)."""
    e = _exponentials(logits, tau)
    n, b, _ = e.shape
    column = e.new_ones(n, b, 1)
    row = torch.bmm(e, column).clamp_min(TINY).reciprocal()
    rows, columns = e.new_empty(rounds, n, b), e.new_empty(rounds, n, b)
    for k in range(rounds):
        if k:
            row = torch.bmm(e, column).clamp_min(TINY).reciprocal()
        column = torch.bmm(e.mT, row).clamp_min(TINY).reciprocal()
        rows[k], columns[k] = row.squeeze(-1), column.squeeze(-1)
    return e.mul_(row).mul_(column.mT), rows, columns


def sinkhorn_backward_reference(grad: Tensor, logits: Tensor, rows: Tensor, columns: Tensor, tau: float) -> Tensor:
    """Returns the gradient of the logits, in their dtype, by replaying the rounds backwards.

    Computes with ``S`` and with the ratios of each round's scales to the last round's, because scales may diverge, and
    their products with ``E`` overflow.
    """
    soft = _exponentials(logits, tau)
    rounds = rows.shape[0]
    row = rows[-1].unsqueeze(-1) if rounds else soft.sum(2, keepdim=True).clamp_min(TINY).reciprocal()
    column = columns[-1].unsqueeze(-1) if rounds else torch.ones_like(row)
    soft.mul_(row).mul_(column.mT)
    result = grad.to(soft.dtype)
    weighted = result * soft
    grad_row, grad_column = weighted.sum(2, keepdim=True), weighted.sum(1).unsqueeze(-1)
    if not rounds:
        result = result - grad_row
    for k in reversed(range(rounds)):
        row_ratio, column_ratio = rows[k].unsqueeze(-1) / row, columns[k].unsqueeze(-1) / column
        grad_sum = -grad_column * column_ratio * column_ratio  # the square alone may overflow
        result = torch.baddbmm(result, row_ratio, grad_sum.mT)
        grad_row = torch.baddbmm(grad_row, soft, grad_sum)
        grad_sum = -grad_row * row_ratio * row_ratio
        before = columns[k - 1].unsqueeze(-1) / column if k else column.reciprocal()
        result = torch.baddbmm(result, grad_sum, before.mT)
        grad_column = torch.bmm(soft.mT, grad_sum)
        grad_row = torch.zeros_like(grad_row)
    return (result * soft / tau).to(logits.dtype)


def _exponentials(logits: Tensor, tau: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).contiguous()
    return ((wide - wide.amax(-1, keepdim=True)) / tau).exp_()


@jit
def _axes(PADDED: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """(rows, columns of a panel, first scale of this program's block, places of the first panel's entries)."""
    i, j = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    first = tl.program_id(0).to(tl.int64) * SIZE
    return i, j, first, first * SIZE + i[:, None] * SIZE + j[None, :]


@jit
def _load_panels(ptr, places, i, j, OTHER: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """The panels of a block, padded with ``OTHER``."""
    panels = ()
    for at in tl.static_range(0, SIZE, WIDTH):
        valid = (i < SIZE)[:, None] & (at + j < SIZE)[None, :]
        panels += (tl.load(ptr + places + at, mask=valid, other=OTHER),)
    return panels


@jit
def _load_column(ptr, j, saved, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """The scales of each panel's columns; ones if none are saved."""
    column = ()
    for at in tl.static_range(0, SIZE, WIDTH):
        mask = tl.where(saved, at + j < SIZE, False)  # with &, the interpreter would make integers
        column += (tl.load(ptr + at + j, mask=mask, other=1.0),)
    return column


@jit
def _load_exponentials(logits_ptr, places, i, j, per_logit, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    x = _load_panels(logits_ptr, places, i, j, -float("inf"), SIZE, WIDTH)
    largest = x[0]
    for p in tl.static_range(1, len(x)):
        largest = tl.maximum(largest, x[p])
    top = tl.where(i < SIZE, tl.max(largest, 1), 0.0)
    e = ()
    for p in tl.static_range(len(x)):
        e += (tl.exp2((x[p] - top[:, None]) * per_logit),)
    return e


@jit
def _row_sums(panels, column):
    total = panels[0] * column[0][None, :]
    for p in tl.static_range(1, len(panels)):
        total += panels[p] * column[p][None, :]
    return tl.sum(total, 1)


@jit
def _inverse(total, FLOOR: tl.constexpr):
    # Triton compiles a division to nine instructions, these two lines to three. The relative error is at most 3e-7.
    root = tl.rsqrt(tl.maximum(total, FLOOR, propagate_nan=tl.PropagateNan.ALL))
    return root * root


@jit
def _sinkhorn_fwd_kernel(
    logits_ptr, soft_ptr, row_scales_ptr, column_scales_ptr, per_logit, rounds,
    SIZE: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    i, j, scale, places = _axes(PADDED, WIDTH, SIZE)
    e = _load_exponentials(logits_ptr, places, i, j, per_logit, SIZE, WIDTH)
    column = ()
    for _ in tl.static_range(len(e)):
        column += (tl.full([WIDTH], 1.0, tl.float32),)
    row = tl.zeros([PADDED], tl.float32)
    for _ in range(rounds):
        row = _inverse(_row_sums(e, column), FLOOR)
        tl.store(row_scales_ptr + scale + i, row, mask=i < SIZE)
        column = ()
        for p in tl.static_range(len(e)):
            of_panel = _inverse(tl.sum(e[p] * row[:, None], 0), FLOOR)
            tl.store(column_scales_ptr + scale + p * WIDTH + j, of_panel, mask=p * WIDTH + j < SIZE)
            column += (of_panel,)
        scale += tl.num_programs(0).to(tl.int64) * SIZE
    for p in tl.static_range(len(e)):
        valid = (i < SIZE)[:, None] & (p * WIDTH + j < SIZE)[None, :]
        tl.store(soft_ptr + places + p * WIDTH, e[p] * row[:, None] * column[p][None, :], mask=valid)


@jit
def _sinkhorn_bwd_kernel(
    grad_ptr, logits_ptr, row_scales_ptr, column_scales_ptr, grad_logits_ptr, per_logit, rounds,
    SIZE: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    i, j, scale, places = _axes(PADDED, WIDTH, SIZE)
    soft = _load_exponentials(logits_ptr, places, i, j, per_logit, SIZE, WIDTH)
    per_round = tl.num_programs(0) * SIZE
    scale += (rounds - 1) * per_round.to(tl.int64)
    row_scales_ptr += scale  # moving the pointers, not the places, saves registers that blocks of 128 are short of
    column_scales_ptr += scale
    column = _load_column(column_scales_ptr, j, True, SIZE, WIDTH)
    row = tl.load(row_scales_ptr + i, mask=i < SIZE, other=1.0)
    per_row, per_column = _inverse(row, 0.0), ()
    result = _load_panels(grad_ptr, places, i, j, 0.0, SIZE, WIDTH)
    e, weighted, grad_column, ones = soft, (), (), ()
    soft = ()
    for p in tl.static_range(len(e)):
        soft += (e[p] * row[:, None] * column[p][None, :],)
        per_column += (_inverse(column[p], 0.0),)
        weighted += (result[p] * soft[p],)
        grad_column += (tl.sum(weighted[p], 0),)
        ones += (tl.full([WIDTH], 1.0, tl.float32),)
    grad_row = _row_sums(weighted, ones)
    row, column = tl.full([PADDED], 1.0, tl.float32), ones
    for k in range(rounds):
        row_scales_ptr -= per_round
        column_scales_ptr -= per_round
        saved = k + 1 < rounds  # the first round began with column scales of 1, which are not saved
        before = _load_column(column_scales_ptr, j, saved, SIZE, WIDTH)
        row_before = tl.load(row_scales_ptr + i, mask=tl.where(saved, i < SIZE, False), other=1.0) * per_row
        grad_sums, ratios = (), ()
        for p in tl.static_range(len(soft)):
            grad_sums += (-grad_column[p] * column[p] * column[p],)
            ratios += (before[p] * per_column[p],)
        grad_row += _row_sums(soft, grad_sums)
        grad_sum = -grad_row * row * row
        updated, grad_column = (), ()
        for p in tl.static_range(len(soft)):
            of_panel = result[p] + row[:, None] * grad_sums[p][None, :]
            updated += (of_panel + grad_sum[:, None] * ratios[p][None, :],)
            grad_column += (tl.sum(soft[p] * grad_sum[:, None], 0),)
        grad_row = tl.zeros([PADDED], tl.float32)
        result, row, column = updated, row_before, ratios
    for p in tl.static_range(len(soft)):
        valid = (i < SIZE)[:, None] & (p * WIDTH + j < SIZE)[None, :]
        grad_logits = result[p] * soft[p] * (per_logit * 0.6931471805599453)  # log(2) * per_logit = 1 / tau
        tl.store(grad_logits_ptr + places + p * WIDTH, grad_logits, mask=valid)


def sinkhorn_triton(logits: Tensor, tau: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks, size, _ = logits.shape
    soft = torch.empty((blocks, size, size), dtype=torch.float32, device=logits.device)
    rows, columns = (torch.empty((rounds, blocks, size), dtype=torch.float32, device=logits.device) for _ in range(2))
    config = config_for("sinkhorn", CONFIGS, (blocks, size), logits.dtype)
    _sinkhorn_fwd_kernel[(blocks,)](
        logits.contiguous(), soft, rows, columns, _per_logit(tau), rounds, **_constants(config, size)
    )
    return soft, rows, columns


def sinkhorn_backward_triton(grad: Tensor, logits: Tensor, rows: Tensor, columns: Tensor, tau: float) -> Tensor:
    blocks, size, _ = logits.shape
    grad_logits = torch.empty((blocks, size, size), dtype=logits.dtype, device=logits.device)
    config = config_for("sinkhorn_backward", BACKWARD_CONFIGS, (blocks, size), logits.dtype)
    _sinkhorn_bwd_kernel[(blocks,)](
        grad.contiguous(), logits.contiguous(), rows.contiguous(), columns.contiguous(), grad_logits, _per_logit(tau),
        rows.shape[0], **_constants(config, size),
    )  # fmt: skip
    return grad_logits


def supports(logits: Tensor, rounds: int) -> bool:
    """Whether the kernels support the logits: float32 blocks of up to 128, and one round or more."""
    return logits.dtype == torch.float32 and logits.shape[-1] <= LARGEST and rounds > 0


def _per_logit(tau: float) -> float:
    """Returns log2(e) / tau, which multiplies logits before ``exp2``; a finite float32 however small ``tau`` is."""
    return min(math.log2(math.e) / tau, LARGEST_FLOAT)


def _constants(config: Config, size: int) -> dict[str, int | float]:
    """Returns the options of a launch; a thread gets as many entries as with blocks of 64."""
    padded = max(triton.next_power_of_2(size), 16)
    warps = config.num_warps * padded**2 // TUNED_BLOCK**2
    return {
        "SIZE": size, "PADDED": padded, "WIDTH": min(config.constants["WIDTH"], padded), "FLOOR": TINY,
        "num_warps": min(max(warps, 1), 32), "num_stages": config.num_stages,
    }  # fmt: skip


def _fake(logits: Tensor, tau: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scales = logits.new_empty((rounds, *logits.shape[:2]), dtype=dtype)
    return logits.new_empty(logits.shape, dtype=dtype), scales, torch.empty_like(scales)


sinkhorn_backward = operator(
    lambda grad, logits, *_: logits.new_empty(logits.shape),
    launcher=sinkhorn_backward_triton,
    supports=lambda grad, logits, rows, columns, tau: supports(logits, len(rows)),
)(sinkhorn_backward_reference)

_sinkhorn = operator(
    _fake,
    launcher=sinkhorn_triton,
    supports=lambda logits, tau, rounds: supports(logits, rounds),
    gradient=lambda grad, *kept: {"logits": sinkhorn_backward(grad, *kept)},
    keeps=("logits", 1, 2, "tau"),
)(sinkhorn_reference)


def sinkhorn(logits: Tensor, tau: float, rounds: int) -> Tensor:
    """Returns the doubly stochastic relaxation of ``logits``, ``[n, B, B]``; differentiable in ``logits``.

    Args:
        logits: ``[n, B, B]``; the result is float32, or float64 for float64 logits.
        tau: Temperature, positive; as it goes to 0, the result tends to a permutation matrix.
        rounds: Number of row-then-column normalisations; 0 gives a row softmax.
    """
    return _sinkhorn(logits, tau, rounds)[0]
