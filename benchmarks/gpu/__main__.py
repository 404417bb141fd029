"""Measures permtriton on a GPU: rows, the most valuable first, in calls of less than ten minutes.

    python -m benchmarks.gpu --plan --minutes 15          all commands for a machine that is lent for so long
    python -m benchmarks.gpu --out FOLDER --only kernels  one row; repeat for more
    python -m benchmarks.gpu --out FOLDER                 everything
    python -m benchmarks.gpu --out FOLDER --tiny          the same code on tiny sizes and the CPU: times mean nothing

Run it in the repository's root, or in a copy of it: nothing has to be installed but torch, triton, transformers and
scipy. It uses pydantic (for the rows compile_*), pytest, pytest-xdist, ncu, compute-sanitizer, nvcc and
torch-linear-assignment where they are.

FOLDER holds all that is found: results.json, which begins with the repository's rows of earlier commits, table.md,
autotune.json (the fastest configurations), log.txt, and caches.tar.gz, the compiled kernels, which a later call
unpacks. Each row is measured in a process of its own, and each
result is written when it is there: a call that is cut off is continued by the same command, and a row that crashes
costs only itself. A row that came to its end on this commit is measured again only with --again.
Exit code 0: everything ran, whether or not goals are met; 1: something was wrong or did not run; 2: there is no GPU.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import transformers

from benchmarks.gpu import caches, checks, fp8, kernels, models, table
from benchmarks.gpu.bench import DEAD, Bench, Settings, commit, finished, save
from benchmarks.gpu.table import AHEAD_SECONDS, CALL_SECONDS, ROWS, read
from benchmarks.gpu.tune import tune
from permtriton.kernels import cusparselt
from permtriton.kernels.autotune import forced
from permtriton.kernels.launch import triton

MEASURED = Path(__file__).resolve().parents[1] / "results" / "gpu.json"
LEAST, ENOUGH = 25, 0.7  # seconds that a row needs to begin, and share of those that it is expected to take
PROCESSES = 4  # of a row at most, each of which goes on behind what left the one before without a GPU
MEASURES = {
    **checks.ROWS, "sparse_linear": models.few_tokens, "prefill": models.prefill, "decoding": models.decoding,
    "tune": tune, "sparse_linear_tuned": models.few_tokens, "prefill_tuned": models.prefill,
    "decoding_tuned": models.decoding, "learning_step": models.learning_step, "inference": models.inference,
    "compile_default": partial(models.compilation, recipe="default"),
    "compile_fast": partial(models.compilation, recipe="fast"), "compile_layers": models.compiled_layers,
    "sparse_linear_fp8": fp8.products, "quantize": fp8.activations,
    "paper": models.table_3, "merged": models.merged, "decoding_compiled": models.decoding_compiled,
    "kernels": kernels.every, "sinkhorn": kernels.sinkhorn, "assignment": kernels.assignment,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", action="store_true", help="print the commands and their durations; run nothing")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the results; what is there is added to")
    parser.add_argument("--minutes", type=float, default=15, help="of --plan: that the machine is lent (default 15)")
    parser.add_argument("--only", action="append", choices=list(ROWS), help="this row; repeat for more")
    parser.add_argument(
        "--seconds", type=float, help=f"for the call; {CALL_SECONDS} with --only, else as long as it takes"
    )
    parser.add_argument("--again", action="store_true", help="measure rows again that came to their end")
    parser.add_argument("--commit", help="of this checkout, where neither git nor the file COMMIT is there to ask")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process, and no table
    parser.add_argument("--ahead", help=argparse.SUPPRESS)  # K/N: only compile, the part K of N
    args = parser.parse_args(arguments)
    if args.plan:
        print(table.plan(args.minutes, str(args.out or table.OUT), commit()))
        return 0
    if args.out is None:
        parser.error("--out FOLDER is missing: the folder of the results")
    if not args.tiny and (triton is None or not torch.cuda.is_available()):
        print("error: this measures a CUDA GPU with triton, and there is none; --tiny runs the same code on the CPU",
              file=sys.stderr)  # fmt: skip
        return 2
    names = [name for name in ROWS if not args.only or name in args.only]
    settings = Settings(args.out.resolve(), args.tiny, args.commit)
    if args.here or args.ahead:
        part = tuple(map(int, args.ahead.split("/"))) if args.ahead else (0, 1)
        for name in names:
            run(name, Settings(settings.folder, args.tiny, args.commit, bool(args.ahead), part, args.seconds))  # type: ignore[arg-type]
    else:
        seconds = args.seconds or (CALL_SECONDS if args.only else float("inf"))
        call(names, settings, time.monotonic() + seconds, args.again)
    rows = read(settings.file)
    if not args.here and not args.ahead:
        page = table.markdown(rows)
        (settings.folder / "table.md").write_text(page + "\n", encoding="utf-8")
        print(page)
    wrong = (not _ended(rows.get(name)) or rows[name]["failures"] or
             any(found["good"] is False for found in rows[name]["findings"]) for name in names)  # fmt: skip
    return int(not args.ahead and any(wrong))


def _ended(row: object) -> bool:
    return isinstance(row, dict) and row["seconds"] is not None


def run(name: str, settings: Settings) -> None:
    """Measures a row in this process."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bench, started = Bench(name, settings), time.perf_counter()
    # What cuSPARSELt's own search finds is kept: no search beside other processes.
    quiet = forced({"cusparselt": cusparselt.CONFIGS[0]}) if settings.ahead else nullcontext()
    try:
        with quiet:
            MEASURES[name](bench)
    except Exception as error:  # a failing row must not cost the others
        bench.fail(name, error)
        bench.end_if_dead()
    bench.record |= {"seconds": round(time.perf_counter() - started, 1), "after": bench.state()}
    bench.write()


def call(names: Sequence[str], settings: Settings, until: float, again: bool) -> None:
    """Measures rows one after another, each in a process of its own, until the time is up."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    if not settings.tiny and not settings.file.is_file():
        save(settings.file, read(MEASURED))  # rows of earlier commits, each of which stays until it is measured again
    caches.unpack(settings.folder)
    before = {} if again else read(settings.file)
    todo = [name for name in names if not finished(before.get(name), settings)]
    if done := [name for name in names if name not in todo]:
        print(f"measured before: {', '.join(done)}", flush=True)
    if again:
        save(settings.file, {name: row for name, row in read(settings.file).items() if name not in names})
    compiled = False
    for name in todo:
        if ROWS[name].ahead and not compiled:
            _ahead([one for one in todo if ROWS[one].ahead], settings, until - time.monotonic())
            compiled = True
        for _ in range(PROCESSES):
            left = until - time.monotonic()
            if left < (LEAST if settings.tiny else max(LEAST, ENOUGH * ROWS[name].seconds)):
                print(f"{name}: not begun, the time is up: the same command goes on with it", flush=True)
                break
            died = _apart(name, settings, min(ROWS[name].limit, left - 5)) == DEAD
            caches.pack(settings.folder)
            if not died:
                break


def _command(name: str, settings: Settings, *more: str) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(settings.folder), "--only", name, *more]
    return command + ["--commit", settings.commit] * bool(settings.commit) + ["--tiny"] * settings.tiny


def _ahead(names: Sequence[str], settings: Settings, left: float) -> None:
    """Compiles what rows launch, in parallel: no row pays for it, and none is cut off for it."""
    limit = min(AHEAD_SECONDS, left - LEAST)
    if limit < LEAST:
        return
    several = 1 if settings.tiny else max((os.cpu_count() or 1) // 2, 1)
    parts = [(name, f"{part}/{several}") for name in names if name == "tune" for part in range(several)]
    parts += [(name, "0/1") for name in names if name != "tune"]
    started = time.perf_counter()

    def compile_one(one: tuple[str, str]) -> None:
        name, part = one
        left = limit - (time.perf_counter() - started)
        if left > 5:
            checks.process(_command(name, settings, "--ahead", part), left, **caches.environment(name))

    with ThreadPoolExecutor(max((os.cpu_count() or 1) // 2, 1)) as pool:
        list(pool.map(compile_one, parts))
    caches.pack(settings.folder)
    print(f"compiled ahead: {time.perf_counter() - started:.0f} s", flush=True)


def _apart(name: str, settings: Settings, limit: float) -> int | None:
    """Measures a row in a process of its own, and records where that one is cut off or dies; returns its exit code."""
    print(f"{name}: {ROWS[name].seconds} s expected", flush=True)
    before = read(settings.file).get(name)
    ran = checks.process(
        _command(name, settings, "--here", "--seconds", f"{limit:.0f}"), limit, **caches.environment(name)
    )
    with (settings.folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"== {name}, {ran.seconds} s, exit code {ran.code}\n{ran.output}\n")
    print(ran.output[-4000:], end="", flush=True)
    rows = read(settings.file)
    if rows.get(name) in (None, before):  # it could not even begin
        rows[name] = Bench(name, settings).record
    if rows[name]["seconds"] is None:
        ending = f"cut off after {ran.seconds:.0f} s" if ran.code is None else f"its process died, exit code {ran.code}"
        rows[name]["failures"].append({"what": name, "why": f"{ending}: {' '.join(ran.output.split())[-200:]}"})
        save(settings.file, rows)
    return ran.code


if __name__ == "__main__":
    sys.exit(main())
