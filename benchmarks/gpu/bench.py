"""What the rows share: the machine, the time left, and the result file, which is written after each result."""

import json
import math
import os
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.gpu import machine
from benchmarks.gpu.goals import Goal
from benchmarks.gpu.machine import without_folders
from benchmarks.gpu.plan import ROWS, Call
from benchmarks.gpu.table import COPIES, COPY_BY_STREAM, OURS
from permtriton.kernels import autotune
from permtriton.kernels.tools import tuning
from permtriton.kernels.tools.case import Case, Inputs
from permtriton.kernels.tools.timing import Timing, measure, sets_of_inputs

T = TypeVar("T")
Prepare = Callable[[Inputs], Callable[[], object]]  # a set of inputs -> the call that is timed


class Bench:
    """One call of the benchmark, shared by its processes.

    Attributes:
        file: the result file.
        deadline: on the machine's monotonic clock, when nothing runs any more.
        result: what the file holds.
        rehearse: whether sizes are tiny and times mean nothing.
        device: the GPU, or the CPU in a rehearsal.
        group: the row of the plan that runs now.
        tuning_left: seconds that this row may still spend on tuning.
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
        self.group, self.tuning_left = "", 0.0

    @classmethod
    def begin(
        cls, folder: Path, call: Call, rehearse: bool = False, command: str = "", commit: str | None = None
    ) -> "Bench":
        """Returns a call that starts now, with a new result file in ``folder``."""
        deadline, started = time.monotonic() + 60 * call.minutes, datetime.now(UTC)
        name = f"rehearsal-{call.name}" if rehearse else f"gpu-{call.name}-{started:%Y%m%dT%H%M%SZ}"
        versions = machine.all_versions()
        result = {
            "rehearsal": rehearse,
            "started": started.isoformat(timespec="seconds"),
            "call": call.name,
            "command": command,
            "minutes": call.minutes,
            "commit": commit or machine.commit(),
            "hardware": machine.hardware(torch.device("cpu" if rehearse else "cuda")),
            "versions": versions,
            "warnings": machine.warnings(versions),
            "ceilings": None,
            "row_seconds": {},
            "gpu_state": {},
            "reports": [],
            "rows": [],
            "left_out": [],
            "finished": False,
        }  # fmt: skip
        return cls(folder / f"{name}.json", deadline, result)

    def start(self, group: str, tune: bool) -> None:
        """Makes what follows results of this row of the plan."""
        self.group, self.tuning_left = group, self.pick(ROWS[group].tuning, 1.0) if tune else 0.0
        self.result["row_seconds"][group] = None  # stays None if the row ends the process
        self.result["gpu_state"][group] = {"before": machine.state(self.device)}
        self.write()

    def end(self, seconds: float) -> None:
        """Records the seconds of the row and the state of the GPU after it."""
        self.result["gpu_state"][self.group]["after"] = machine.state(self.device)
        self.result["row_seconds"][self.group] = round(seconds, 1)
        self.write()

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
        entry: dict[str, Any] = {"row": row, "group": self.group or row, "why": why}
        if isinstance(why, Exception):
            trace = "".join(traceback.format_exception(why))
            entry |= {"why": without_folders(f"{type(why).__name__}: {why}"), "traceback": without_folders(trace)}
        self.result["left_out"].append(entry)
        self.write()
        return str(entry["why"])

    def report(self, what: str, found: str, good: bool | None = None, **more: Any) -> None:
        """Records something found out that is no time.

        Args:
            what: was looked at.
            found: for people, one line.
            good: whether that is as it must be; None where there is no "must", or where it could not be looked at.
            more: for the file.
        """
        entry = {"group": self.group, "what": what, "found": found, "good": good, **more}
        self.result["reports"].append(entry)
        self.write()
        print(f"{what}: {found}", flush=True)

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
            "group": self.group,
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
        tuned = self.tuned(case)
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
        times = measure(runs, self.device, min(seconds, max(self.seconds_left / 4, 0.5)), streamed=[COPY_BY_STREAM])
        half = times[OURS].quantile(0.5)
        floor = {"bytes": case.bytes, "flops": case.flops, "floor_us": self.floor(case) * 1e6}
        rates = {"gb_s": case.bytes / half / 1e9, "tflop_s": case.flops / half / 1e12}
        self.add(row, case.name, times, goals(times), absent, **floor, **rates, sets=len(inputs), **tuned, **more)
        return times

    def floor(self, case: Case) -> float:
        """Returns the least seconds of a case: its bytes or its operations at the measured ceilings."""
        ceilings = self.result["ceilings"]
        return max(case.bytes / ceilings["copy_gb_s"] / 1e9, case.flops / ceilings["matmul_tflop_s"] / 1e12)

    def tuned(self, case: Case) -> dict[str, Any]:
        """Tries the configurations of a case, if the row has time for that; returns the winners for the file.

        They are kept beside the results, in the file `permtriton.kernels.autotune.BESIDE_MODEL`: later calls use them,
        and trials that it holds are not repeated.
        """
        folder, until = self.file.parent, time.monotonic() + self.tuning_left
        if self.tuning_left <= 0:
            return {}

        def on_trial(_: tuning.Trial) -> None:
            if time.monotonic() > until:
                raise TimeoutError

        key = "rehearsal" if self.rehearse else autotune.machine_key()
        before, finished = time.monotonic(), True
        try:
            tuning.tune([case], self.device, key, [folder / autotune.BESIDE_MODEL], on_trial)
        except TimeoutError:
            finished = False
        except Exception as error:  # the case is measured as it is
            print(f"tuning {case.name}: {brief(error)}", flush=True)
            return {"tuning_error": brief(error)}
        self.tuning_left -= time.monotonic() - before
        autotune.use_beside(folder)
        entries = autotune.read_entries(folder / autotune.BESIDE_MODEL, key).items()
        found = {name: {"config": entry["config"], "gain": entry.get("gain")} for name, entry in entries
                 if entry.get("case") == case.name}  # fmt: skip
        return {"tuned": found, "tuning_finished": finished}

    def copies(self, case: Case) -> dict[str, Prepare]:
        """Returns the peers that copy as many bytes as the case must move; `of_copy` compares with the faster one."""
        made: dict[int, tuple[Tensor, Tensor]] = {}

        def prepare(inputs: Inputs) -> Callable[[], object]:
            if id(inputs) not in made:
                source = torch.randint(0, 255, (case.bytes // 2,), dtype=torch.uint8, device=self.device)
                made[id(inputs)] = source, torch.empty_like(source)
            source, target = made[id(inputs)]
            return lambda: target.copy_(source)

        return dict.fromkeys(COPIES, prepare)


def ratio(times: Mapping[str, Timing], peer: str) -> float:
    """Returns how many times faster ours is than the peer, at the medians; NaN if either was not measured."""
    return times[peer].quantile(0.5) / times[OURS].quantile(0.5) if {peer, OURS} <= times.keys() else math.nan


def of_copy(times: Mapping[str, Timing]) -> float:
    """Returns how many times faster ours is than the faster of both copies; NaN if none was measured."""
    return min((ratio(times, name) for name in COPIES if name in times), default=math.nan)


def brief(error: Exception) -> str:
    """Returns a peer's failure as text for the result file."""
    return f"{type(error).__name__}: {' '.join(without_folders(str(error)).split())}"[:200]


def _bound(run: Callable[..., Any], inputs: Inputs) -> Callable[[], object]:
    return lambda: run(*inputs)
