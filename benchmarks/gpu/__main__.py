"""Runs the GPU tests, then every row of the performance table, the most important ones first, within the time given.

    python -m benchmarks.gpu --out DIR [--minutes 9] [--only ROW ...]
    python -m benchmarks.gpu --out DIR --rehearse       tiny shapes on the CPU: the same code, no number that means much

Needs torch, triton, transformers, scipy, typer, rich, numpy and safetensors, and permtriton installed from this
checkout: pip install --no-deps --no-build-isolation -e .

Writes one JSON file into DIR, anew after each result, so that a run that is cut off counts as far as it came. Exit code
0: it ran through, whatever the goals say; 1: something was wrong or did not run; 2: there is no GPU to run on.
"""

import argparse
import gc
import importlib.util
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

from benchmarks.gpu import kernels, models
from benchmarks.gpu.bench import ROOT, Bench
from benchmarks.gpu.table import print_table
from permtriton.kernels import timing
from permtriton.kernels.launch import triton

ROWS: tuple[tuple[str, float, Callable[[Bench], None]], ...] = (  # name, seconds that it may need, function
    ("sparse_linear", 30, models.decode),
    ("assignment", 25, kernels.assignment),
    ("sinkhorn", 60, kernels.sinkhorn),
    ("nm_mask", 15, kernels.masks),
    ("permute", 75, kernels.permute),
    ("norm", 15, kernels.norm),
    ("learning_step", 120, models.learning_step),
    ("prefill", 30, models.prefill),
    ("inference", 60, models.inference),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the result file")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no further row is started")
    parser.add_argument("--only", action="append", choices=[name for name, _, _ in ROWS], help="repeat for more rows")
    parser.add_argument("--no-tests", action="store_true", help="leave the GPU tests out")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    args = parser.parse_args(arguments)
    if why := None if args.rehearse else _no_gpu():
        print(f"error: {why}; --rehearse runs the same code on the CPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bench = Bench(args.out, args.minutes, args.rehearse)
    print(f"results: {bench.file}", flush=True)
    if not args.no_tests and not args.rehearse:
        _tests(bench, 60 * args.minutes * 0.15)
    limits = bench.ceilings = timing.ceilings(bench.device, args.rehearse)
    bench.result["ceilings"] = {
        "copy_gb_s": limits.copy_gb_s, "matmul_tflop_s": limits.matmul_tflop_s,
        "copy": limits.copy.report(), "matmul": limits.matmul.report(),
    }  # fmt: skip
    bench.write()
    for name, seconds, row in ROWS:
        if args.only is None or name in args.only:
            _run(bench, name, seconds, row)
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


def _run(bench: Bench, name: str, seconds: float, row: Callable[[Bench], None]) -> None:
    if bench.seconds_left < bench.pick(seconds, 0.0):
        why = f"{max(bench.seconds_left, 0):.0f} s were left, it may need {seconds:.0f}"
        bench.result["left_out"].append({"row": name, "why": why})
        bench.write()
        return
    started = time.perf_counter()
    try:
        row(bench)
        told = "done"
    except Exception as error:  # one row that fails must not cost the others
        told = f"{type(error).__name__}: {error}"
        bench.result["left_out"].append({"row": name, "why": told, "traceback": traceback.format_exc()})
        bench.write()
    print(f"{name}: {told}, {time.perf_counter() - started:.0f} s, {bench.seconds_left:.0f} s left", flush=True)
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def _tests(bench: Bench, seconds: float) -> None:
    """Runs tests/gpu in a process of its own; each row checks its own results besides."""
    if importlib.util.find_spec("pytest") is None:
        bench.result["tests"] = {"code": 0, "told": "not run: pytest is not installed"}
        return
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(ROOT / "tests" / "gpu"),
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
    ]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
        told, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        cut = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        told, code = f"{cut}\ncut off after {seconds:.0f} s", 124
    bench.result["tests"] = {"code": code, "seconds": time.perf_counter() - started, "told": told[-4000:]}
    bench.write()
    print(f"GPU tests: exit code {code}\n{told[-1500:]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
