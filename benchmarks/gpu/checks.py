"""Whether results are right on this GPU: tests/gpu, and small cases under compute-sanitizer, each a process."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.machine import ROOT, without_folders
from benchmarks.gpu.small_cases import BEGINS, ENDS

SMALL_CASES = (sys.executable, "-m", "benchmarks.gpu.small_cases")
FOUND = 86  # exit code of compute-sanitizer for errors that it found
SUMMARY = re.compile(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)")


@dataclass(frozen=True)
class Ran:
    """A process that has ended.

    Attributes:
        code: exit code; None if it was cut off.
        output: of both streams, without folders of this machine.
        seconds: it took.
    """

    code: int | None
    output: str
    seconds: float


def run(command: Sequence[str], seconds: float, **environment: str) -> Ran:
    """Runs a command; kills it, and all that it has started, when the time is up."""
    started = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1", **environment}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, code = process.communicate(timeout=max(seconds, 0.1))[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its children too: they would disturb the timing
            output, code = process.communicate()[0], None
    return Ran(code, without_folders(output), round(time.perf_counter() - started, 1))


def tests(bench: Bench, seconds: float) -> None:
    """Runs tests/gpu; rows also check their own results."""
    if importlib.util.find_spec("pytest") is None:
        bench.report("GPU tests", "not run: pytest is not installed")
        return
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "gpu"), "-vv", "--tb=short", "--no-header"]
    command += ["-p", "no:cacheprovider"]
    processes = min((os.cpu_count() or 1) // 2, 8)
    if processes > 1 and importlib.util.find_spec("xdist") is not None:  # most of the time goes into compiling
        command += ["-n", str(processes)]
    ran = run(command, seconds)
    last = (ran.output.strip() or "no output").splitlines()[-1].strip("= ")
    found = f"cut off after {ran.seconds:.0f} s" if ran.code is None else last
    bench.report("GPU tests", found, ran.code == 0, seconds=ran.seconds, code=ran.code, output=ran.output[-20000:])
    if ran.code != 0:
        print(ran.output[-1500:], flush=True)


def sanitizer(bench: Bench, seconds: float, tool: str) -> None:
    """Runs a small case of each kernel under a tool of compute-sanitizer, which sees single memory accesses.

    Where it is not installed or does not work (some virtual machines forbid it) the reason is the report.
    """
    program = _sanitizer()
    if program is None:
        bench.report(tool, "not run: compute-sanitizer is not installed; it comes with the CUDA toolkit")
        return
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no", "--print-limit",
               "20", "--launch-timeout", "120", "--target-processes", "application-only", "--require-cuda-init", "no",
               # Torch's own kernels only make the inputs. Names to include would be the other way to leave them out,
               # but for kernels that are compiled while a program runs, they were seen to match nothing.
               "--kernel-name-exclude", "kns=at6native", *SMALL_CASES, bench.device.type]  # fmt: skip
    # Without torch's cache every tensor is an allocation: an access just outside one is seen.
    ran = run(command, seconds, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    found, good = verdict(ran)
    bench.report(tool, found, good, seconds=ran.seconds, code=ran.code, output=ran.output[-20000:])


def verdict(ran: Ran) -> tuple[str, bool | None]:
    """Returns what a tool of compute-sanitizer found, and whether that is nothing; None if the tool did not work."""
    begun = re.findall(rf"^{BEGINS}(.*)$", ran.output, re.MULTILINE)
    ended = re.findall(rf"^{ENDS}(.*)$", ran.output, re.MULTILINE)
    summary = (SUMMARY.findall(ran.output) or ["no summary"])[-1].strip()
    if ran.code is None:
        return f"cut off after {ran.seconds:.0f} s, {len(ended)} cases were done; raise its limit in plan.py", None
    if not begun:
        lines = [line.strip("= ") for line in ran.output.splitlines() if line.strip("= ")]
        errors = [line for line in lines if "error" in line.lower() or "not supported" in line.lower()]
        return f"not run: it does not work here: {(errors or lines or ['no output'])[0][:160]}", None
    if ran.code == FOUND or not re.search(r"SUMMARY: 0 ", summary):
        return f"{summary}, in {begun[-1] if len(ended) < len(begun) else 'one of the cases'}", False
    if ran.code != 0:
        return f"the cases end with exit code {ran.code} in {begun[-1]}", False
    return f"{summary}, in {len(ended)} cases", True


def _sanitizer() -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(home))


CHECKS: dict[str, Callable[[Bench, float], None]] = {  # rows of the plan that are no worker's
    "tests": tests,
    "memcheck": partial(sanitizer, tool="memcheck"),
    "racecheck": partial(sanitizer, tool="racecheck"),
}
