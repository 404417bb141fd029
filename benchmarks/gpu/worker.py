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
from benchmarks.gpu.plan import CEILINGS, ROWS, Row
from permtriton.kernels import autotune
from permtriton.kernels.tools import timing

FUNCTIONS: dict[str, Callable[[Bench], None]] = {  # row of the plan -> what measures it
    "cusparselt": models.semi_structured,
    "sparse_linear": models.decode,
    "nm_mask": kernels.masks,
    "permute": kernels.permute,
    "norm": kernels.norm,
    "sinkhorn": kernels.sinkhorn,
    "assignment": kernels.assignment,
    "swap_gains": kernels.swaps,
    "learning_step": models.learning_step,
    "prefill": models.prefill,
    "inference": models.inference,
}
OVERRUN = 2  # a row is cut off after this many times the seconds set for it
AGAIN = 3  # exit code: this process cannot measure any more, the next rows need another


def main(arguments: Sequence[str]) -> int:
    """Runs rows.

    Args:
        arguments: the result file, the deadline, "tune" or "no-tune", the rows' names.

    Returns:
        The exit code: 0 where every row had its turn.
    """
    file, deadline, tune, *names = arguments
    bench = Bench(Path(file), float(deadline))
    autotune.use_beside(bench.file.parent)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if bench.result["ceilings"] is None and set(names) - {"cusparselt"}:
        _watch(bench, CEILINGS.limit)
        _ceilings(bench)
    for name in names:
        if not _run(bench, ROWS[name], tune == "tune"):
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


def _run(bench: Bench, row: Row, tune: bool) -> bool:
    """Measures a row if the time allows; returns whether this process can measure another one."""
    needed = row.limit + (row.tuning if tune else 0)
    if bench.seconds_left < bench.pick(needed, 0.0):
        bench.group = row.name
        bench.leave_out(row.name, f"{max(bench.seconds_left, 0):.0f} s were left, it may need {needed:.0f}")
        return True
    _watch(bench, OVERRUN * needed)
    bench.start(row.name, tune)
    started, outcome = time.perf_counter(), "done"
    try:
        FUNCTIONS[row.name](bench)
    except Exception as error:  # a failing row must not cost the others
        outcome = bench.leave_out(row.name, error)
    took = time.perf_counter() - started
    bench.end(took)
    usable = _cleared(bench)
    print(f"{row.name}: {outcome}, {took:.0f} s, {bench.seconds_left:.0f} s left", flush=True)
    return usable


def _watch(bench: Bench, seconds: float) -> None:
    """Ends this process with a traceback unless called again within the time; works without the GIL."""
    limit = max(min(seconds, bench.seconds_left), 0.1)
    faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)


def _cleared(bench: Bench) -> bool:
    """Frees what a row held; returns whether the GPU still works: not after an illegal access.

    Before torch 2.12 its random generator may not work either, after a graph capture that failed.
    """
    gc.collect()
    if bench.device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.rand(1, device=bench.device)
    except RuntimeError as error:
        print(f"this process can measure no more: {error}", flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
