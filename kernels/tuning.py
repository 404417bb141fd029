"""Tries the configurations of the kernels on the present GPU and keeps the fastest that is right.

A launcher tells which table it reads for a call (`permtriton.kernels.autotune.requests`), so that nothing here knows
how a kernel is launched. Every trial is written to the cache file as it ends: an interrupted run goes on after it.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from permtriton.errors import ConfigError
from permtriton.kernels import autotune, cases
from permtriton.kernels.autotune import Request
from permtriton.kernels.cases import Case
from permtriton.kernels.compile_check import kernel_modules
from permtriton.kernels.launch import Config
from permtriton.kernels.timing import measure, sets_of_inputs

KERNELS = ("permute", "norm_permute", "sinkhorn", "assignment", "nm_mask", "packing", "sparse_linear")
SECONDS = 0.5  # spent on timing one configuration
LARGEST = 1 << 24  # features of a linear


@dataclass(frozen=True)
class Trial:
    """How one configuration did.

    Attributes:
        case: what was run.
        key: of the table and shape, as in the cache file.
        config: as people read it.
        default: whether it is the first of its table.
        told: quantiles in microseconds, GB/s and TFLOP/s; or ``error``.
        known: whether an earlier run did it.
    """

    case: str
    key: str
    config: str
    default: bool
    told: Mapping[str, Any]
    known: bool


def cases_for(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    kernel: str | None = None,
) -> list[Case]:
    """Returns what is tuned for linears of these shapes.

    Args:
        shapes: (out, in) features of each.
        tokens: at once.
        dtype: of weights and activations.
        device: the GPU.
        kernel: only this one of `KERNELS`.

    Raises:
        ConfigError: an unknown kernel, or a shape that 2:4 does not fit.
    """
    if kernel not in (None, *KERNELS):
        raise ConfigError(f"kernel {kernel!r} is unknown: choose one of {', '.join(KERNELS)}")
    for out_features, in_features in shapes:
        if in_features % 4:
            raise ConfigError(f"shape {out_features}x{in_features}: expected input features that are a multiple of 4")
        if out_features < 4 or max(out_features, in_features) > LARGEST:
            raise ConfigError(f"shape {out_features}x{in_features}: expected 4 to {LARGEST} features")
    blocks = sum(max(in_features // cases.BLOCK, 1) for _, in_features in shapes)
    makers: dict[str, Callable[[], list[Case]]] = {
        "permute": lambda: [cases.permute_case(t, c, dtype, device) for t in tokens for _, c in shapes],
        "norm_permute": lambda: [make(t, c, dtype, device) for t in tokens for _, c in shapes
                                 for make in (cases.norm_permute_case, cases.norm_permute_backward_case)],
        "sinkhorn": lambda: [make(blocks, cases.BLOCK, device)
                             for make in (cases.sinkhorn_case, cases.sinkhorn_backward_case)],
        "assignment": lambda: [cases.assignment_case(blocks, cases.BLOCK, device)],
        "nm_mask": lambda: [make(o, c, dtype, device)
                            for o, c in shapes for make in (cases.nm_mask_case, cases.nm_mask_backward_case)],
        "packing": lambda: [cases.unpack_case(o, c, dtype, device) for o, c in shapes],
        "sparse_linear": lambda: [cases.sparse_linear_case(t, o, c, dtype, device) for t in tokens for o, c in shapes],
    }  # fmt: skip
    made = [case for name in KERNELS if kernel in (None, name) for case in makers[name]()]
    return list({case.name: case for case in made}.values())


def tables() -> dict[str, tuple[Config, ...]]:
    """Returns every table of configurations by the name of its kernel: ``nm_mask``, ``nm_mask_backward``."""
    found = {}
    for module in kernel_modules():
        for name, value in vars(importlib.import_module(f"permtriton.kernels.{module}")).items():
            ours = isinstance(value, tuple) and value and all(isinstance(config, Config) for config in value)
            if ours and name.endswith("CONFIGS"):
                part = name.removesuffix("CONFIGS").rstrip("_").lower()
                found["_".join(filter(None, (module.removesuffix("_triton"), part)))] = value
    return found


def tables_of(case: Case) -> dict[str, tuple[Config, ...]]:
    """Returns the tables that a case reads on a GPU, without running it."""
    found = tables()
    return {name: found[name] for name in case.tables or (case.op.replace(" ", "_"),) if name in found}


def tune(
    todo: Sequence[Case],
    device: torch.device,
    machine: str,
    files: Sequence[Path],
    told: Callable[[Trial], None] | None = None,
) -> dict[str, Any]:
    """Tries every configuration of every table that the cases read; returns the entries of the cache file.

    Args:
        todo: see `cases_for`.
        device: to run on.
        machine: see `permtriton.kernels.autotune.machine_key`.
        files: where the entries are written; what the first already holds is not run again.
        told: called after each configuration.

    Raises:
        OutputError: a file cannot be written.
    """
    known, entries = autotune.read_entries(files[0], machine), {}
    for case in todo:
        requests = _requests(case)
        for number, request in enumerate(requests):
            if request.key in entries:
                continue
            entry = entries[request.key] = known.get(request.key, {"case": case.name, "trials": {}})
            with _defaults(requests[number + 1 :]):  # or an outer choice measured earlier might pass this kernel by
                for trial in _trials(case, request, entry, device):
                    if told is not None:
                        told(trial)
                    if not trial.known:
                        entry.pop("gain", None)
                        entry["config"] = autotune.stored(_winner(request.configs, entry["trials"]))
                        autotune.write_entries(files[0], machine, {request.key: entry})
                _confirm(case, request, entry, device)
            for file in files:
                autotune.write_entries(file, machine, {request.key: entry})
    return entries


@contextmanager
def _defaults(requests: Sequence[Request]) -> Iterator[None]:
    """Makes launches use the default of each of these tables for a while."""
    with ExitStack() as stack:
        for request in requests:
            stack.enter_context(autotune.forced(request.op, request.configs[0]))
        yield


def _requests(case: Case) -> list[Request]:
    with autotune.requests() as asked, torch.no_grad():
        case.run(*case.make(0))
    # Last asked first: a choice between kernels is made when each of them is tuned.
    return [request for request in reversed(asked) if len(request.configs) > 1]


def _trials(case: Case, request: Request, entry: dict[str, Any], device: torch.device) -> Iterator[Trial]:
    for config in request.configs:
        name = autotune.describe(config)
        known = name in entry["trials"]
        if not known:
            entry["trials"][name] = _try(case, request, config, device)
        default = config == request.configs[0]
        yield Trial(case.name, request.key, name, default, entry["trials"][name], known)


def _try(case: Case, request: Request, config: Config, device: torch.device) -> dict[str, Any]:
    """Checks one configuration, then times it."""
    try:
        with autotune.forced(request.op, config):
            wrong = case.check(seed=1)
            if wrong is not None:
                return {"error": f"wrong: {wrong}"}
            timing = measure({"it": _calls(case, device)}, device, SECONDS)["it"]
    except Exception as error:  # too much shared memory, or what the compiler refuses: Triton raises many kinds
        return {"error": f"does not run: {type(error).__name__}: {str(error).splitlines()[:1]}"[:200]}
    told = timing.report()
    del told["samples_us"]
    p50 = timing.quantile(0.5)
    return {**told, "gb_s": round(case.bytes / p50 / 1e9, 1), "tflop_s": round(case.flops / p50 / 1e12, 2)}


def _calls(case: Case, device: torch.device) -> list[Callable[[], object]]:
    inputs = [case.make(seed) for seed in range(sets_of_inputs(device, case.bytes))]

    def run(number: int) -> object:
        with torch.no_grad():
            return case.run(*inputs[number])

    return [lambda number=number: run(number) for number in range(len(inputs))]  # type: ignore[misc]


def _winner(configs: Sequence[Config], trials: Mapping[str, Any]) -> Config:
    """Returns the fastest configuration of those that were right; the default where none was."""
    timed = [config for config in configs if "p50_us" in trials.get(autotune.describe(config), {})]
    return min(timed, key=lambda config: trials[autotune.describe(config)]["p50_us"], default=configs[0])


def _confirm(case: Case, request: Request, entry: dict[str, Any], device: torch.device) -> None:
    """Keeps the default unless the winner is faster side by side: apart, a drift of the clocks can decide."""
    default, winner = request.configs[0], _winner(request.configs, entry["trials"])
    if winner == default or "error" in entry["trials"][autotune.describe(default)] or "gain" in entry:
        return
    calls = _calls(case, device)

    def with_config(config: Config, call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with autotune.forced(request.op, config):
                return call()

        return run

    runs = {name: [with_config(config, call) for call in calls] for name, config in
            (("default", default), ("winner", winner))}  # fmt: skip
    times = measure(runs, device, 2 * SECONDS)
    gain = times["default"].quantile(0.5) / times["winner"].quantile(0.5)
    entry["gain"] = round(gain, 4)
    entry["config"] = autotune.stored(winner if gain > 1 else default)
