"""Runs the GPU tests, then every row of the performance table, the most important ones first, within the time given.

    python -m benchmarks.gpu --out DIR [--minutes 9] [--only ROW ...]
    python -m benchmarks.gpu --out DIR --rehearse       the same code on tiny shapes and the CPU: numbers mean little

Run it in the repository's root. Needs torch, triton, transformers, scipy, typer, rich, numpy and safetensors, and
permtriton installed from this checkout: pip install --no-deps --no-build-isolation -e .
Uses pytest, pytest-xdist and torch-linear-assignment if they are installed.

Writes one JSON file into DIR and replaces it after each result, so that a run that is cut off keeps its results. Ends
when the time is up, whatever is running. Exit code 0: everything ran, whether or not the goals are met; 1: something
was wrong or did not run; 2: there is no GPU, or the arguments make no sense.
"""

import argparse
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.bench import ROOT, Bench, without_folders
from benchmarks.gpu.table import print_table
from benchmarks.gpu.worker import ROWS
from permtriton.kernels.launch import triton

TESTS = 0.28  # largest share of the time for the GPU tests
GRACE = 5  # seconds that a worker has to end itself when the time is up
CUT_OFF = "cut off: the time was up, or it took twice the time set for it"
WORKER = (sys.executable, "-m", "benchmarks.gpu.worker")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name, _, _ in ROWS]
    parser.add_argument("--out", type=Path, required=True, help="folder for the result file")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which it ends")
    parser.add_argument("--only", action="append", choices=names, help="this row and no tests; repeat for more rows")
    parser.add_argument("--no-tests", action="store_true", help="leave the GPU tests out")
    parser.add_argument("--commit", help="of this checkout, where git is not there to ask")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    args = parser.parse_args(arguments)
    if not 0 < args.minutes < math.inf:
        parser.error(f"--minutes {args.minutes:g}: expected a number above 0, such as 9")
    if why := None if args.rehearse else _no_gpu():
        print(f"error: {why}; --rehearse runs the same code on the CPU", file=sys.stderr)
        return 2
    try:
        bench = Bench.begin(args.out, args.minutes, args.rehearse, _command(args), args.commit)
    except OSError as error:
        parser.error(f"--out {args.out}: results cannot be written there: {error.strerror}")
    print(f"results: {bench.file}", flush=True)
    if not (args.no_tests or args.only or args.rehearse):
        _tests(bench, 60 * args.minutes * TESTS)
    _rows(bench, [name for name in names if args.only is None or name in args.only])
    bench.result["finished"] = True
    bench.write()
    print_table(bench.result)
    print(f"results: {bench.file}")
    return int(bool(bench.result["left_out"]) or (bench.result["tests"] or {}).get("code", 0) != 0)


def _no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "this measures a CUDA GPU, and torch can use none here"
    if triton is None:
        return "triton is not installed: without it there are no kernels to measure"
    return None


def _command(args: argparse.Namespace) -> str:
    """Returns the command for the result file, without folders of this machine."""
    words = ["python -m benchmarks.gpu --out DIR", f"--minutes {args.minutes:g}"]
    words += [f"--only {row}" for row in args.only or ()]
    return " ".join(words + ["--no-tests"] * args.no_tests + ["--rehearse"] * args.rehearse)


def _rows(bench: Bench, names: list[str]) -> None:
    """Runs rows in a worker process; if a row ends it, the rows after it run in another one."""
    while names and bench.seconds_left > 0:
        code = _work(bench, names)
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


def _work(bench: Bench, names: list[str]) -> int:
    """Returns a worker's exit code. Workers end themselves in time, unless even that hangs."""
    try:
        limit = bench.seconds_left + GRACE
        command = [*WORKER, str(bench.file.resolve()), repr(bench.deadline), *names]
        return subprocess.run(command, cwd=ROOT, timeout=limit, check=False).returncode
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


def _tests(bench: Bench, seconds: float) -> None:
    """Runs tests/gpu in separate processes; rows also check their own results."""
    if importlib.util.find_spec("pytest") is None:
        bench.result["tests"] = {"code": 0, "summary": "not run: pytest is not installed"}
        return
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "gpu"), "-vv", "--tb=short", "--no-header"]
    command += ["-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") is not None:  # most of the time goes into compiling kernels, on the host
        command += ["-n", str(min(max((os.cpu_count() or 1) // 2, 1), 8))]
    started = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its workers too: they would disturb the timing
            output = f"{process.communicate()[0]}\ncut off after {seconds:.0f} s"
    output = without_folders(output)
    bench.result["tests"] = {
        "code": process.returncode, "seconds": round(time.perf_counter() - started, 1),
        "summary": (output.strip() or "no output").splitlines()[-1].strip("= "), "output": output[-20000:],
    }  # fmt: skip
    bench.write()
    print(f"GPU tests: exit code {process.returncode}\n{output[-1500:]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
