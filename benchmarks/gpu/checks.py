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

import torch

from benchmarks.gpu.bench import ROOT, Bench, without_folders
from permtriton.kernels.tools import tuning

SHAPE, TOKENS = (256, 512), (1, 16)  # as in tests/gpu: what was compiled there is not compiled again
SMALL = "import sys; from benchmarks.gpu.checks import small_cases; small_cases(sys.argv[1])"
FOUND = 86  # exit code of compute-sanitizer for errors that it found


@dataclass(frozen=True)
class Ran:
    """A process that has ended.

    Attributes:
        code: exit code; None if it was cut off.
        output: of both streams, without folders of this machine.
        seconds: that it took.
    """

    code: int | None
    output: str
    seconds: float


def process(command: Sequence[str], seconds: float, **environment: str) -> Ran:
    """Runs a command; kills it, and all that it has started, when the time is up."""
    started = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1", **environment}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    ) as running:  # fmt: skip
        try:
            output, code = running.communicate(timeout=seconds)[0], running.returncode
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # its children too: they would disturb the timing
            output, code = running.communicate()[0], None
    return Ran(code, without_folders(output), round(time.perf_counter() - started, 1))


def tests(bench: Bench) -> None:
    """Runs tests/gpu; rows also check their own results."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-v", "--tb=short", "-p", "no:cacheprovider"]
    processes = min((os.cpu_count() or 1) // 2, 8)
    if processes > 1 and importlib.util.find_spec("xdist") is not None:  # most of the time goes into compiling
        command += ["-n", str(processes)]
    ran = process(command, bench.limit)
    last = (ran.output.strip() or "no output").splitlines()[-1].strip("= ")
    found = f"cut off after {ran.seconds:.0f} s" if ran.code is None else last
    bench.find("GPU tests", found, ran.code == 0, output=ran.output[-20000:])


def sanitizer(bench: Bench, tool: str) -> None:
    """Runs a small case of each kernel under a tool of compute-sanitizer, which sees single memory accesses.

    Where it is not installed or does not work (some virtual machines forbid it) the reason is recorded.
    """
    folders = f"{os.environ.get('PATH', '')}{os.pathsep}{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"
    program = shutil.which("compute-sanitizer", path=folders)
    if program is None:
        bench.find(tool, "not run: compute-sanitizer is not installed; it comes with the CUDA toolkit")
        return
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no", "--print-limit",
               "20", "--launch-timeout", "120", "--target-processes", "application-only", "--require-cuda-init", "no",
               # Torch's own kernels only make the inputs. Names to include would be the other way to leave them out,
               # but for kernels that are compiled while a program runs, they were seen to match nothing.
               "--kernel-name-exclude", "kns=at6native", sys.executable, "-c", SMALL, bench.device.type]  # fmt: skip
    # Without torch's cache every tensor is an allocation: an access just outside one is seen.
    ran = process(command, bench.limit, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    bench.find(tool, *verdict(ran), output=ran.output[-20000:])


def verdict(ran: Ran) -> tuple[str, bool | None]:
    """Returns what a tool of compute-sanitizer found, and whether that is nothing; None if the tool did not work."""
    begun, ended = (re.findall(rf"^{word}: (.*)$", ran.output, re.MULTILINE) for word in ("begins", "done"))
    summary = (re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", ran.output) or ["no summary"])[-1]
    if ran.code is None:
        return f"cut off after {ran.seconds:.0f} s, {len(ended)} cases were done", None
    if not begun:
        return f"not run: it does not work here: {' '.join(ran.output.split())[:200]}", None
    if ran.code == 0 and "SUMMARY: 0 " in summary:
        return f"{summary}, in {len(ended)} cases", True
    return f"{summary}, exit code {ran.code}, in or after {begun[-1]}", False


def small_cases(device: str) -> None:
    """Runs each kernel once on a small case; results are not looked at."""
    torch.zeros(1, device=device)  # where the device cannot be used at all, no case begins
    for case in tuning.cases_for([SHAPE], TOKENS, torch.bfloat16, torch.device(device)):
        print(f"begins: {case.name}", flush=True)
        with torch.no_grad():
            case.run(*case.make(0))
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"done: {case.name}", flush=True)


ROWS: dict[str, Callable[[Bench], None]] = {
    "tests": tests,
    "memcheck": partial(sanitizer, tool="memcheck"),
    "racecheck": partial(sanitizer, tool="racecheck"),
}
