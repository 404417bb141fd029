"""Tries the kernels' configurations on the present GPU and keeps the fastest correct one.

Launchers report which table they read for a call (`permtriton.kernels.autotune.requests`), so nothing here depends on
how a kernel is launched. Every trial is written to the cache file as it ends: an interrupted run continues from there.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from permtriton.errors import ConfigError
from permtriton.kernels import autotune
from permtriton.kernels.autotune import Request
from permtriton.kernels.launch import Config
from permtriton.kernels.tools.case import Case
from permtriton.kernels.tools.cases import KERNELS
from permtriton.kernels.tools.timing import measure, sets_of_inputs

SECONDS = 0.5  # spent on timing one configuration
LARGEST = 1 << 24  # most features of a linear


@dataclass(frozen=True)
class Trial:
    """The result of one configuration."""

    case: str  # name of the case that was run
    key: str  # table, shape and dtype, as in the cache file
    config: Config
    default: bool  # whether it is the first of its table
    measured: Mapping[str, Any]  # quantiles in microseconds, GB/s and TFLOP/s; or ``error``
    known: bool  # whether an earlier run measured it


def cases_for(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    kernel: str | None = None,
) -> list[Case]:
    """Returns the cases that are tuned for linears of these shapes (out, in); ``kernel`` names the only one to tune."""
    named = {module.__name__.rpartition(".")[2]: module for module in KERNELS}
    if kernel not in (None, *named):
        raise ConfigError(f"kernel {kernel!r} is unknown: choose one of {', '.join(named)}")
    for out_features, in_features in shapes:
        if in_features % 4:
            raise ConfigError(f"shape {out_features}x{in_features}: expected input features that are a multiple of 4")
        if out_features < 4 or max(out_features, in_features) > LARGEST:
            raise ConfigError(f"shape {out_features}x{in_features}: expected 4 to {LARGEST} features")
    chosen = [named[kernel]] if kernel else KERNELS
    made = [case for module in chosen for case in module.cases(shapes, tokens, dtype, device)]
    return list({case.name: case for case in made}.values())


def tune(
    todo: Sequence[Case],
    device: torch.device,
    machine: str,
    file: Path,
    on_trial: Callable[[Trial], object] = lambda _: None,
    until: float = math.inf,
) -> dict[str, Any] | None:
    """Tries every configuration of every table that the cases read; returns the entries of the cache file.

    Returns None if the time was up before the end: the trials are in the file, and the next run continues from there.

    Args:
        todo: Cases, from `cases_for`.
        device: The GPU to run on.
        machine: Key of this machine, from `permtriton.kernels.autotune.machine_key`.
        file: File to write the entries to; trials that it already holds are not repeated.
        on_trial: Called after each configuration.
        until: Time on the clock of `time.monotonic` after which no further trial begins.
    """
    known, entries = autotune.read_entries(file, machine), {}
    for case in todo:
        requests = requests_of(case)
        for number, request in enumerate(requests):
            if request.key in entries:
                continue
            # An entry that a library's own search made has no trials.
            entry = entries[request.key] = {"case": case.name, "trials": {}, **known.get(request.key, {})}
            later = {other.op: other.configs[0] for other in requests[number + 1 :]}
            with autotune.forced({**later, **request.forced}):  # else a route chosen earlier might bypass this kernel
                for config in request.configs:
                    name, trials = autotune.describe(config), entry["trials"]
                    if not (is_known := name in trials):
                        trials[name] = _try(case, request, config, device)
                        entry.pop("gain", None)
                        entry["config"] = asdict(_winner(request.configs, trials))
                        autotune.write_entries(file, machine, {request.key: entry})
                    is_default = config == request.configs[0]
                    on_trial(Trial(case.name, request.key, config, is_default, trials[name], is_known))
                    if time.monotonic() > until:
                        return None
                _confirm(case, request, entry, device)
            autotune.write_entries(file, machine, {request.key: entry})
    return entries


def requests_of(case: Case) -> list[Request]:
    """Returns a case's requests for configurations, on every route that it can take; runs the case once per route."""
    requests = _requested(case)
    for choice in list(requests.values()):
        if "ROUTE" in choice.configs[0].constants:
            for config in choice.configs:
                with suppress(Exception), autotune.forced({choice.op: config}):  # the route's own trial reports why
                    requests = _requested(case) | requests
    # Last request first, so that a choice between kernels is tuned after the kernels.
    return [request for request in reversed(requests.values()) if len(request.configs) > 1]


def _requested(case: Case) -> dict[str, Request]:
    with autotune.requests() as requests, torch.no_grad():
        case.run(*case.make(0))
    return requests


def _try(case: Case, request: Request, config: Config, device: torch.device) -> dict[str, Any]:
    try:
        with autotune.forced({request.op: config}):
            wrong = case.check(seed=1)
            if wrong is not None:
                return {"error": f"wrong: {wrong}"}
            timing = measure({"it": _calls(case, device)}, device, SECONDS)["it"]
    except Exception as error:  # too much shared memory, or a compiler error: Triton raises many kinds
        return {"error": f"does not run: {type(error).__name__}: {str(error).splitlines()[:1]}"[:200]}
    report = timing.report()
    del report["samples_us"]
    p50 = timing.quantile(0.5)
    return {**report, "gb_s": round(case.bytes / p50 / 1e9, 1), "tflop_s": round(case.flops / p50 / 1e12, 2)}


def _calls(case: Case, device: torch.device) -> list[Callable[[], object]]:
    seeds = range(sets_of_inputs(device, case.bytes))
    return [torch.no_grad()(partial(case.run, *case.make(seed))) for seed in seeds]


def _winner(configs: Sequence[Config], trials: Mapping[str, Any]) -> Config:
    """Returns the fastest correct configuration; the default if none was correct."""
    timed = [config for config in configs if "p50_us" in trials.get(autotune.describe(config), {})]
    return min(timed, key=lambda config: trials[autotune.describe(config)]["p50_us"], default=configs[0])


def _confirm(case: Case, request: Request, entry: dict[str, Any], device: torch.device) -> None:
    """Keeps the default unless the winner is faster in one interleaved run: between separate runs the clocks drift."""
    default, winner = request.configs[0], _winner(request.configs, entry["trials"])
    if winner == default or "error" in entry["trials"][autotune.describe(default)] or "gain" in entry:
        return

    def run(config: Config, call: Callable[[], object]) -> object:
        with autotune.forced({request.op: config}):
            return call()

    calls, configs = _calls(case, device), {"default": default, "winner": winner}
    runs = {name: [partial(run, config, call) for call in calls] for name, config in configs.items()}
    times = measure(runs, device, 2 * SECONDS)
    gain = times["default"].quantile(0.5) / times["winner"].quantile(0.5)
    entry["gain"] = round(gain, 4)
    entry["config"] = asdict(winner if gain > 1 else default)
