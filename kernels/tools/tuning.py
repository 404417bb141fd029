"""Tries the kernels' configurations on the present GPU and keeps the fastest correct one.

Launchers report which table they read for a call (`permtriton.kernels.autotune.requests`), so nothing here depends on
how a kernel is launched. Every trial is written to the cache file as it ends: an interrupted run continues from there.
"""

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
from permtriton.kernels.tools.timing import measure, sets_of_inputs

SECONDS = 0.5  # spent on timing one configuration


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
            timing = measure({"it": _calls(case, device)}, device, SECONDS)["it"]
    except Exception as error:  # too much shared memory, or a compiler error: Triton raises many kinds
        return {"error": f"does not run: {type(error).__name__}: {str(error).splitlines()[:1]}"[:200]}
    report, p50 = timing.report(), timing.quantile(0.5)
    del report["samples_us"]
    return {**report, "gb_s": round(case.bytes / p50 / 1e9, 1), "tflop_s": round(case.flops / p50 / 1e12, 2)}


def _calls(case: Case, device: torch.device) -> list[Callable[[], object]]:
    seeds = range(sets_of_inputs(device, case.bytes))
    return [torch.no_grad()(partial(case.run, *case.make(device, seed))) for seed in seeds]


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
        with autotune.forced({**request.forced, request.op: config}):
            return call()

    calls, configs = _calls(case, device), {"default": default, "winner": winner}
    runs = {name: [partial(run, config, call) for call in calls] for name, config in configs.items()}
    times = measure(runs, device, 2 * SECONDS)
    gain = times["default"].quantile(0.5) / times["winner"].quantile(0.5)
    entry["gain"] = round(gain, 4)
    entry["config"] = asdict(winner if gain > 1 else default)
