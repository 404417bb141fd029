"""The Triton kernels of `permtriton.kernels.sinkhorn`, and what launches them.

A program holds one block, padded to a power of two with zeros, in registers from its one read to its one write, and
runs every round on it: a row sum stays inside a warp, a column sum crosses warps through shared memory.

Forward: writes the scales of every round. Floor: 4 bytes an entry read (2 at 16 bits), 4 written, and 8 rounds / B
for the scales; 4 rounds floating-point operations an entry, far below what an SM does in that time.

Backward: with ``g`` the gradient of ``S = diag(r) E diag(c)``, from the last round to the first,

    D = r (g E) c,  dr = (g E) c,  dc = (g E)^T r;
    a round:  s = -dc c^2,  D += r (E s^T),  dr += E s;    s = -dr r^2,  D += (s E) c_before^T,  dc = E^T s,  dr = 0;

and the logits' gradient is ``D / tau``, ``D = dE E``. ``E`` and ``D`` stay in registers, and a round's sums take the
products that ``D`` takes; the scales of a round are loaded while the round after it runs. Floor: gradient and logits
read, the logits' gradient written, the scales read.

Deterministic: no atomics, every sum in a fixed order. Inputs that are not contiguous are copied first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from permtriton.errors import ConfigError
from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Build, Config, jit, tl, triton

TINY = 1e-30  # keeps the reciprocal of an underflown sum finite; a column all below it (69 tau under its rows' maxima)
# is left short of a sum of 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 128  # a larger block does not fit into the registers of one program
TUNED_BLOCK = 64

# Warps for a block of 64; other sizes take as many as keep the entries that a thread holds, 32 in the first line.
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
def _exponentials(logits, start, places, valid, inside, tau):
    x = tl.load(logits + start + places, mask=valid, other=-float("inf")).to(tl.float32)
    top = tl.where(inside, tl.max(x, 1), 0.0)
    return tl.exp((x - top[:, None]) / tau)


@jit
def _inverse(total, FLOOR: tl.constexpr):
    return 1.0 / tl.maximum(total, FLOOR, propagate_nan=tl.PropagateNan.ALL)


@jit
def _sinkhorn_fwd_kernel(
    logits, soft, rows, columns, tau, rounds,
    SIZE: tl.constexpr, PADDED: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    start, places, valid = _block(SIZE, PADDED)
    inside = tl.arange(0, PADDED) < SIZE
    e = _exponentials(logits, start, places, valid, inside, tau)
    scale = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, PADDED)
    column = tl.full([PADDED], 1.0, tl.float32)
    row = _inverse(tl.sum(e, 1), FLOOR)
    for k in range(rounds):
        if k > 0:
            row = _inverse(tl.sum(e * column[None, :], 1), FLOOR)
        column = _inverse(tl.sum(e * row[:, None], 0), FLOOR)
        tl.store(rows + scale, row, mask=inside)
        tl.store(columns + scale, column, mask=inside)
        scale += tl.num_programs(0).to(tl.int64) * SIZE
    tl.store(soft + start + places, e * row[:, None] * column[None, :], mask=valid)


@jit
def _sinkhorn_bwd_kernel(
    grad, logits, rows, columns, grad_logits, tau, rounds,
    SIZE: tl.constexpr, PADDED: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    start, places, valid = _block(SIZE, PADDED)
    scale = tl.arange(0, PADDED)
    inside = scale < SIZE
    e = _exponentials(logits, start, places, valid, inside, tau)
    a_round = tl.num_programs(0) * SIZE
    last = tl.program_id(0).to(tl.int64) * SIZE + (rounds - 1) * a_round.to(tl.int64)
    rows += last  # moving the pointers, not the places, saves the registers that blocks of 128 lack
    columns += last
    saved = tl.where(rounds > 0, inside, False)  # by &, the interpreter makes it whole numbers
    column = tl.load(columns + scale, mask=saved, other=1.0)
    row = tl.load(rows + scale, mask=saved, other=1.0)
    if rounds == 0:
        row = _inverse(tl.sum(e, 1), FLOOR)
    result = tl.load(grad + start + places, mask=valid, other=0.0).to(tl.float32) * e
    grad_column = tl.sum(result * row[:, None], 0)
    result *= column[None, :]
    grad_row = tl.sum(result, 1)
    result *= row[:, None]
    for k in range(rounds):
        rows -= a_round
        columns -= a_round
        saved = tl.where(k + 1 < rounds, inside, False)
        before = tl.load(columns + scale, mask=saved, other=1.0)  # the first round began with columns of ones
        row_before = tl.load(rows + scale, mask=saved, other=1.0)
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
    tl.store(grad_logits + start + places, (result / tau).to(grad_logits.dtype.element_ty), mask=valid)


def sinkhorn_triton(logits: Tensor, tau: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """`sinkhorn_reference` by a Triton kernel.

    Args:
        logits: float32, bfloat16 or float16 ``[n, B, B]``, B at most 128.
        tau: temperature.
        rounds: 0 for a row softmax.

    Returns:
        (soft ``[n, B, B]``, row scales, column scales ``[rounds, n, B]``), all float32.

    Raises:
        ConfigError: blocks that `supports` does not name.
    """
    _refuse_unsupported(logits)
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
    """`sinkhorn_backward_reference` by a Triton kernel: the gradient of the logits, in their dtype.

    Raises:
        ConfigError: blocks that `supports` does not name.
    """
    _refuse_unsupported(logits)
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
    """Whether the kernels take these: blocks of up to 128, in float32 or 16 bits."""
    return logits.dtype in DTYPES and logits.shape[-1] <= LARGEST


def _refuse_unsupported(logits: Tensor) -> None:
    if not supports(logits):
        raise ConfigError(
            f"sinkhorn: {logits.dtype} logits in blocks of {logits.shape[-1]}: the Triton kernels expect float32, "
            f"bfloat16 or float16 in blocks of at most {LARGEST}; the reference takes others"
        )


def _shape(size: int) -> dict[str, int | float]:
    return {"SIZE": size, "PADDED": _padded(size), "FLOOR": TINY}


def _padded(size: int) -> int:
    return max(triton.next_power_of_2(size), 16)


def _warps(config: Config, size: int) -> dict[str, int]:
    """Returns warps and stages for a block: as many entries a thread as the configuration gives a block of 64."""
    warps = config.num_warps * _padded(size) ** 2 // TUNED_BLOCK**2
    return {"num_warps": min(max(warps, 1), 32), "num_stages": config.num_stages}


def builds() -> Iterator[Build]:
    """Yields both kernels in every configuration, for blocks of 32, 64, 128 and one that is padded."""
    for dtype in ("fp32", "bf16"):
        scales = {"rows": "*fp32", "columns": "*fp32"}
        numbers = {"tau": "fp32", "rounds": "i32", **dict.fromkeys(_shape(TUNED_BLOCK), "constexpr")}
        forward = {"logits": f"*{dtype}", "soft": "*fp32", **scales, **numbers}
        backward = {"grad": "*fp32", "logits": f"*{dtype}", **scales, "grad_logits": f"*{dtype}", **numbers}
        for size in (32, 64, 128, 48):
            yield from _builds_of("forward", _sinkhorn_fwd_kernel, forward, CONFIGS, size, dtype)
            yield from _builds_of("backward", _sinkhorn_bwd_kernel, backward, BACKWARD_CONFIGS, size, dtype)


def _builds_of(
    direction: str, kernel: Any, signature: dict[str, str], configs: tuple[Config, ...], size: int, dtype: str
) -> Iterator[Build]:
    launches = dict.fromkeys(tuple(_warps(config, size).values()) for config in configs)  # small blocks: some are equal
    for number, (warps, stages) in enumerate(launches):
        name = f"sinkhorn {direction} {size}x{size} {dtype} {warps} warps"
        yield Build(name, kernel, signature, _shape(size), Config({}, warps, stages), number == 0)
