"""Tries the kernels' configurations on the present GPU and keeps the fastest correct one.

Launchers report which table they read for a call (`permtriton.kernels.autotune.requests`), so nothing here depends on
how a kernel is launched. Every trial is written to the cache file as it ends: an interrupted run continues from there.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from permtriton.kernels import autotune
from permtriton.kernels.autotune import Request
from permtriton.kernels.launch import Config
from permtriton.kernels.tools.case import Case

MILLISECONDS = 50  # about the time of one replay of a graph, of which each trial makes ten
MOST_SETS, MOST_BYTES = 1024, 8 << 30  # of inputs
ROUNDS = 3  # of timing the default and the winner in turn


@dataclass(frozen=True)
class Trial:
    """The result of one configuration."""

    case: str  # name of the case that was run
    key: str  # table, shape and dtype, as in the cache file
    config: Config
    default: bool  # whether it is the first of its table
    measured: Mapping[str, Any]  # quantiles in microseconds, GB/s and TFLOP/s; or ``error``


def tune(todo: Sequence[Case], device: torch.device, machine: str, file: Path) -> Iterator[Trial]:
    """Tries every configuration of every table that the cases read; yields each trial when it is in the file.

    A caller that stops early loses nothing: the next run continues from the file.

    Args:
        todo: Cases, from `permtriton.kernels.tools.cases.cases_for`.
        device: The GPU to run on.
        machine: Key of this machine, from `permtriton.kernels.autotune.machine_key`.
        file: File to write the entries to; trials that it already holds are not repeated.
    """
    known, done = autotune.read_entries(file, machine), set[str]()
    for case in todo:
        for request in requests_of(case, device):
            if request.key in done:
                continue
            done.add(request.key)
            # An entry that a library's own search made has no trials.
            entry = {"case": case.name, "trials": {}, **known.get(request.key, {})}
            for config in request.configs:
                name, trials = autotune.describe(config), entry["trials"]
                if name not in trials:
                    trials[name] = _try(case, request, config, device)
                    entry.pop("gain", None)
                    entry["config"] = asdict(_winner(request.configs, trials))
                    autotune.write_entries(file, machine, {request.key: entry})
                yield Trial(case.name, request.key, config, config == request.configs[0], trials[name])
            _confirm(case, request, entry, device)
            autotune.write_entries(file, machine, {request.key: entry})


def requests_of(case: Case, device: torch.device) -> list[Request]:
    """Returns a case's requests for configurations, on every route that it can take; runs the case once per route.

    The last request comes first, so that a choice between kernels is tuned after the kernels. Each request forces the
    defaults of the later ones, which a route that was chosen earlier might otherwise bypass.
    """
    requests = _requested(case, device)
    for choice in list(requests.values()):
        if "ROUTE" in choice.configs[0].constants:
            for config in choice.configs:
                with suppress(Exception), autotune.forced({choice.op: config}):  # the route's own trial reports why
                    requests = _requested(case, device) | requests
    ordered = [request for request in reversed(requests.values()) if len(request.configs) > 1]
    return [
        replace(one, forced={**{later.op: later.configs[0] for later in ordered[number + 1 :]}, **one.forced})
        for number, one in enumerate(ordered)
    ]


def _requested(case: Case, device: torch.device) -> dict[str, Request]:
    with autotune.requests() as requests, torch.no_grad():
        case.run(*case.make(device))
    return requests


def _try(case: Case, request: Request, config: Config, device: torch.device) -> dict[str, Any]:
    try:
        with autotune.forced({**request.forced, request.op: config}):
            wrong = case.check(device, seed=1)
            if wrong is not None:
                return {"error": f"wrong: {wrong}"}
            p20, p50, p80 = quantiles(_calls(case, device), device)
    except Exception as error:  # too much shared memory, or a compiler error: Triton raises many kinds
        return {"error": f"does not run: {type(error).__name__}: {str(error).splitlines()[:1]}"[:200]}
    times = {"p20_us": round(1e6 * p20, 4), "p50_us": round(1e6 * p50, 4), "p80_us": round(1e6 * p80, 4)}
    return {**times, "gb_s": round(case.bytes / p50 / 1e9, 1), "tflop_s": round(case.flops / p50 / 1e12, 2)}


def _calls(case: Case, device: torch.device) -> list[Callable[[], object]]:
    seeds = range(sets_of_inputs(device, case.bytes))
    return [torch.no_grad()(partial(case.run, *case.make(device, seed))) for seed in seeds]


def quantiles(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Returns the quantiles 0.2, 0.5 and 0.8 of the seconds of one call.

    All calls are captured in one CUDA graph, so that the time to launch is that of a graph; calls that cannot be
    captured are timed on the stream. On a CPU one number is measured, to rehearse: it says nothing about a GPU.
    """

    def run() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        started = time.perf_counter()
        run()
        seconds = [time.perf_counter() - started] * 3
    else:
        from triton.testing import do_bench, do_bench_cudagraph  # there is no Triton for macOS

        wanted: Any = {"quantiles": (0.2, 0.5, 0.8), "rep": MILLISECONDS}
        try:
            seconds = [milliseconds / 1e3 for milliseconds in do_bench_cudagraph(run, **wanted)]
        except Exception:  # calls that wait for the GPU, or allocate outside torch, cannot be captured
            seconds = [milliseconds / 1e3 for milliseconds in do_bench(run, **wanted)]
    return [value / len(calls) for value in seconds]


def sets_of_inputs(device: torch.device, bytes_each: int) -> int:
    """Returns how many sets of inputs of ``bytes_each`` exceed three times the L2 cache; one on a CPU."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    needed = math.ceil(3 * cache / max(bytes_each, 1)) + 1
    return max(min(needed, MOST_SETS, MOST_BYTES // max(bytes_each, 1)), 1)


def _winner(configs: Sequence[Config], trials: Mapping[str, Any]) -> Config:
    """Returns the fastest correct configuration; the default if none was correct."""
    timed = [config for config in configs if "p50_us" in trials.get(autotune.describe(config), {})]
    return min(timed, key=lambda config: trials[autotune.describe(config)]["p50_us"], default=configs[0])


def _confirm(case: Case, request: Request, entry: dict[str, Any], device: torch.device) -> None:
    """Keeps the default unless the winner is faster when both are timed in turn, because clocks drift."""
    default, winner = request.configs[0], _winner(request.configs, entry["trials"])
    if winner == default or "error" in entry["trials"][autotune.describe(default)] or "gain" in entry:
        return

    def run(config: Config, call: Callable[[], object]) -> object:
        with autotune.forced({**request.forced, request.op: config}):
            return call()

    calls, medians = _calls(case, device), dict[Config, list[float]]()
    for config in (default, winner) * ROUNDS:
        _, median, _ = quantiles([partial(run, config, call) for call in calls], device)
        medians.setdefault(config, []).append(median)
    gain = min(medians[default]) / min(medians[winner])
    entry["gain"] = round(gain, 4)
    entry["config"] = asdict(winner if gain > 1 else default)
