"""Measures permtriton on a GPU in three calls that fit ten minutes each: checks, kernels, models.

    python -m benchmarks.gpu --plan                 the commands, with the minutes that each should take; runs nothing
    python -m benchmarks.gpu --out DIR --call NAME [--tune]         one call; without --call, all of it at once
    python -m benchmarks.gpu --out DIR --merge      one file of the results in DIR; needs no GPU
    python -m benchmarks.gpu --out DIR --only ROW [--only ROW]      single rows again
    python -m benchmarks.gpu --out DIR --rehearse   the same code on tiny shapes and the CPU: numbers mean little

Run it in the repository's root. Needs torch, triton, transformers, scipy, typer, rich, numpy and safetensors, and
permtriton installed from this checkout: pip install --no-deps --no-build-isolation -e .
Uses pytest, pytest-xdist, compute-sanitizer and torch-linear-assignment if they are installed.

Each call writes a JSON file of its own into DIR and replaces it after each result, so that a call that is cut off keeps
its results. It ends when its time is up, whatever is running. Exit code 0: everything ran, whether or not the goals are
met; 1: something was wrong or did not run; 2: there is no GPU, or the arguments make no sense.
"""

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import plan
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.merge import merge, merge_folder
from benchmarks.gpu.table import print_table
from permtriton.kernels.launch import triton

GRACE = 5  # seconds that a worker has to end itself when the time is up
CUT_OFF = "cut off: the time was up, or it took twice the time set for it"
WORKER = (sys.executable, "-m", "benchmarks.gpu.worker")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.plan:
        print(plan.printed(str(args.out or plan.OUT)))
        return 0
    if args.out is None:
        parser.error("--out DIR is missing: the folder for the result files")
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        parser.error(f"--minutes {args.minutes:g}: expected a number above 0, such as 9")
    if args.merge:
        return _merged(args.out, args.rehearse)
    if why := None if args.rehearse else _no_gpu():
        print(f"error: {why}; --rehearse runs the same code on the CPU", file=sys.stderr)
        return 2
    call = plan.selected(args.call, args.only, args.minutes)
    try:
        bench = Bench.begin(args.out, call, args.rehearse, _command(args, call), args.commit)
    except OSError as error:
        parser.error(f"--out {args.out}: results cannot be written there: {error.strerror}")
    _run(bench, call, args.tune)
    print_table(merge([bench.result]))
    print(f"results: {bench.file}")
    return int(_failed(bench.result))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the result files")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plan", action="store_true", help="print the calls and their durations; run nothing")
    what.add_argument("--call", choices=[call.name for call in plan.CALLS], help="without it, all calls run in turn")
    what.add_argument("--only", action="append", choices=list(plan.ROWS), help="this row alone; repeat for more rows")
    what.add_argument("--merge", action="store_true", help="make one file of the results in --out")
    parser.add_argument("--tune", action="store_true", help="tune a kernel's configurations before it is measured")
    parser.add_argument("--minutes", type=float, help="after which a call ends, instead of the plan's")
    parser.add_argument("--commit", help="of this checkout, where git is not there to ask")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    return parser


def _merged(folder: Path, rehearsal: bool) -> int:
    file = merge_folder(folder, rehearsal)
    if file is None:
        print(f"error: {folder} has no result file: --plan lists the calls that write them", file=sys.stderr)
        return 2
    print_table(json.loads(file.read_text(encoding="utf-8")))
    print(f"results: {file}")
    return 0


def _run(bench: Bench, call: plan.Call, tune: bool) -> None:
    """Runs the rows of a call, those that are processes of their own first."""
    print(f"{call.name}: at most {call.minutes:g} minutes; results: {bench.file}", flush=True)
    names = [row.name for row in call.rows if row.name in plan.ROWS]
    for name in [name for name in names if name in CHECKS]:
        _check(bench, plan.ROWS[name])
    _rows(bench, [name for name in names if name not in CHECKS], tune)
    bench.result["finished"] = True
    bench.write()


def _check(bench: Bench, row: plan.Row) -> None:
    """Runs a check that is a process of its own."""
    bench.start(row.name, False)
    started = time.perf_counter()
    CHECKS[row.name](bench, min(row.limit, bench.seconds_left))
    bench.end(time.perf_counter() - started)
    bench.group = ""


def _failed(result: Mapping[str, Any]) -> bool:
    return bool(result["left_out"]) or any(report["good"] is False for report in result["reports"])


def _no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "this measures a CUDA GPU, and torch can use none here"
    if triton is None:
        return "triton is not installed: without it there are no kernels to measure"
    return None


def _command(args: argparse.Namespace, call: plan.Call) -> str:
    """Returns the command for the result file, without folders of this machine."""
    which = [f"--only {row.name}" for row in call.rows] if args.only else []
    which += [f"--call {args.call}"] * bool(args.call)
    minutes = [f"--minutes {call.minutes:g}"] * (args.minutes is not None)
    options = ["--tune"] * args.tune + minutes + ["--rehearse"] * args.rehearse
    return " ".join([f"{plan.MODULE} --out DIR", *which, *options])


def _rows(bench: Bench, names: list[str], tune: bool = False) -> None:
    """Runs rows in a worker process; if a row ends it, the rows after it run in another one."""
    while names and bench.seconds_left > 0:
        code = _work(bench, names, tune)
        bench.read()
        if code == 0:
            return
        begun = [name for name in names if name in bench.result["row_seconds"]]
        if not begun:
            break
        if bench.result["row_seconds"][begun[-1]] is None:
            bench.leave_out(begun[-1], CUT_OFF if code == 1 else f"its process died of exit code {code}")
        names = names[names.index(begun[-1]) + 1 :]
    why = "its process could not begin" if bench.seconds_left > 0 else "no time was left"
    for name in names:
        bench.leave_out(name, why)


def _work(bench: Bench, names: list[str], tune: bool) -> int:
    """Returns a worker's exit code. Workers end themselves in time, unless even that hangs."""
    try:
        limit = bench.seconds_left + GRACE
        command = [*WORKER, str(bench.file.resolve()), repr(bench.deadline), "tune" if tune else "no-tune", *names]
        return subprocess.run(command, cwd=ROOT, timeout=limit, check=False).returncode
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


if __name__ == "__main__":
    sys.exit(main())
