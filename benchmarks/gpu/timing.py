"""Times functions against each other: after a warm-up, in turns, on inputs larger than the L2 cache, by quantiles.

On a GPU each function is captured as a CUDA graph that calls it once per set of inputs, and whole replays are timed
with events, so that launch overhead is that of a graph. A function that cannot be captured is timed on the stream,
launches included. On a CPU the host's clock is used, to rehearse: its times say nothing about a GPU.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

CALLS = 8  # least calls between two CUDA events, whose times have steps of half a microsecond
REPEATS = 25


@dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    seconds: tuple[float, ...]  # one number per sample, in the order of measuring
    how: str  # "graph", "stream" or "host"

    def quantile(self, part: float) -> float:
        """Returns the sample below which the share ``part``, 0 to 1, of all samples lies."""
        return sorted(self.seconds)[min(int(part * len(self.seconds)), len(self.seconds) - 1)]

    def report(self) -> dict[str, Any]:
        """Returns quantiles and every sample, in microseconds."""
        quantiles = {f"p{int(100 * part)}_us": _micro(self.quantile(part)) for part in (0.2, 0.5, 0.8)}
        return {**quantiles, "how": self.how, "samples_us": [_micro(seconds) for seconds in self.seconds]}


def measure(
    runs: Mapping[str, Sequence[Callable[[], object]]],
    device: torch.device,
    seconds: float = 2.0,
    repeats: int = REPEATS,
    streamed: Collection[str] = (),
) -> dict[str, Timing]:
    """Times functions against each other.

    Args:
        runs: Name -> the same call for each set of inputs.
        device: Device that the functions run on.
        seconds: Time to spend in all, without warm-up; at least 3 samples of each are taken whatever they cost.
        repeats: Most samples of each.
        streamed: Names of functions that are not captured but timed on the stream.
    """
    replays = {name: _replay(list(calls), device, name not in streamed) for name, calls in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run, _, _ in replays.values():  # a graph's first replay uploads it
        _timed(run, device)
    started = time.perf_counter()
    for repeat in range(repeats):
        if repeat >= 3 and time.perf_counter() - started > seconds:
            break
        for name, (run, calls, _) in replays.items():
            samples[name].append(_timed(run, device) / calls)
    return {name: Timing(tuple(samples[name]), how) for name, (_, _, how) in replays.items()}


def _replay(
    calls: list[Callable[[], object]], device: torch.device, graphs: bool
) -> tuple[Callable[[], object], int, str]:
    """Returns (a function that makes every call, how many calls that is, how it is timed)."""
    calls[0]()  # compiles, and raises errors before anything is captured
    if device.type != "cuda":
        return _all(calls), len(calls), "host"
    calls = calls * math.ceil(CALLS / len(calls))
    torch.cuda.synchronize(device)
    if graphs:
        with suppress(Exception):  # calls that wait for the GPU, or allocate outside torch, cannot be captured
            return captured(calls, device)[0], len(calls), "graph"
    slow = _timed(_all(calls[:2]), device) / 2 > 0.05  # long calls need no batching
    calls = calls[:1] if slow else calls
    return _all(calls), len(calls), "stream"


def _all(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    def run() -> None:
        for call in calls:
            call()

    return run


def captured(calls: Sequence[Callable[[], object]], device: torch.device) -> tuple[Callable[[], object], list[object]]:
    """Captures calls as one CUDA graph; returns (a function that replays it, what each call returned).

    Every call writes memory of its own, so that written data does not stay in the L2 cache either.
    """
    pool, before = torch.cuda.graph_pool_handle(), torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            for call in calls[:3]:
                call()
        before.wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results = [call() for call in calls]
    except Exception:
        torch.cuda.set_stream(before)  # after a failed capture torch leaves its stream current
        _end_capture(device, pool)
        raise
    return graph.replay, results  # the graph keeps their memory


def _end_capture(device: torch.device, pool: Any) -> None:
    """Restores torch's state after a capture that failed.

    Before torch 2.12 its allocator would go on allocating into the graph's pool, and its random generator refuse to
    draw numbers outside a graph until another capture succeeds.
    """
    with suppress(Exception):
        torch.cuda.synchronize(device)
    with suppress(Exception):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    with suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()  # keeps the GPU busy while the timed run is launched, or its time would include waiting for launches
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 4)
