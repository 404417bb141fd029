"""What products and a step of decoding should take on an H200: no GPU is needed.

Up to 256 tokens the packed product is predicted from its machine code:

    time = fixed + the longest of: bytes / bandwidth, operations / rate of the tensor cores, issue floor, latency
    bandwidth = the smaller of that of a copy, and bytes in flight / the time until they arrive (Little's law)

A dense product is predicted in the same way from its bytes alone. What is fixed is the start and the end of a launch in
a CUDA graph: the first bytes, the last stores; less where a kernel begins while the one before it ends.

From 256 tokens on the route is cuSPARSELt, whose code cannot be counted: our prediction of the dense product is divided
by the ratio that others measured at the nearest shape. A step of decoding is its linears, the small operators of the
modules, which a run of a tiny model counts, the cache, and the output layer, which stays dense.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.floors import H200, Counted, Row, row
from benchmarks.gpu.shapes import floor_of
from benchmarks.gpu.table import BARE, DECODING, FEW, FIXED_US, LAYER, LAYER_8B, MANY, MORE, product_name

FIXED_EARLY_US = 1.0  # assumed, in place of `FIXED_US`, where a kernel begins while the one before it ends
ARRIVES_US = 0.8  # assumed: latency of memory that is busy
SPARSE_TFLOP_S = 1000.0  # assumed: dense operations per second of mma.sp, which Hopper runs below its wgmma rate
DENSE_TFLOP_S = 790.0  # assumed: of a dense product in bfloat16
DEFAULT_TOKENS, MOST_TOKENS = 128, 256  # as far as the CUDA kernel is the default, and as far as it goes
LAYERS = 32
FUSED = 8  # launches that are no linears in a layer whose norms, rotation and activation are one each, as vLLM's are
OTHERS = Path(__file__).resolve().parent.parent / "results" / "cusparselt-h100.json"


def predictions() -> Iterator[dict[str, Any]]:
    """Yields a row for each route, number of tokens and shape of an 8B layer, one for the layer, then for decoding."""
    layers = {}
    for tokens in (*FEW, *MORE, *MANY):
        for route in ["mma"] * (tokens <= MOST_TOKENS) + [BARE] * (tokens > DEFAULT_TOKENS):
            make = _predicted if route == "mma" else _by_others
            rows = [make(tokens, *shape) for shape in LAYER_8B]
            name = product_name(tokens) + ", in CUDA" * (route == "mma" and tokens > DEFAULT_TOKENS)
            yield from ({"name": name, **one} for one in rows)
            layers[tokens] = _layer(rows)
            yield {"name": name, "tokens": tokens, "case": LAYER, **layers[tokens], "limit": ""}
    inside, outside = _small_launches()
    for batch in (1, 64):
        for launches in (inside, FUSED):
            yield _step(batch, layers[batch], launches, outside)


def _layer(rows: list[dict[str, Any]]) -> dict[str, float]:
    us, dense = (
        sum(count * one[of] for one, count in zip(rows, LAYER_8B.values(), strict=True)) for of in ("us", "dense_us")
    )
    return {"us": us, "dense_us": dense, "ratio": dense / us}


def _dense_us(tokens: int, rows: int, channels: int) -> float:
    moved = 2 * rows * channels + 2 * tokens * (rows + channels)
    return max(moved / H200.bandwidth * 1e6, 2 * tokens * rows * channels / DENSE_TFLOP_S / 1e6) + FIXED_US


def _by_others(tokens: int, rows: int, channels: int) -> dict[str, Any]:
    """Ratios above 2, which half of the operations cannot give, are slips; of two that are as near, the smaller."""

    def distance(*other: int) -> float:
        return round(sum(abs(math.log(ours / theirs)) for ours, theirs in zip((rows, channels), other, strict=True)), 6)

    table = [one for one in json.loads(OTHERS.read_text(encoding="utf-8"))["rows"] if one[3] <= 2]
    near = min(table, key=lambda one: (distance(*one[1:3]), round(abs(math.log(one[0] / tokens)), 6), one[3]))
    dense = _dense_us(tokens, rows, channels)
    moved = rows * channels * 9 // 8 + 2 * tokens * (rows + channels)
    return {
        "tokens": tokens, "case": f"{rows}x{channels}", "bytes": moved, "us": dense / near[3], "dense_us": dense,
        "ratio": near[3], "limit": BARE,
        "measured_at": near[:3],
    }  # fmt: skip


def _step(batch: int, layer: dict[str, float], launches: int, outside: int) -> dict[str, Any]:
    from benchmarks.gpu.models import CONTEXT, SIZES

    vocabulary, hidden, _, heads, shared = SIZES["8B"]
    cache = 2 * 2 * batch * CONTEXT * shared * hidden // heads
    same = LAYERS * (launches * FIXED_US + cache / H200.bandwidth * 1e6) + outside * FIXED_US
    same += _dense_us(batch, vocabulary, hidden)
    ours, dense = (same + LAYERS * layer[of] for of in ("us", "dense_us"))
    packed = LAYERS * sum(rows * channels * 9 // 8 * count for (rows, channels), count in LAYER_8B.items())
    return {
        "name": DECODING, "case": f"batch {batch}, {launches} launches beside",
        "bytes": packed + LAYERS * cache + 2 * vocabulary * hidden, "us": ours, "dense_us": dense,
        "ratio": dense / ours, "limit": "linears" if LAYERS * layer["us"] > same else "the rest",
    }  # fmt: skip


class _Operators(TorchDispatchMode):
    """Counts operators that launch something and are no product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func._opname not in ("mm", "_unsafe_view")
        return func(*args, **(kwargs or {}))


def _small_launches() -> tuple[int, int]:
    """Returns the operators of a decoder layer, and of a model outside of its layers, without products."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.gpu.models import one_step, without_mask

    counts = []
    for layers in (1, 2):
        sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
        config: Any = LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, dtype=torch.bfloat16, **sizes)
        step = one_step(
            without_mask(LlamaForCausalLM._from_config(config).eval()), torch.zeros(1, 1, dtype=torch.long), 8
        )
        with torch.no_grad():
            step()  # makes the cache
            with _Operators() as found:
                step()
        counts.append(found.count)
    return counts[1] - counts[0], 2 * counts[0] - counts[1]


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
    dense = _dense_us(tokens, rows, channels)
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
