"""Sinkhorn normalisation of a batch of square matrices (eq. 2-5 of the paper).

    E = exp((logits - rowmax) / tau);   S = diag(r) E diag(c)
    one round:  r = 1 / (E c),  c = 1 / (E^T r);        0 rounds: r = 1 / (E 1), c = 1, a row softmax

Shapes: ``logits``, ``soft`` ``[n, B, B]``; scales ``[rounds, n, B]`` float32. The backward pass replays the rounds from
the saved scale vectors, 2 x rounds x B float32 per block, instead of from ``rounds`` saved matrices.
Bytes moved: logits read once, soft written once, and the scales.

On a GPU `permtriton.kernels.sinkhorn_triton` runs, or the reference for float64 logits and blocks larger than 128.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from permtriton.kernels.launch import on_gpu
from permtriton.kernels.sinkhorn_triton import TINY, loops, sinkhorn_backward_triton, sinkhorn_triton, supports
from permtriton.kernels.tools.cases import (
    BLOCK,
    META,
    Case,
    Floor,
    Inputs,
    blocks_of,
    generator_of,
    near_identity,
    normal,
)
from permtriton.kernels.tools.timing import relative_error


def sinkhorn(logits: Tensor, tau: float, rounds: int) -> Tensor:
    """Returns the doubly stochastic relaxation of ``logits``, float32 ``[n, B, B]``; differentiable in ``logits``.

    Args:
        logits: ``[n, B, B]``.
        tau: Temperature, positive; as it goes to 0, the result tends to a permutation matrix.
        rounds: Number of row-then-column normalisations; 0 gives a row softmax.
    """
    return torch.ops.permtriton.sinkhorn(logits, tau, rounds)[0]


def sinkhorn_reference(logits: Tensor, tau: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (soft, row scales, column scales)."""
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

    Works on ``S`` and on the ratios of each round's scales to the last ones: ``E`` times scales that diverge overflows.
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


@torch.library.custom_op("permtriton::sinkhorn", mutates_args=())
def _sinkhorn(logits: Tensor, tau: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    return sinkhorn_reference(logits, tau, rounds)


@torch.library.custom_op("permtriton::sinkhorn_backward", mutates_args=())
def _sinkhorn_backward(grad: Tensor, logits: Tensor, rows: Tensor, columns: Tensor, tau: float) -> Tensor:
    return sinkhorn_backward_reference(grad, logits, rows, columns, tau)


@on_gpu(_sinkhorn)
def _(logits: Tensor, tau: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    return (sinkhorn_triton if supports(logits) else sinkhorn_reference)(logits, tau, rounds)


@on_gpu(_sinkhorn_backward)
def _(grad: Tensor, logits: Tensor, rows: Tensor, columns: Tensor, tau: float) -> Tensor:
    backward = sinkhorn_backward_triton if supports(logits) else sinkhorn_backward_reference
    return backward(grad, logits, rows, columns, tau)


@_sinkhorn.register_fake
def _(logits: Tensor, tau: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scales = logits.new_empty((rounds, *logits.shape[:2]), dtype=dtype)
    return logits.new_empty(logits.shape, dtype=dtype), scales, torch.empty_like(scales)


@_sinkhorn_backward.register_fake
def _(grad: Tensor, logits: Tensor, rows: Tensor, columns: Tensor, tau: float) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits, ctx.tau, _ = inputs
    ctx.save_for_backward(logits, output[1], output[2])


def _backward(ctx, grad, _rows, _columns):  # type: ignore[no-untyped-def]
    logits, rows, columns = ctx.saved_tensors
    return torch.ops.permtriton.sinkhorn_backward(grad, logits, rows, columns, ctx.tau), None, None


_sinkhorn.register_autograd(_backward, setup_context=_setup_context)


def cases(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Case]:
    """Returns what is checked, tuned and measured for linears of these shapes (out, in)."""
    blocks = blocks_of(shapes)
    return [make(blocks, BLOCK, device) for make in (sinkhorn_case, sinkhorn_backward_case)]


def sinkhorn_case(blocks: int, size: int, device: torch.device, rounds: int = 5) -> Case:
    """The relaxation of one step's permutations."""

    def make(seed: int) -> Inputs:
        return (near_identity(blocks, size, generator_of(seed, device)),)

    def run(logits: Tensor) -> Tensor:
        return torch.ops.permtriton.sinkhorn(logits, 0.5, rounds)[0]

    def reference(logits: Tensor) -> Tensor:
        return sinkhorn_reference(logits.double(), 0.5, rounds)[0]

    moved = 2 * blocks * size * size * 4
    return Case("sinkhorn", f"{blocks}x{size}x{size}", torch.float32, make, run, reference, relative_error, 1e-4, moved)


def sinkhorn_backward_case(blocks: int, size: int, device: torch.device, rounds: int = 5) -> Case:
    """The backward pass: reads gradient, logits and scales, writes a gradient."""

    def make(seed: int) -> Inputs:
        generator = generator_of(seed, device)
        logits = near_identity(blocks, size, generator)
        _, rows, columns = sinkhorn_reference(logits, 0.5, rounds)
        return normal((blocks, size, size), torch.float32, generator), logits, rows, columns

    def run(grad: Tensor, logits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return torch.ops.permtriton.sinkhorn_backward(grad, logits, rows, columns, 0.5)

    def reference(grad: Tensor, logits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        _, wide_rows, wide_columns = sinkhorn_reference(logits.double(), 0.5, rounds)
        return sinkhorn_backward_reference(grad.double(), logits.double(), wide_rows, wide_columns, 0.5)

    moved = (3 * size + 2 * rounds) * blocks * size * 4
    return Case(
        "sinkhorn backward", f"{blocks}x{size}x{size}", torch.float32, make, run, reference, relative_error, 1e-3, moved
    )


def floors() -> Iterator[Floor]:
    """Yields the named shape whose issue floor is counted, forward and backward."""
    blocks, rounds = 11648, 5

    def forward() -> object:
        return sinkhorn_triton(torch.empty(blocks, BLOCK, BLOCK), 0.5, rounds)

    def backward() -> object:
        logits, scales = torch.empty(blocks, BLOCK, BLOCK), torch.empty(rounds, blocks, BLOCK)
        return sinkhorn_backward_triton(logits, logits, scales, scales, 0.5)

    for make, call in ((sinkhorn_case, forward), (sinkhorn_backward_case, backward)):
        yield Floor(make(blocks, BLOCK, META, rounds), call, blocks * BLOCK * BLOCK, "entry", loops)
