"""The Triton kernel of `permtriton.kernels.assignment`, and what launches it.

Shortest augmenting paths with prices (Jonker and Volgenant), one program, by default one warp, a block. The costs are
``c = -score``; a column has a price ``v`` and, once assigned, an owner, its row. Prices start at the columns' least
costs, and each row takes the first column where it is that least. Then every row left over searches, Dijkstra's way:

    reach[j] = c[row, j] - v[j] + add;   the nearest column is closed, and its owner searches on with
    add = distance[j] + v[j] - c[owner, j],   until the nearest column has no owner;

the prices of closed columns fall by what the sink is farther, and the path's columns change owners. Everything known
of a column lives in registers; a reduction finds the nearest, free ones first among equals. Rows are read from the
caches, one a search step: about 4 B steps for random scores, B^2 / 2 for the worst.

Sums and prices are float64 whatever the scores' dtype, as in scipy, so that the totals are scipy's; steps wait for
loads and reductions, not for arithmetic. Floor: the scores read once, ``4 B^2`` bytes a block, the index written.

Refused blocks (a NaN, a score of +inf, or -inf in such places that no finite assignment is left) come out as -1 from
the kernel, which reads every score anyway: what is left to the host is one comparison over ``[n]`` numbers, and one
synchronisation, left out while a CUDA graph is captured.

Warm start: prices are only a start, so that any give the same total. The last step's save searching where the scores
changed little (measured in steps: 258 to 110 for random blocks of 64 and 2% noise).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from permtriton.errors import ConfigError
from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Build, Config, jit, tl, triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGEST = 256

CONFIGS: tuple[Config, ...] = (
    Config({"UNROLL": 4}, num_warps=1),
    Config({"UNROLL": 8}, num_warps=1),
    Config({"UNROLL": 2}, num_warps=1),
    Config({"UNROLL": 4}, num_warps=2),
    Config({"UNROLL": 4}, num_warps=4),
)


@jit
def _costs(score, row, columns, valid, SIZE: tl.constexpr):
    return -tl.load(score + row * SIZE + columns, mask=valid, other=-float("inf")).to(tl.float64)


@jit
def _joined(high, low):
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@jit
def _ordered(bits):
    """Bits of float64 numbers as int64 of the same order, and back."""
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@jit
def _least(values):
    """The least of float64 numbers: reducing integers is one instruction a warp, reducing float64 ten shuffles."""
    order = _ordered(values.to(tl.int64, bitcast=True))
    high, low = (order >> 32).to(tl.int32), order.to(tl.int32) ^ -2147483648  # unsigned as signed
    least = tl.min(high)
    rest = tl.min(tl.where(high == least, low, 2147483647)) ^ -2147483648
    return _ordered(_joined(least, rest)).to(tl.float64, bitcast=True)


@jit
def _at(values, here):
    """The one float64 that ``here`` marks."""
    bits = tl.where(here, values.to(tl.int64, bitcast=True), 0)
    return _joined(tl.sum((bits >> 32).to(tl.int32)), tl.sum(bits.to(tl.int32))).to(tl.float64, bitcast=True)


@jit
def _survey(score, columns, valid, SIZE: tl.constexpr, PADDED: tl.constexpr, UNROLL: tl.constexpr):
    """(least cost of each column, its first row, largest finite cost of each, which columns have a NaN or no least)."""
    least = tl.full([PADDED], float("inf"), tl.float64)
    first = tl.zeros([PADDED], tl.int32)
    largest = tl.zeros([PADDED], tl.float64)
    wrong = ~valid & valid
    for row in tl.range(0, SIZE, loop_unroll_factor=UNROLL):
        cost = _costs(score, row, columns, valid, SIZE)
        first = tl.where(cost < least, row, first)
        least = tl.where(cost < least, cost, least)
        largest = tl.where(cost < float("inf"), tl.maximum(largest, tl.abs(cost)), largest)
        wrong = wrong | (cost != cost)
    wrong = valid & (wrong | (tl.abs(least) == float("inf")))
    return tl.where(valid & ~wrong, least, 0.0), first, largest, wrong


@jit
def _assignment_kernel(
    score, prices, index,
    SIZE: tl.constexpr, PADDED: tl.constexpr, WARM: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    valid = columns < SIZE
    score += block * (SIZE * SIZE)
    price, first, largest, wrong = _survey(score, columns, valid, SIZE, PADDED, UNROLL)
    solved = tl.max(wrong.to(tl.int32)) == 0
    owner = tl.full([PADDED], -1, tl.int32)
    if WARM:
        # Prices far beyond the costs would drown them: no useful price is beyond a path through every column.
        limit = tl.max(largest) * (2 * SIZE)
        start = tl.load(prices + block * SIZE + columns, mask=valid, other=0.0).to(tl.float64)
        start = tl.minimum(tl.maximum(start, -limit), limit)
        price = tl.where(tl.abs(start) <= limit, start, price)
    else:
        for row in range(SIZE):
            wins = tl.min(tl.where(valid & (first == row), columns, PADDED))
            owner = tl.where(columns == wins, row, owner)
    for root in range(SIZE):
        unvisited = valid
        distance = tl.full([PADDED], float("inf"), tl.float64)
        parent = tl.full([PADDED], -1, tl.int32)
        tags = (owner + 1) * PADDED + columns  # free columns have the least
        row = root
        column = tl.full([], -1, tl.int32)
        add = tl.full([], 0.0, tl.float64)
        nearest = tl.full([], 0.0, tl.float64)
        searching = solved & (tl.max((owner == root).to(tl.int32)) == 0)
        sink = tl.full([], -1, tl.int32)
        while searching:
            # c[owner, j] is loaded beside the owner's row, so that a step waits for memory once.
            own = tl.load(score + row * SIZE + column, mask=column >= 0, other=0.0).to(tl.float64)
            reach = _costs(score, row, columns, valid, SIZE) - price + (add + own)
            nearer = unvisited & (reach < distance)
            distance = tl.where(nearer, reach, distance)
            parent = tl.where(nearer, column, parent)
            nearest = _least(tl.where(unvisited, distance, float("inf")))
            tag = tl.min(tl.where(unvisited & (distance == nearest), tags, (SIZE + 1) * PADDED))
            column = tag % PADDED
            solved = nearest < float("inf")
            searching = solved & (tag >= PADDED)
            if searching:
                row = tag // PADDED - 1
                here = columns == column
                unvisited = unvisited & ~here
                add = nearest + _at(price, here)
            else:
                sink = tl.where(solved, column, -1)
        price -= tl.where(valid & ~unvisited, nearest - distance, 0.0)
        while sink >= 0:
            here = columns == sink
            before = tl.max(tl.where(here, parent, -1))
            moved = tl.max(tl.where(columns == before, owner, -1))
            owner = tl.where(here, tl.where(before < 0, root, moved), owner)
            sink = before
    tl.store(index + block * SIZE + columns, tl.where(solved, owner, -1), mask=valid)
    if WARM:
        price += _least(tl.where(valid, -price, float("inf")))  # searches only lower prices: without this they drift
        tl.store(prices + block * SIZE + columns, price.to(tl.float32), mask=valid)


def assignment_triton(score: Tensor) -> Tensor:
    """`assignment_reference` by a Triton kernel: int32 ``[n, B]``, for each column its row.

    Args:
        score: ``[n, B, B]``, float16 to float64, B at most 256; copied where not contiguous.

    Raises:
        ConfigError: blocks that `supports` does not name.
        ValueError: a score is NaN, or a block has no assignment with a finite total. While a CUDA graph is captured
            nothing is raised, and such a block is all -1.
    """
    return _solve(score, None)


def assignment_warm_triton(score: Tensor, prices: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the prices of an earlier call.

    Args:
        score: as for `assignment_triton`.
        prices: float32 ``[n, B]``, of the columns; any are right, those that are not finite start from the column's
            largest score.

    Returns:
        (index, prices to start from the next time, the largest of a block 0).

    Raises:
        ConfigError, ValueError: as for `assignment_triton`, and prices of another shape.
    """
    if prices.shape != score.shape[:2]:
        raise ConfigError(
            f"assignment: prices {tuple(prices.shape)} for scores {tuple(score.shape)}: expected "
            f"{tuple(score.shape[:2])}, one for each column; prices of NaN start afresh"
        )
    prices = prices.to(torch.float32).clone(memory_format=torch.contiguous_format)
    return _solve(score, prices), prices


def _solve(score: Tensor, prices: Tensor | None) -> Tensor:
    if not supports(score):
        raise ConfigError(
            f"assignment: {score.dtype} scores in blocks of {score.shape[-1]}: the Triton kernel expects float16, "
            f"bfloat16, float32 or float64 in blocks of at most {LARGEST}; the reference takes others"
        )
    blocks, size, _ = score.shape
    index = torch.empty((blocks, size), dtype=torch.int32, device=score.device)
    if not index.numel():
        return index
    config = config_for("assignment", CONFIGS, (blocks, size), score.dtype)
    warm = prices is not None
    _assignment_kernel[(blocks,)](
        score.detach().contiguous(), prices if warm else index, index, **_shape(size, warm), **config.arguments()
    )
    if not (score.is_cuda and torch.cuda.is_current_stream_capturing()) and bool((index[:, 0] < 0).any()):
        raise ValueError(f"assignment of {tuple(score.shape)} scores: {_what_is_wrong(score)}")
    return index


def _what_is_wrong(score: Tensor) -> str:
    nans = int(score.isnan().sum())
    return f"{nans} of them are NaN" if nans else "some are infinite and leave no assignment with a finite total"


def supports(score: Tensor) -> bool:
    """Whether the kernel takes these: blocks of up to 256, in float16 to float64."""
    return score.dtype in DTYPES and score.shape[-1] <= LARGEST


def _shape(size: int, warm: bool) -> dict[str, int]:
    return {"SIZE": size, "PADDED": max(triton.next_power_of_2(size), 32), "WARM": warm}


def builds() -> Iterator[Build]:
    """Yields the kernel in every configuration, cold and warm, for blocks of 64 and 256 and one that is padded."""
    for dtype in ("fp32", "bf16"):
        for size in (64, 256, 48):
            for warm in (False, True):
                for number, config in enumerate(CONFIGS):
                    constants = {**_shape(size, warm), **config.constants}
                    signature = {
                        "score": f"*{dtype}", "prices": "*fp32" if warm else "*i32", "index": "*i32",
                        **dict.fromkeys(constants, "constexpr"),
                    }  # fmt: skip
                    name = f"assignment {'warm ' if warm else ''}{size}x{size} {dtype} configuration {number}"
                    yield Build(name, _assignment_kernel, signature, constants, config, number == 0)
