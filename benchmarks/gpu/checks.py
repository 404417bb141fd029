"""Whether results are right on this GPU, and what its tools say: each but the first look is a process of its own."""

import csv
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import linear

from benchmarks.gpu.bench import ROOT, Bench, brief, ran_as, without_folders
from benchmarks.gpu.table import FEW, LAYER_8B
from benchmarks.gpu.timing import captured
from permtriton.kernels import cusparselt
from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.autotune import choices
from permtriton.kernels.packing import pack
from permtriton.kernels.tools.case import PATTERN, Random, relative_error
from permtriton.kernels.tools.cases import cases_for, sparse_linear_case

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


def first_look(bench: Bench) -> None:
    """Whether what will be measured works at all: every kernel as it runs by default, and cuSPARSELt."""
    bench.find("ceilings", ", ".join(f"{name} {rate:.1f}" for name, rate in bench.ceilings.items()))
    wrong = []
    for case in cases_for([SHAPE], TOKENS, torch.bfloat16 if bench.device.type == "cuda" else torch.float32):
        try:
            problem = case.check(bench.device)
        except Exception as error:  # one that does not run
            problem = brief(error)
        wrong += [f"{case.name}: {problem}"] * bool(problem)
    bench.find("every kernel by default", "; ".join(wrong) or "is right", not wrong)
    if bench.device.type == "cuda":
        _sparse_tensor_cores(bench)
    semi_structured(bench)


def _sparse_tensor_cores(bench: Bench) -> None:
    said: list[str] = []
    with choices() as ran, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for tokens in (*FEW, 128):
            for rows, channels in LAYER_8B:
                mma.chosen(mma.Product(tokens, rows, channels, torch.bfloat16), bench.device)
                in_fp8 = mma.Product(tokens, rows, channels, torch.bfloat16, fp8=True)
                if mma.takes(in_fp8, PATTERN, bench.device):
                    mma.chosen(in_fp8, bench.device)
    said += [str(one.message) for one in warned]
    rejected = ran_as(ran)["rejected"]
    found = f"{len(ran) - len(rejected)} are right, {len(rejected)} rejected" + "; ".join(["", *dict.fromkeys(said)])
    bench.find("the CUDA kernel's default variants", found, not rejected, ran=dict(ran))


def semi_structured(bench: Bench) -> None:
    """Whether cuSPARSELt's values lie where ours do, and whether its product can be captured in a CUDA graph."""
    rows, channels, tokens = bench.pick((4096, 4096, 128), (64, 128, 8))
    if not cusparselt.supports(bench.dtype, rows, channels, bench.device):
        bench.find("cuSPARSELt", "is not there")
        return
    weight = Random(0, bench.device).two_of_four(rows, channels, bench.dtype)
    compressed, values = cusparselt.compress(weight), pack(weight, PATTERN)[0]
    same = torch.equal(compressed[: values.numel()].view_as(values), values)
    bench.find("cuSPARSELt's values", "lie where ours do" if same else "lie elsewhere: a layer keeps both forms")
    x = torch.randn(tokens, channels, device=bench.device, dtype=bench.dtype)
    product = partial(cusparselt.product, x, compressed, None, rows)
    try:
        replay, (out,) = captured([product], bench.device)
        replay()
    except Exception as error:
        bench.find("cuSPARSELt's product in a CUDA graph", f"cannot be captured: {brief(error)}")
        return
    wrong = relative_error(out, linear(x, weight))
    bench.find("cuSPARSELt's product in a CUDA graph", f"is captured, {wrong:.2g} off", wrong < 5e-2)


COUNTERS = (
    "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__warps_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread,launch__waves_per_multiprocessor,"
    "regex:smsp__average_warps_issue_stalled_.*_per_issue_active.ratio"
)
COUNTED = "import sys; from benchmarks.gpu.checks import counted_cases; counted_cases(sys.argv[1])"


def counters(bench: Bench) -> None:
    """What ncu counts of the two decoding kernels, where it is installed and works."""
    program = _tool("ncu")
    if program is None:
        bench.find("ncu", "not run: it is not installed; it comes with the CUDA toolkit")
        return
    command = [program, "--clock-control", "none", "--csv", "--page", "raw", "--metrics", COUNTERS, "--kernel-name",
               "regex:sparse_linear", "--launch-skip", "2", "--launch-count", "12", sys.executable, "-c", COUNTED,
               bench.device.type]  # fmt: skip
    ran = process(command, bench.left)
    found = counted(ran.output)
    if not found:
        bench.find("ncu", f"does not work here: {' '.join(ran.output.split())[-300:]}", output=ran.output[-20000:])
    for what, said in found:
        bench.find(what, said, output="")
    bench.find("ncu", f"{len(found)} launches", output=ran.output[-60000:])


def counted_cases(device: str) -> None:
    """Runs the decoding kernels a few times each, on the two largest shapes."""
    where = torch.device(device)
    for tokens in (1, 16):
        for rows, channels in ((14336, 4096), (4096, 14336)) if device == "cuda" else ((64, 128),):
            case = sparse_linear_case(tokens, rows, channels, torch.bfloat16)
            inputs = case.make(where)
            with torch.no_grad():
                for _ in range(5):
                    case.run(*inputs)
    if device == "cuda":
        torch.cuda.synchronize()


def counted(output: str) -> list[tuple[str, str]]:
    """Returns a line per launch of what ncu printed as CSV: its kernel, and time, DRAM share, and why warps wait."""
    lines = output[output.find('"ID"') :].splitlines() if '"ID"' in output else []
    rows, found = list(csv.DictReader(lines)), []
    for row in rows[1:]:  # the first one holds units
        stalls = {re.sub(r".*_stalled_(.*)_per_issue.*", r"\1", name): float(value.replace(",", ""))
                  for name, value in row.items() if name and "_issue_stalled_" in name and value}  # fmt: skip
        top = sorted(stalls.items(), key=lambda one: -one[1])[:3]
        said = ", ".join(f"{name.partition('.')[0].partition('__')[2]} {row[name]}" for name in COUNTERS.split(",")[:-1]
                         if row.get(name))  # fmt: skip
        grid = row.get("Grid Size", "")
        found.append((f"ncu: {row.get('Kernel Name', '?')[:60]} {grid}",
                      f"{said}; warps wait for {', '.join(f'{name} {value:.1f}' for name, value in top)}"))  # fmt: skip
    return found


def _tool(name: str) -> str | None:
    folders = f"{os.environ.get('PATH', '')}{os.pathsep}{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"
    return shutil.which(name, path=folders)


def tests(bench: Bench) -> None:
    """Runs tests/gpu; rows also check their own results."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-vv", "--tb=short", "-p", "no:cacheprovider", "-p",
               "no:benchmark", "--confcutdir", "tests/gpu", "--continue-on-collection-errors"]  # fmt: skip
    processes = min((os.cpu_count() or 1) // 2, 8)
    if processes > 1 and importlib.util.find_spec("xdist") is not None:  # most of the time goes into compiling
        command += ["-n", str(processes)]
    ran = process(command, bench.left)
    (bench.settings.folder / "tests.log").write_text(ran.output, encoding="utf-8")  # what failed first is far above
    last = (ran.output.strip() or "no output").splitlines()[-1].strip("= ")
    found = f"cut off after {ran.seconds:.0f} s" if ran.code is None else last
    bench.find("GPU tests", found, ran.code == 0, output=ran.output[-20000:])


def sanitizer(bench: Bench, tool: str) -> None:
    """Runs a small case of each kernel under a tool of compute-sanitizer, which sees single memory accesses.

    Where it is not installed or does not work (some virtual machines forbid it) the reason is recorded.
    """
    program = _tool("compute-sanitizer")
    if program is None:
        bench.find(tool, "not run: compute-sanitizer is not installed; it comes with the CUDA toolkit")
        return
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no", "--print-limit",
               "20", "--launch-timeout", "120", "--target-processes", "application-only", "--require-cuda-init", "no",
               # Torch's own kernels only make the inputs. Names to include would be the other way to leave them out,
               # but for kernels that are compiled while a program runs, they were seen to match nothing.
               "--kernel-name-exclude", "kns=at6native", sys.executable, "-c", SMALL, bench.device.type]  # fmt: skip
    # Without torch's cache every tensor is an allocation: an access just outside one is seen.
    ran = process(command, bench.left, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
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
    for case in cases_for([SHAPE], TOKENS, torch.bfloat16):
        print(f"begins: {case.name}", flush=True)
        with torch.no_grad():
            case.run(*case.make(torch.device(device)))
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"done: {case.name}", flush=True)


ROWS: dict[str, Callable[[Bench], None]] = {
    "first_look": first_look,
    "counters": counters,
    "tests": tests,
    "memcheck": partial(sanitizer, tool="memcheck"),
    "racecheck": partial(sanitizer, tool="racecheck"),
}
