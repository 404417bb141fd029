"""Measures permtriton on a GPU, in calls that fit ten minutes each: checks, kernels, models.

    python -m benchmarks.gpu --plan                      the commands, with the minutes that each should take
    python -m benchmarks.gpu --out FILE                  everything
    python -m benchmarks.gpu --out FILE --only kernels   one call, or one row such as permute; repeat for more
    python -m benchmarks.gpu --out FILE --tiny           the same code on tiny sizes and the CPU: times mean nothing

Run it in the repository's root, with permtriton installed from this checkout. It uses pytest, pytest-xdist,
compute-sanitizer, nvcc and torch-linear-assignment where they are installed.

Rows are added to FILE, where each takes the place of its earlier result, so that several calls fill one file. Each is
measured in a process of its own and written after each result: one that crashes or hangs costs nothing but itself.
Exit code 0: everything ran, whether or not goals are met; 1: something was wrong or did not run; 2: there is no GPU.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from benchmarks.gpu import checks, kernels, models, table
from benchmarks.gpu.bench import Bench, save
from benchmarks.gpu.table import CALLS, ROWS, read
from permtriton.kernels.launch import triton

MEASURES = {
    **checks.ROWS, "cusparselt": models.semi_structured, "sparse_linear": models.decode, "nm_mask": kernels.masks,
    "permute": kernels.permute, "norm": kernels.norm, "sinkhorn": kernels.sinkhorn, "assignment": kernels.assignment,
    "swap_gains": kernels.swaps, "prefill": models.prefill, "learning_step": models.learning_step,
    "compile": models.compilation, "inference": models.inference,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", action="store_true", help="print the calls and their durations; run nothing")
    parser.add_argument("--out", type=Path, help="result file, such as benchmarks/results/gpu.json")
    parser.add_argument("--only", action="append", choices=[*CALLS, *ROWS], help="this call or row; repeat for more")
    parser.add_argument("--commit", help="of this checkout, where git is not there to ask")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process, and no table
    args = parser.parse_args(arguments)
    if args.plan:
        print(table.plan(str(args.out or table.OUT)))
        return 0
    if args.out is None:
        parser.error("--out FILE is missing: the result file")
    if not args.tiny and (triton is None or not torch.cuda.is_available()):
        print("error: this measures a CUDA GPU with triton, and there is none; --tiny runs the same code on the CPU",
              file=sys.stderr)  # fmt: skip
        return 2
    names = [name for name, row in ROWS.items() if not args.only or {name, row.call} & set(args.only)]
    for name in names:
        if args.tiny or args.here:
            run(args.out, name, args.tiny, args.commit)
        else:
            _apart(args.out, name, args.commit)
    rows = read(args.out)
    if not args.here:
        print(table.markdown(rows))
    return int(any(rows[name]["failures"] or any(found["good"] is False for found in rows[name]["findings"])
                   for name in names))  # fmt: skip


def run(file: Path, name: str, tiny: bool, commit: str | None = None) -> None:
    """Measures a row in this process."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bench, started = Bench(file, name, tiny, commit), time.perf_counter()
    try:
        MEASURES[name](bench)
    except Exception as error:  # a failing row must not cost the others
        bench.fail(name, error)
    bench.record |= {"seconds": round(time.perf_counter() - started, 1), "after": bench.state()}
    bench.write()


def _apart(file: Path, name: str, commit: str | None) -> None:
    """Measures a row in a process of its own, and records where that one is cut off or dies."""
    print(f"{name}: {ROWS[name].seconds} s expected", flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(file.resolve()), "--only", name, "--here"]
    command += ["--commit", commit] if commit else []
    before = read(file).get(name)
    ran = checks.process(command, ROWS[name].limit)
    rows = read(file)
    if rows.get(name) in (None, before):
        sys.exit(f"{name}: its process could not begin:\n{ran.output[-2000:]}")
    print(ran.output, end="", flush=True)
    if rows[name]["seconds"] is None:
        ending = f"cut off after {ran.seconds:.0f} s" if ran.code is None else f"its process died, exit code {ran.code}"
        rows[name]["failures"].append({"what": name, "why": ending})
        save(file, rows)


if __name__ == "__main__":
    sys.exit(main())
