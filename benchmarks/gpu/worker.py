"""Runs rows, one after another, in a process of its own, which only ``python -m benchmarks.gpu`` starts.

After an illegal access every further CUDA call of a process fails, and a kernel that hangs never returns. Either ends
this process and costs one row: the rows after it run in another process.
"""

import faulthandler
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

from benchmarks.gpu import kernels, models
from benchmarks.gpu.bench import Bench
from permtriton.kernels.tools import timing

ROWS: tuple[tuple[str, float, Callable[[Bench], None]], ...] = (  # name, most seconds that it may need, function
    ("sparse_linear", 30, models.decode),
    ("assignment", 25, kernels.assignment),
    ("sinkhorn", 60, kernels.sinkhorn),
    ("nm_mask", 15, kernels.masks),
    ("swap_gains", 15, kernels.swaps),
    ("permute", 60, kernels.permute),
    ("norm", 15, kernels.norm),
    ("learning_step", 100, models.learning_step),
    ("prefill", 30, models.prefill),
    ("inference", 50, models.inference),
)
OVERRUN = 2  # a row is cut off after this many times the seconds set for it
AGAIN = 3  # exit code: this process cannot measure any more, the next rows need another


def main(arguments: Sequence[str]) -> int:
    """Runs rows.

    Args:
        arguments: the result file, the deadline, the rows' names.

    Returns:
        The exit code: 0 where every row had its turn.
    """
    file, deadline, *names = arguments
    bench = Bench(Path(file), float(deadline))
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if bench.result["ceilings"] is None:
        _watch(bench, 30)
        _ceilings(bench)
    for name, seconds, row in ROWS:
        if name in names and not _run(bench, name, seconds, row):
            return AGAIN
    faulthandler.cancel_dump_traceback_later()
    return 0


def _ceilings(bench: Bench) -> None:
    limits = timing.ceilings(bench.device, bench.rehearse)
    bench.result["ceilings"] = {
        "copy_gb_s": limits.copy_gb_s, "matmul_tflop_s": limits.matmul_tflop_s,
        "copy": limits.copy.report(), "matmul": limits.matmul.report(),
    }  # fmt: skip
    bench.write()


def _run(bench: Bench, name: str, seconds: float, row: Callable[[Bench], None]) -> bool:
    """Runs a row if the time allows; returns whether this process can run another one."""
    if bench.seconds_left < bench.pick(seconds, 0.0):
        bench.leave_out(name, f"{max(bench.seconds_left, 0):.0f} s were left, it may need {seconds:.0f}")
        return True
    bench.result["row_seconds"][name] = None  # stays None if the row ends the process
    bench.write()
    _watch(bench, OVERRUN * seconds)
    started, outcome = time.perf_counter(), "done"
    try:
        row(bench)
    except Exception as error:  # a failing row must not cost the others
        outcome = bench.leave_out(name, error)
    usable = _cleared(bench)
    bench.result["row_seconds"][name] = took = round(time.perf_counter() - started, 1)
    bench.write()
    print(f"{name}: {outcome}, {took:.0f} s, {bench.seconds_left:.0f} s left", flush=True)
    return usable


def _watch(bench: Bench, seconds: float) -> None:
    """Ends this process with a traceback unless called again within the time; works without the GIL."""
    limit = max(min(seconds, bench.seconds_left), 0.1)
    faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)


def _cleared(bench: Bench) -> bool:
    """Frees what a row held; returns whether the GPU still works: not after an illegal access.

    Neither does torch's allocator after a graph capture that failed, before torch 2.12: nothing is captured after it.
    """
    gc.collect()
    if bench.device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print(f"this process can measure no more: {error}", flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
