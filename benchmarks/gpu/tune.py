"""The row that tunes: configurations and routes of what the other rows measure, the most valuable first."""

import time
from contextlib import suppress

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels import BLOCKS_7B
from benchmarks.gpu.table import FEW, LAYER_8B, MORE
from permtriton.kernels import autotune
from permtriton.kernels.launch import Config
from permtriton.kernels.tools import tuning
from permtriton.kernels.tools.case import Case
from permtriton.kernels.tools.cases import (
    assignment_case,
    nm_mask_case,
    norm_permute_case,
    permute_case,
    sinkhorn_backward_case,
    sinkhorn_case,
    sparse_linear_case,
    sparse_linear_fp8_case,
)


def tune(bench: Bench) -> None:
    """Tunes until the row's time is up; what an earlier run measured is not measured again."""
    cases = by_value(bench)
    if bench.settings.ahead:
        number, parts = bench.settings.part
        for case in cases[number::parts]:
            run_every_configuration(case, bench.device)
        return
    if bench.device.type != "cuda":
        bench.find("tuning", f"{len(cases)} cases; there is nothing to tune on a CPU")
        return
    machine, file, until = autotune.machine_key(), autotune.cache_file(), time.monotonic() + bench.left
    ended = not any(time.monotonic() > until for _ in tuning.tune(cases, bench.device, machine, file))
    entries = autotune.read_entries(file, machine)
    better = {key: entry for key, entry in entries.items() if entry.get("gain", 0) > 1}
    found = f"{len(entries)} choices measured, {len(better)} of them faster than the default"
    bench.find("tuning", found + "; the time was up before the last one" * (not ended))
    for key, entry in better.items():
        said = f"{entry['gain']:.2f} times the default's speed, {autotune.describe(Config(**entry['config']))}"
        bench.find(f"tuned: {key}", said, trials=entry["trials"])


def by_value(bench: Bench) -> list[Case]:
    """Returns what is tuned: decoding first, then prefill, what lies between, and the kernels of learning."""
    dtype = bench.dtype
    shapes, size = bench.pick((list(LAYER_8B), (11008, 4096)), ([(64, 128)], (96, 128)))
    tokens = bench.pick((*FEW, 4096, 8192, *MORE), (1, 16))
    rows, blocks = bench.pick(((16384, 4096), (BLOCKS_7B, 64)), ((8, 256), (4, 16)))
    return [
        *(sparse_linear_case(count, *shape, dtype) for count in tokens for shape in shapes),
        *(sparse_linear_fp8_case(count, *shape, dtype) for count in tokens for shape in shapes),
        nm_mask_case(*size, dtype),
        sinkhorn_backward_case(*blocks), sinkhorn_case(*blocks), assignment_case(*blocks),
        norm_permute_case(*rows, dtype), permute_case(*rows, dtype),
    ]  # fmt: skip


def run_every_configuration(case: Case, device: torch.device) -> None:
    """Runs a case in each configuration that tuning will try, so that all of them are compiled."""
    for request in tuning.requests_of(case, device):
        for config in request.configs:
            with suppress(Exception), torch.no_grad(), autotune.forced({**request.forced, request.op: config}):
                case.run(*case.make(device))
