"""What the rows share: the machine, the time left, and the result file, which is written after each result."""

import json
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from benchmarks.gpu.goals import Goal
from benchmarks.gpu.table import OURS
from permtriton.kernels.launch import triton
from permtriton.kernels.tools.cases import Case, Inputs
from permtriton.kernels.tools.timing import Timing, measure, sets_of_inputs
from permtriton.machine import device_name, versions

ROOT = Path(__file__).resolve().parent.parent.parent
T = TypeVar("T")
Prepare = Callable[[Inputs], Callable[[], object]]  # a set of inputs -> the call that is timed


class Bench:
    """One run of the benchmark, shared by its processes.

    Attributes:
        file: the result file.
        deadline: on the machine's monotonic clock, when nothing runs any more.
        result: what the file holds.
        rehearse: whether sizes are tiny and times mean nothing.
        device: the GPU, or the CPU in a rehearsal.
    """

    def __init__(self, file: Path, deadline: float, result: dict[str, Any] | None = None) -> None:
        """Continues a result file, or begins it with ``result``."""
        self.file, self.deadline = file, deadline
        if result is None:
            self.read()
        else:
            self.result = result
            self.write()
        self.rehearse: bool = self.result["rehearsal"]
        self.device = torch.device("cpu" if self.rehearse else "cuda")

    @classmethod
    def begin(cls, folder: Path, minutes: float, rehearse: bool, command: str, commit: str | None) -> "Bench":
        """Returns a run that starts now, with a new result file in ``folder``."""
        deadline, started = time.monotonic() + 60 * minutes, datetime.now(UTC)
        name = "rehearsal" if rehearse else f"gpu-{started:%Y%m%dT%H%M%SZ}"
        result = {
            "rehearsal": rehearse,
            "started": started.isoformat(timespec="seconds"),
            "command": command,
            "minutes": minutes,
            "commit": commit or _commit(),
            "hardware": _hardware(torch.device("cpu" if rehearse else "cuda")),
            "versions": {**_versions(), "triton": getattr(triton, "__version__", None),
                         "cuda": torch.version.cuda},
            "tests": None,
            "ceilings": None,
            "row_seconds": {},
            "rows": [],
            "left_out": [],
            "finished": False,
        }  # fmt: skip
        return cls(folder / f"{name}.json", deadline, result)

    def pick(self, full: T, tiny: T) -> T:
        """Returns the size to run: the real one, or the rehearsal's."""
        return tiny if self.rehearse else full

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def read(self) -> None:
        """Reads results that another process has written."""
        self.result = json.loads(self.file.read_text(encoding="utf-8"))

    def write(self) -> None:
        """Replaces the result file atomically."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.result, indent=1), encoding="utf-8")
        os.replace(temporary, self.file)

    def leave_out(self, row: str, why: str | Exception) -> str:
        """Records that a row, or one case of it, has no result; returns the reason."""
        entry: dict[str, Any] = {"row": row, "why": why}
        if isinstance(why, Exception):
            trace = "".join(traceback.format_exception(why))
            entry |= {"why": without_folders(f"{type(why).__name__}: {why}"), "traceback": without_folders(trace)}
        self.result["left_out"].append(entry)
        self.write()
        return str(entry["why"])

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
        alike: Collection[str] = (),
        **more: Any,
    ) -> dict[str, Timing]:
        """Checks a case, times it against its peers and writes the result; a wrong or failing one gets no time.

        Args:
            row: of the table.
            case: ours.
            peers: name -> how its call is made of a set of inputs; one that raises is written as absent.
            goals: times by name -> figures.
            seconds: to spend on timing.
            alike: peers that compute what ours computes: one whose result is another is written as absent.
            more: for the file.

        Returns:
            The times; none where ours is wrong or failed, which is written down and costs no other case.
        """
        try:
            with torch.no_grad():  # else torch.compile would compile twice, with and without gradients
                return self._compare(row, case, peers, goals, seconds, alike, more)
        except Exception as error:
            print(f"{row}: {self.leave_out(f'{row}: {case.name}', error)[:500]}", flush=True)
            return {}

    def _compare(
        self,
        row: str,
        case: Case,
        peers: Mapping[str, Prepare],
        goals: Callable[[Mapping[str, Timing]], list[Goal]],
        seconds: float,
        alike: Collection[str],
        more: Mapping[str, Any],
    ) -> dict[str, Timing]:
        wrong = case.check()
        if wrong is not None:
            raise AssertionError(f"{case.name} is wrong: {wrong}")
        inputs = [case.make(seed) for seed in range(sets_of_inputs(self.device, case.bytes))]
        runs: dict[str, list[Callable[[], object]]] = {OURS: [_bound(case.run, one) for one in inputs]}
        absent = {}
        for name, prepare in peers.items():
            try:
                calls = [prepare(one) for one in inputs]
                found = calls[0]()
                if name in alike and (error := case.error(found, runs[OURS][0]())) > case.limit:
                    raise AssertionError(f"wrong: its result is {error:.3g} from ours, {case.limit:.3g} is allowed")
                runs[name] = calls
            except Exception as error:  # a peer that is missing on this machine or in this version
                absent[name] = brief(error)
        times = measure(runs, self.device, min(seconds, max(self.seconds_left / 4, 0.5)))
        half = times[OURS].quantile(0.5)
        floor = {"bytes": case.bytes, "flops": case.flops, "floor_us": self.floor(case) * 1e6}
        rates = {"gb_s": case.bytes / half / 1e9, "tflop_s": case.flops / half / 1e12}
        self.add(row, case.name, times, goals(times), absent, **floor, **rates, sets=len(inputs), **more)
        return times

    def floor(self, case: Case) -> float:
        """Returns the least seconds of a case: its bytes or its operations at the measured ceilings."""
        ceilings = self.result["ceilings"]
        return max(case.bytes / ceilings["copy_gb_s"] / 1e9, case.flops / ceilings["matmul_tflop_s"] / 1e12)

    def copy_peer(self, case: Case) -> Prepare:
        """Returns the peer that copies as many bytes as the case must move."""

        def prepare(_: Inputs) -> Callable[[], object]:
            source = torch.randint(0, 255, (case.bytes // 2,), dtype=torch.uint8, device=self.device)
            return lambda: torch.empty_like(source).copy_(source)

        return prepare


def ratio(times: Mapping[str, Timing], peer: str) -> float:
    """Returns how many times faster ours is than the peer, at the medians; NaN if either was not measured."""
    return times[peer].quantile(0.5) / times[OURS].quantile(0.5) if {peer, OURS} <= times.keys() else math.nan


def brief(error: Exception) -> str:
    """Returns a peer's failure as text for the result file."""
    return f"{type(error).__name__}: {' '.join(without_folders(str(error)).split())}"[:200]


def without_folders(text: str) -> str:
    """Returns text without folders of this machine: result files are published."""
    for folder in (ROOT, sys.prefix, sys.base_prefix, Path.home()):
        text = text.replace(f"{folder}/", "")
    return text


def _bound(run: Callable[..., Any], inputs: Inputs) -> Callable[[], object]:
    return lambda: run(*inputs)


def _versions() -> dict[str, str]:
    try:
        return versions()
    except metadata.PackageNotFoundError:  # run from the checkout alone
        return {"permtriton": "not installed", "python": platform.python_version(), "torch": torch.__version__,
                "transformers": transformers.__version__}  # fmt: skip


def _hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count()}
    if device.type != "cuda":
        return {**found, "device": device_name(device)}
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
