"""What the rows share: the machine, the time that is left, and the result file, written as each result comes."""

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from permtriton import report
from permtriton.kernels.cases import Case, Inputs
from permtriton.kernels.launch import triton
from permtriton.kernels.timing import Ceilings, Timing, measure, sets_of_inputs

ROOT = Path(__file__).resolve().parent.parent.parent
T = TypeVar("T")
Prepare = Callable[[Inputs], Callable[[], object]]  # a set of inputs -> the call that is timed
OURS, COPY = "permtriton", "copy_ of the same bytes"


@dataclass(frozen=True)
class Goal:
    """A figure and what it should be.

    Attributes:
        name: of the figure, for people.
        value: measured.
        least, most: bounds, either or both; none for a figure that is only reported.
    """

    name: str
    value: float
    least: float | None = None
    most: float | None = None

    def report(self, rehearse: bool) -> dict[str, Any]:
        """Returns it for the result file; a rehearsal, or a figure that has no value, neither passes nor fails."""
        low, high, known = self.least, self.most, math.isfinite(self.value)
        inside = (low is None or self.value >= low) and (high is None or self.value <= high)
        passed = None if rehearse or not known or (low is None and high is None) else inside
        value = round(self.value, 4) if known else None
        return {"name": self.name, "value": value, "least": low, "most": high, "passed": passed}


class Bench:
    """One run of the benchmark.

    Attributes:
        device: the GPU, or the CPU in a rehearsal.
        rehearse: whether sizes are tiny and times mean nothing.
        ceilings: set once measured.
        result: what the file holds.
    """

    ceilings: Ceilings

    def __init__(self, folder: Path, minutes: float, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.device = torch.device("cpu" if rehearse else "cuda")
        self._deadline = time.monotonic() + 60 * minutes
        started = datetime.now(UTC)
        name = "rehearsal" if rehearse else f"gpu-{started:%Y%m%dT%H%M%SZ}"
        self.file = folder / f"{name}.json"
        self.result: dict[str, Any] = {
            "rehearsal": rehearse,
            "started": started.isoformat(timespec="seconds"),
            "command": " ".join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
            "minutes": minutes,
            "commit": _commit(),
            "hardware": _hardware(self.device),
            "versions": {**_versions(), "triton": getattr(triton, "__version__", None),
                         "cuda": torch.version.cuda},
            "tests": None,
            "ceilings": None,
            "rows": [],
            "left_out": [],
            "finished": False,
        }  # fmt: skip
        self.write()

    def pick(self, full: T, tiny: T) -> T:
        """Returns the size to run: the real one, or the rehearsal's."""
        return tiny if self.rehearse else full

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def write(self) -> None:
        """Replaces the result file whole."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.result, indent=1), encoding="utf-8")
        os.replace(temporary, self.file)

    def add(
        self,
        row: str,
        case: str,
        times: Mapping[str, Timing],
        goals: Sequence[Goal] = (),
        absent: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        """Writes one result.

        Args:
            row: of the table.
            case: shape and dtype.
            times: of ours, named `OURS`, and the peers.
            goals: figures.
            absent: peer -> why it was not measured.
            more: anything else that belongs into the file.
        """
        self.result["rows"].append({
            "row": row,
            "case": case,
            "times": {name: timing.report() for name, timing in times.items()},
            "goals": [goal.report(self.rehearse) for goal in goals],
            "absent": dict(absent or {}),
            **more,
        })  # fmt: skip
        self.write()

    def compare(
        self,
        row: str,
        case: Case,
        peers: Mapping[str, Prepare],
        goals: Callable[[Mapping[str, Timing]], list[Goal]],
        seconds: float = 3.0,
        **more: Any,
    ) -> dict[str, Timing]:
        """Checks a case, times it beside its peers and writes the result; what is wrong gets no time.

        Args:
            row: of the table.
            case: ours.
            peers: name -> how its call is made of a set of inputs; one that raises is written as absent.
            goals: times by name -> figures.
            seconds: to spend on timing.
            more: for the file.
        """
        wrong = case.check()
        if wrong is not None:
            raise AssertionError(f"{case.name} is wrong: {wrong}")
        inputs = [case.make(seed) for seed in range(sets_of_inputs(self.device, case.bytes))]
        runs: dict[str, list[Callable[[], object]]] = {OURS: [_bound(case.run, one) for one in inputs]}
        absent = {}
        for name, prepare in peers.items():
            try:
                calls = [prepare(one) for one in inputs]
                calls[0]()
                runs[name] = calls
            except Exception as error:  # a peer that this machine or version does not have
                absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        with torch.no_grad():
            times = measure(runs, self.device, min(seconds, max(self.seconds_left / 4, 0.5)))
        half = times[OURS].quantile(0.5)
        floor = {"bytes": case.bytes, "flops": case.flops, "floor_us": self.floor(case) * 1e6}
        rates = {"gb_s": case.bytes / half / 1e9, "tflop_s": case.flops / half / 1e12}
        self.add(row, case.name, times, goals(times), absent, **floor, **rates, sets=len(inputs), **more)
        return times

    def floor(self, case: Case) -> float:
        """Returns the seconds that its bytes or its arithmetic take at the measured ceilings, the larger of both."""
        by_bytes = case.bytes / self.ceilings.copy_gb_s / 1e9
        return max(by_bytes, case.flops / self.ceilings.matmul_tflop_s / 1e12)

    def copy_peer(self, case: Case) -> Prepare:
        """Returns the peer that copies as many bytes as the case must move."""

        def prepare(_: Inputs) -> Callable[[], object]:
            source = torch.randint(0, 255, (case.bytes // 2,), dtype=torch.uint8, device=self.device)
            return lambda: torch.empty_like(source).copy_(source)

        return prepare


def ratio(times: Mapping[str, Timing], peer: str) -> float:
    """Returns how many times faster ours is than the peer, at the medians; NaN where the peer was not measured."""
    return times[peer].quantile(0.5) / times[OURS].quantile(0.5) if peer in times else math.nan


def _bound(run: Callable[..., Any], inputs: Inputs) -> Callable[[], object]:
    return lambda: run(*inputs)


def _versions() -> dict[str, str]:
    try:
        return report.versions()
    except metadata.PackageNotFoundError:  # run from the checkout alone
        return {"permtriton": "not installed", "python": platform.python_version(), "torch": torch.__version__,
                "transformers": transformers.__version__}  # fmt: skip


def _hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"system": platform.platform(), "cores": os.cpu_count()}
    if device.type != "cuda":
        return {**found, "device": report.device_name(device)}
    about = torch.cuda.get_device_properties(device)
    return {
        **found,
        "device": about.name,
        "capability": f"{about.major}.{about.minor}",
        "multiprocessors": about.multi_processor_count,
        "memory_bytes": about.total_memory,
        "l2_bytes": about.L2_cache_size,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def _commit() -> str | None:
    commit = _output("git", "rev-parse", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return commit and commit + (" with changes" if changed else "")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
