"""What the rows share: checking a case, timing it against its peers and its floor, and the result file."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.gpu import reading
from benchmarks.gpu.table import COPIES, COPY, FLOOR, OURS, OUT, READ, ROWS, SPEED, read
from benchmarks.gpu.timing import Timing, measure
from permtriton.kernels.autotune import choices
from permtriton.kernels.launch import triton
from permtriton.kernels.tools.case import Arguments, Case
from permtriton.kernels.tools.tuning import sets_of_inputs
from permtriton.util.machine import device_name, versions

T = TypeVar("T")
Prepare = Callable[[Arguments], Callable[[], Any]]  # a set of inputs -> the call that is timed
ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = "results.json"
DEAD = 70  # exit code of a process that a fault has left without a GPU
STATE = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.sw_power_cap",
         "clocks_event_reasons.hw_slowdown", "clocks_event_reasons.sw_thermal_slowdown")  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """How a row is run.

    Attributes:
        folder: of the results.
        tiny: whether sizes are tiny and times mean nothing, as on a CPU.
        commit: of this checkout, where neither git nor the file COMMIT is there to ask.
        ahead: whether everything is only run once, so that it is compiled; nothing is recorded.
        part: (k, n): of what may be divided, the k-th of n parts.
        seconds: that the row may take; None for its limit.
    """

    folder: Path
    tiny: bool = False
    commit: str | None = None
    ahead: bool = False
    part: tuple[int, int] = (0, 1)
    seconds: float | None = None

    @property
    def file(self) -> Path:
        """The result file, ``{"rows": {name: record}}``."""
        return self.folder / RESULTS


@dataclass(frozen=True)
class How:
    """How a case is compared.

    Attributes:
        label: what it is called in the result; by default its name.
        seconds: to spend on timing.
        unlike: peers that compute something else; any other one that does is absent.
        streamed: peers that no CUDA graph can hold.
        copies: whether copies of as many bytes are peers, too.
        reads: whether reading decides, not copying.
        figures: name -> our median in seconds -> figure.
    """

    label: str = ""
    seconds: float = 0.5
    unlike: Collection[str] = ()
    streamed: Collection[str] = ()
    copies: bool = False
    reads: bool = False
    figures: Mapping[str, Callable[[float], float]] | None = None


class Bench:
    """One row that runs; its record in the result file is replaced after each result.

    An earlier record of the same commit and GPU that was not finished is continued: what it holds is not measured
    again.

    Attributes:
        settings: how it is run.
        name: of the row.
        tiny: see `Settings`.
        device: GPU, or the CPU where sizes are tiny.
        record: what the file will hold of the row.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.settings, self.name, self.tiny, self._begun = settings, name, settings.tiny, time.monotonic()
        self.device = torch.device("cpu" if self.tiny else "cuda")
        self.record: dict[str, Any] = {
            "command": f"python -m benchmarks.gpu --out {OUT} --only {name}" + " --tiny" * self.tiny,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "tiny": self.tiny,
            "commit": settings.commit or commit(),
            "hardware": hardware(self.device),
            "versions": {**versions(), "triton": getattr(triton, "__version__", None), "cuda": torch.version.cuda,
                         "cusparselt": _cusparselt()},
            "ceilings": None, "before": self.state(), "after": None, "seconds": None,
            "results": [], "findings": [], "failures": [], "tried": {},
        }  # fmt: skip
        before = read(settings.file).get(name)
        self._earlier: dict[str, Any] | None = None  # what another commit measured, until this one has a result
        if before is not None and before["hardware"]["device"] == self.record["hardware"]["device"]:
            if not _same(before, self.record):
                self._earlier = before
                before = before.get("since", before)
            if before["seconds"] is None and _same(before, self.record):
                self.record |= {part: before[part] for part in ("ceilings", "results", "findings", "tried")}
        self.write()

    def begins(self, what: str) -> bool:
        """Whether something is to be measured: not if an earlier try has, nor if two tries never ended."""
        if any(f"{result['name']}: {result['case']}" == what for result in self.record["results"]):
            return False
        tries = self.record["tried"].get(what, 0)
        if tries > 1:
            self.fail(what, RuntimeError("twice the process died in it or was cut off"))
            return False
        self.record["tried"][what] = tries + 1
        self.write()
        return True

    def pick(self, full: T, tiny: T) -> T:
        """Returns the size to run: the real one, or the tiny one."""
        return tiny if self.tiny else full

    @property
    def dtype(self) -> torch.dtype:
        return self.pick(torch.bfloat16, torch.float32)

    @property
    def left(self) -> float:
        """Seconds for what the row starts: it ends before the row itself is cut off."""
        allowed = self.settings.seconds or ROWS[self.name].limit
        return max(allowed - 15 - (time.monotonic() - self._begun), 5.0)

    def write(self) -> None:
        """Puts the record into the result file, beside those of other rows."""
        if self.settings.ahead:
            return
        row = self.record
        if self._earlier is not None and not any(row[part] for part in ("results", "findings", "failures")):
            row = {**self._earlier, "since": row}
        save(self.settings.file, read(self.settings.file) | {self.name: row})

    def state(self) -> dict[str, str] | None:
        """Returns clocks (MHz), temperature, power (W) and what holds the clocks down; None where it cannot be read."""
        uuid = "" if self.tiny else str(torch.cuda.get_device_properties(self.device).uuid).removeprefix("GPU-")
        query = f"--query-gpu={','.join(STATE)}"
        line = uuid and output("nvidia-smi", f"--id=GPU-{uuid}", query, "--format=csv,noheader,nounits")
        return dict(zip(STATE, line.split(", "), strict=True)) if line else None

    @cached_property
    def ceilings(self) -> dict[str, float]:
        """The rates of a copy, of reading alone, and of a product, measured once in this row's process."""
        if self.record["ceilings"] is None:
            on = self.device, self.tiny
            self.record["ceilings"] = {
                "copy_gb_s": reading.copying(*on) / 1e9,
                "read_gb_s": reading.bandwidth(*on) / 1e9,
                "matmul_tflop_s": reading.multiplying(*on) / 1e12,
            }
        return self.record["ceilings"]

    def floor(self, case: Case, reads: bool = False) -> float:
        """Returns the least seconds of a case: its bytes or its operations at the measured ceilings."""
        rates = self.ceilings
        bandwidth = rates["read_gb_s" if reads else "copy_gb_s"]
        return max(case.bytes / bandwidth / 1e9, case.flops / rates["matmul_tflop_s"] / 1e12)

    def find(self, what: str, found: str, good: bool | None = None, **more: Any) -> None:
        """Records what is no time; ``good`` is None where nothing has to be so."""
        before = [finding for finding in self.record["findings"] if finding["what"] != what]
        self.record["findings"] = [*before, {"what": what, "found": found, "good": good, **more}]
        self.write()
        print(f"{what}: {found}", flush=True)

    def fail(self, what: str, error: Exception) -> None:
        """Records that the row, or one case of it, has no result."""
        self.record["failures"].append({"what": what, "why": brief(error)})
        self.write()
        print(f"{what}: {brief(error)}", flush=True)

    def add(
        self,
        name: str,
        case: str,
        times: Mapping[str, Timing],  # of ours, named `OURS`, and of the peers
        figures: Mapping[str, float] | None = None,  # further ones
        floor: float | None = None,  # least seconds
        **more: Any,
    ) -> None:
        """Records a result with how fast ours is, relative to each peer, to the faster copy and to the floor."""
        half = {peer: timing.quantile(0.5) for peer, timing in times.items()}
        ratios = {f"{SPEED}{peer}": seconds / half[OURS] for peer, seconds in half.items()
                  if peer not in (OURS, *COPIES)}  # fmt: skip
        copies = [half[peer] for peer in COPIES if peer in half]
        ratios |= {COPY: min(copies) / half[OURS]} if copies else {}
        ratios |= {FLOOR: floor / half[OURS]} if floor else {}
        self.record["results"].append({
            "name": name, "case": case, "figures": {**ratios, **(figures or {})},
            "floor_us": floor and floor * 1e6, "times": {peer: timing.report() for peer, timing in times.items()},
            **more,
        })  # fmt: skip
        self.write()

    def compare(self, name: str, case: Case, peers: Mapping[str, Prepare], **how: Any) -> None:
        """Checks a case and times it against its peers; a wrong or failing one gets no time and costs no other case.

        Args:
            name: of the result.
            case: ours.
            peers: name -> how its call is made of a set of inputs; one that raises is recorded as absent.
            how: fields of `How`.
        """
        asked = How(**how)
        label = asked.label or case.name
        try:
            with torch.no_grad():  # else torch.compile would compile twice, with and without gradients
                if self.settings.ahead:
                    self._once(case, peers)
                elif self.begins(f"{name}: {label}"):
                    self._compare(name, case, peers, asked)
        except Exception as error:
            self.fail(f"{name}: {label}", error)
            self.end_if_dead()

    def end_if_dead(self) -> None:
        """Ends the process where a fault has left it without a GPU: all that followed would fail, too.

        The row is not finished then, and its next process goes on behind what did it.
        """
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except Exception as error:
                print(f"this process has no GPU any more: {brief(error)}", flush=True)
                os._exit(DEAD)

    def _once(self, case: Case, peers: Mapping[str, Prepare]) -> None:
        inputs = case.make(self.device)
        for prepare in ((lambda given: partial(case.run, *given)), *peers.values()):
            with suppress(Exception):  # the row itself will say it
                prepare(inputs)()

    def _compare(self, name: str, case: Case, peers: Mapping[str, Prepare], how: "How") -> None:
        with choices() as ran:
            wrong = case.check(self.device)
        if wrong:
            raise AssertionError(f"{case.name} is wrong: {wrong}")
        inputs = [case.make(self.device, seed) for seed in range(sets_of_inputs(self.device, case.bytes))]
        runs = {OURS: [partial(case.run, *one) for one in inputs]}
        absent = {}
        for peer, prepare in peers.items():
            try:
                calls = [prepare(one) for one in inputs]
                found = calls[0]()
                if peer not in how.unlike and (error := case.error(found, runs[OURS][0]())) > case.limit:
                    raise AssertionError(f"wrong: its result is {error:.3g} from ours, {case.limit:.3g} is allowed")
                runs[peer] = calls
            except Exception as error:  # a peer that is missing on this machine or in this version
                absent[peer] = brief(error)
        if how.copies:
            copying = [self._copying(case.bytes // 2) for _ in inputs]
            runs |= dict.fromkeys(COPIES, copying)
        times = measure(runs, self.device, how.seconds, streamed=(*how.streamed, COPIES[1]))
        half = times[OURS].quantile(0.5)
        more = {figure: of(half) for figure, of in (how.figures or {}).items()}
        if how.reads:
            more[READ] = case.bytes / half / 1e9 / self.ceilings["read_gb_s"]
        counted = {"bytes": case.bytes, "flops": case.flops, "sets": len(inputs)}
        self.add(
            name,
            how.label or case.name,
            times,
            more,
            self.floor(case, how.reads),
            absent=absent,
            **counted,
            **ran_as(ran),
        )

    def _copying(self, count: int) -> Callable[[], object]:
        source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)


def ran_as(ran: Mapping[str, str]) -> dict[str, Any]:
    """Returns what `choices` collected as a result holds it: routes, what was rejected, and every configuration."""
    return {
        "routes": sorted({found for what, found in ran.items() if what.startswith("route ")}),
        "rejected": [found for what, found in ran.items() if what.startswith("rejected ")],
        "ran": dict(ran),
    }


def commit() -> str | None:
    """Returns the commit of this folder: of git, or the file that was written when it was packed."""
    file = ROOT / "COMMIT"
    kept = file.read_text(encoding="utf-8").strip() if file.is_file() else None
    return kept or output("git", "describe", "--always", "--abbrev=40", "--dirty")


def finished(record: Mapping[str, Any] | None, of: Settings) -> bool:
    """Whether a row need not run again: it came to its end, on these sizes and this commit."""
    return record is not None and record["seconds"] is not None and _same(
        record, {"tiny": of.tiny, "commit": of.commit or commit()}
    )  # fmt: skip


def _same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return all(before[part] == now[part] for part in ("tiny", "commit"))


def save(file: Path, rows: Mapping[str, Any]) -> None:
    """Replaces a result file atomically; rows stand in the order of `ROWS`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    ordered = {name: rows[name] for name in ROWS if name in rows}
    temporary.write_text(json.dumps({"rows": ordered}, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def brief(error: Exception) -> str:
    """Returns an error as one line."""
    return without_folders(f"{type(error).__name__}: {' '.join(str(error).split())}")[:500]


def without_folders(text: str) -> str:
    """Returns text without folders of this machine: result files are published."""
    for folder in (ROOT, sys.prefix, sys.base_prefix, Path.home()):
        text = text.replace(f"{folder}/", "")
    return text


def output(*command: str) -> str | None:
    """Returns what a command prints; None where it fails or is not there."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def hardware(device: torch.device) -> dict[str, Any]:
    """Returns what is known of the machine, of the GPU first, as result files say it."""
    found = {"device": device_name(device), "system": f"{platform.system()} {platform.machine()}",
             "cores": os.cpu_count()}  # fmt: skip
    if device.type == "cpu":
        return found
    about = torch.cuda.get_device_properties(device)
    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {**found, "capability": f"{about.major}.{about.minor}", "multiprocessors": about.multi_processor_count,
            "memory_bytes": about.total_memory, "l2_bytes": about.L2_cache_size, "driver": driver}  # fmt: skip


def _cusparselt() -> str | None:
    number = torch.backends.cusparselt.version() if torch.backends.cusparselt.is_available() else None
    return number and ".".join(map(str, (number // 1000, number // 100 % 10, number % 100)))
