# mypy: allow-untyped-defs
"""The Triton kernels of `permtriton.kernels.sinkhorn`, and their launchers.

A program holds one block, padded to a power of two with zeros, in registers from its one read to its one write, and
runs every round on it: a row sum stays inside a warp, a column sum crosses warps through shared memory.

Forward: writes the scales of every round. Floor: 4 bytes per entry read (2 at 16 bits), 4 written, and 8 rounds / B
for the scales; 4 rounds floating-point operations per entry, far below what an SM does in that time.

Backward: with ``g`` the gradient of ``S = diag(r) E diag(c)``, from the last round to the first,

    D = r (g E) c,  dr = (g E) c,  dc = (g E)^T r;
    per round:  s = -dc c^2,  D += r (E s^T),  dr += E s;    s = -dr r^2,  D += (s E) c_before^T,  dc = E^T s,  dr = 0;

and the logits' gradient is ``D / tau``, with ``D = dE E``. ``E`` and ``D`` stay in registers, and the sums of a round
use the same products as ``D``; the scales of a round are loaded while the round after it runs. Floor: gradient, logits
and scales read, the logits' gradient written.

Deterministic: no atomics, every sum in a fixed order. Inputs that are not contiguous are copied first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.builds import Build, builds_of, name_of
from permtriton.kernels.launch import Config, Kernel, jit, refuse_unsupported, tl, triton

# Keeps the reciprocal of an underflown sum finite. A column that lies entirely below it (69 tau under its rows' maxima)
# stays short of a sum of 1.
TINY = 1e-30
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 128  # a larger block does not fit into the registers of one program
TUNED_BLOCK = 64

# Warps for a block of 64. Other sizes scale them, so that a thread holds equally many entries: 32 in the first line.
CONFIGS: tuple[Config, ...] = (
    Config(num_warps=4),
    Config(num_warps=2),
    Config(num_warps=8),
    Config(num_warps=1),
)
BACKWARD_CONFIGS: tuple[Config, ...] = (
    Config(num_warps=4),
    Config(num_warps=2),
    Config(num_warps=8),
)


@jit
def _block(SIZE: tl.constexpr, PADDED: tl.constexpr):
    """(first entry of this program's block, places of its entries, which of them exist)."""
    i, j = tl.arange(0, PADDED)[:, None], tl.arange(0, PADDED)[None, :]
    return tl.program_id(0).to(tl.int64) * (SIZE * SIZE), i * SIZE + j, (i < SIZE) & (j < SIZE)


@jit
def _exponentials(logits_ptr, start, places, valid, inside, tau):
    x = tl.load(logits_ptr + start + places, mask=valid, other=-float("inf")).to(tl.float32)
    top = tl.where(inside, tl.max(x, 1), 0.0)
    return tl.exp((x - top[:, None]) / tau)


@jit
def _inverse(total, FLOOR: tl.constexpr):
    return 1.0 / tl.maximum(total, FLOOR, propagate_nan=tl.PropagateNan.ALL)


@Kernel
def _sinkhorn_fwd_kernel(
    logits_ptr, soft_ptr, row_scales_ptr, column_scales_ptr, tau, rounds,
    SIZE: tl.constexpr, PADDED: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    start, places, valid = _block(SIZE, PADDED)
    inside = tl.arange(0, PADDED) < SIZE
    e = _exponentials(logits_ptr, start, places, valid, inside, tau)
    scale = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, PADDED)
    column = tl.full([PADDED], 1.0, tl.float32)
    row = _inverse(tl.sum(e, 1), FLOOR)
    for k in range(rounds):
        if k > 0:
            row = _inverse(tl.sum(e * column[None, :], 1), FLOOR)
        column = _inverse(tl.sum(e * row[:, None], 0), FLOOR)
        tl.store(row_scales_ptr + scale, row, mask=inside)
        tl.store(column_scales_ptr + scale, column, mask=inside)
        scale += tl.num_programs(0).to(tl.int64) * SIZE
    tl.store(soft_ptr + start + places, e * row[:, None] * column[None, :], mask=valid)


@Kernel
def _sinkhorn_bwd_kernel(
    grad_ptr, logits_ptr, row_scales_ptr, column_scales_ptr, grad_logits_ptr, tau, rounds,
    SIZE: tl.constexpr, PADDED: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    start, places, valid = _block(SIZE, PADDED)
    scale = tl.arange(0, PADDED)
    inside = scale < SIZE
    e = _exponentials(logits_ptr, start, places, valid, inside, tau)
    per_round = tl.num_programs(0) * SIZE
    last = tl.program_id(0).to(tl.int64) * SIZE + (rounds - 1) * per_round.to(tl.int64)
    row_scales_ptr += last  # moving the pointers, not the places, saves registers that blocks of 128 are short of
    column_scales_ptr += last
    saved = tl.where(rounds > 0, inside, False)  # with &, the interpreter would make it integers
    column = tl.load(column_scales_ptr + scale, mask=saved, other=1.0)
    row = tl.load(row_scales_ptr + scale, mask=saved, other=1.0)
    if rounds == 0:
        row = _inverse(tl.sum(e, 1), FLOOR)
    result = tl.load(grad_ptr + start + places, mask=valid, other=0.0).to(tl.float32) * e
    grad_column = tl.sum(result * row[:, None], 0)
    result *= column[None, :]
    grad_row = tl.sum(result, 1)
    result *= row[:, None]
    for k in range(rounds):
        row_scales_ptr -= per_round
        column_scales_ptr -= per_round
        saved = tl.where(k + 1 < rounds, inside, False)
        before = tl.load(column_scales_ptr + scale, mask=saved, other=1.0)  # the first round began with columns of ones
        row_before = tl.load(row_scales_ptr + scale, mask=saved, other=1.0)
        grad_sum = -grad_column * column * column
        product = e * grad_sum[None, :]
        result += row[:, None] * product
        grad_row += tl.sum(product, 1)
        grad_sum = -grad_row * row * row
        product = e * grad_sum[:, None]
        result += product * before[None, :]
        grad_column = tl.sum(product, 0)
        grad_row = tl.zeros([PADDED], tl.float32)
        row, column = row_before, before
    if rounds == 0:
        result -= e * (grad_row * row * row)[:, None]
    tl.store(grad_logits_ptr + start + places, (result / tau).to(grad_logits_ptr.dtype.element_ty), mask=valid)


def sinkhorn_triton(logits: Tensor, tau: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `sinkhorn_reference` with a Triton kernel.

    Args:
        logits: float32, bfloat16 or float16 ``[n, B, B]``, B at most 128.
        tau: Temperature.
        rounds: Number of normalisations; 0 for a row softmax.

    Returns:
        (soft ``[n, B, B]``, row scales, column scales ``[rounds, n, B]``), all float32.

    Raises:
        ModelError: logits that `supports` refuses.
    """
    _refuse(logits)
    blocks, size, _ = logits.shape
    soft = torch.empty((blocks, size, size), device=logits.device)
    rows, columns = (torch.empty((rounds, blocks, size), device=logits.device) for _ in range(2))
    if soft.numel():
        config = config_for("sinkhorn", CONFIGS, (blocks, size), logits.dtype)
        _sinkhorn_fwd_kernel[(blocks,)](
            logits.contiguous(), soft, rows, columns, tau, rounds, **_shape(size), **_warps(config, size)
        )
    return soft, rows, columns


def sinkhorn_backward_triton(grad: Tensor, logits: Tensor, rows: Tensor, columns: Tensor, tau: float) -> Tensor:
    """Computes `sinkhorn_backward_reference` with a Triton kernel: the gradient of the logits, in their dtype.

    Raises:
        ModelError: logits that `supports` refuses.
    """
    _refuse(logits)
    blocks, size, _ = logits.shape
    grad_logits = torch.empty((blocks, size, size), dtype=logits.dtype, device=logits.device)
    if grad_logits.numel():
        config = config_for("sinkhorn_backward", BACKWARD_CONFIGS, (blocks, size), logits.dtype)
        _sinkhorn_bwd_kernel[(blocks,)](
            grad.contiguous(), logits.contiguous(), rows.contiguous(), columns.contiguous(), grad_logits, tau,
            rows.shape[0], **_shape(size), **_warps(config, size),
        )  # fmt: skip
    return grad_logits


def supports(logits: Tensor) -> bool:
    """Whether the kernels support the logits: blocks of up to 128, in float32 or 16 bits."""
    return logits.dtype in DTYPES and logits.shape[-1] <= LARGEST


def _refuse(logits: Tensor) -> None:
    got = f"{logits.dtype} logits in blocks of {logits.shape[-1]}"
    expected = f"float32, bfloat16 or float16 in blocks of at most {LARGEST}"
    refuse_unsupported("sinkhorn", supports(logits), got, expected)


def _shape(size: int) -> dict[str, int | float]:
    return {"SIZE": size, "PADDED": _padded(size), "FLOOR": TINY}


def _padded(size: int) -> int:
    return max(triton.next_power_of_2(size), 16)


def _warps(config: Config, size: int) -> dict[str, int]:
    """Returns warps and stages for a block: as many entries per thread as the configuration gives for blocks of 64."""
    warps = config.num_warps * _padded(size) ** 2 // TUNED_BLOCK**2
    return {"num_warps": min(max(warps, 1), 32), "num_stages": config.num_stages}


def builds() -> Iterator[Build]:
    """Yields both kernels in every configuration, for blocks of 32, 64, 128 and one that is padded."""

    def forward(size: int, dtype: torch.dtype) -> object:
        return sinkhorn_triton(torch.empty(64, size, size, dtype=dtype), 0.5, 5)

    def backward(size: int, dtype: torch.dtype) -> object:
        logits, scales = torch.empty(64, size, size, dtype=dtype), torch.empty(5, 64, size)
        return sinkhorn_backward_triton(logits.float(), logits, scales, scales, 0.5)

    for dtype, size in product((torch.float32, torch.bfloat16), (32, 64, 128, 48)):
        about = f"{size}x{size} {name_of(dtype)}"
        yield from builds_of(about, partial(forward, size, dtype), "sinkhorn", CONFIGS)
        yield from builds_of(about, partial(backward, size, dtype), "sinkhorn_backward", BACKWARD_CONFIGS)
