"""What the decoding kernels should take on an H200, predicted from their machine code: no GPU is needed.

    time = fixed + the longest of: bytes / bandwidth, operations / rate of the tensor cores, issue floor, latency
    bandwidth = the smaller of that of a copy, and bytes in flight / the time until they arrive (Little's law)

A dense product is predicted in the same way from its bytes alone. What is fixed is the start and the end of a launch in
a CUDA graph: the first bytes, the last stores; less where a kernel begins while the one before it ends.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.floors import H200, Counted, Row, row
from benchmarks.gpu.shapes import floor_of
from benchmarks.gpu.table import FEW, FIXED_US, LAYER, LAYER_8B

FIXED_EARLY_US = 1.0  # assumed, in place of `FIXED_US`, where a kernel begins while the one before it ends
ARRIVES_US = 0.8  # assumed: latency of memory that is busy
SPARSE_TFLOP_S = 1000.0  # assumed: dense operations per second of mma.sp, which Hopper runs below its wgmma rate
MORE_TOKENS = 128  # as far as the CUDA kernel is the default


def predictions() -> Iterator[dict[str, Any]]:
    """Yields a row for each number of tokens and shape of an 8B layer, then one for the layer."""
    for tokens in (*FEW, MORE_TOKENS):
        rows = [_predicted(tokens, *shape) for shape in LAYER_8B]
        yield from rows
        ours, dense = (
            sum(count * one[of] for one, count in zip(rows, LAYER_8B.values(), strict=True))
            for of in ("us", "dense_us")
        )
        yield {"tokens": tokens, "case": LAYER, "us": ours, "dense_us": dense, "ratio": dense / ours, "limit": ""}


def _predicted(tokens: int, rows: int, channels: int) -> dict[str, Any]:
    counted = row(floor_of(tokens, rows, channels, in_cuda=tokens > 1), H200)
    main = counted.launches[0]
    in_flight = _in_flight(main)
    bandwidth = min(H200.bandwidth, in_flight * H200.processors / ARRIVES_US * 1e6)
    parts = {"bytes": counted.bytes / bandwidth * 1e6, "issuing": counted.issue_us, "latency": counted.latency_us}
    if tokens > 1:
        parts["tensor cores"] = 2 * max(tokens, 8) * rows * channels / SPARSE_TFLOP_S / 1e6
    limit = max(parts, key=parts.__getitem__)
    if limit == "bytes" and bandwidth < H200.bandwidth:
        limit = "bytes in flight"
    us = max(parts.values()) + (FIXED_EARLY_US if tokens > 1 else FIXED_US)
    dense = (2 * rows * channels + 2 * tokens * (rows + channels)) / H200.bandwidth * 1e6 + FIXED_US
    return {
        "tokens": tokens, "case": f"{rows}x{channels}", "bytes": counted.bytes, "per_unit": counted.per_unit,
        "unit": counted.unit, "issue_us": counted.issue_us, "latency_us": counted.latency_us,
        "memory_us": counted.memory_us, "waves": counted.waves, "resident": main.resident, "programs": main.programs,
        "cycles": main.cycles,
        "in_flight": in_flight, "us": us, "dense_us": dense, "ratio": dense / us, "limit": limit,
        "launch": _launch(counted),
    }  # fmt: skip


def _in_flight(main: Counted) -> float:
    """Returns the bytes that a multiprocessor has asked for at any time: the stages but the one that is multiplied."""
    at_once = min(main.resident, main.programs / H200.processors)
    return at_once * main.shared_bytes * 0.75 if main.warps >= 4 else at_once * main.shared_bytes


def _launch(counted: Row) -> str:
    main = counted.launches[0]
    return f"{main.programs} programs of {main.warps} warps, {main.registers} registers, {main.shared_bytes // 1024} KB"
