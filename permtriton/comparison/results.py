"""What was measured of each row, and the file that keeps it, so that an interrupted comparison continues."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from permtriton.errors import OutputError
from permtriton.evaluation.fidelity import Distances
from permtriton.util.durable import replace_file
from permtriton.util.validation import checked

VERSION = 2  # of the file


@dataclass(frozen=True)
class _File:
    version: Literal[2]  # equal to `VERSION`
    identity: dict[str, Any]
    results: list[dict[Literal["key", "measured"], dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class _Perplexity:
    perplexity: float | None


@dataclass(frozen=True, kw_only=True)
class Measured(Distances, _Perplexity):  # fields of the last base come first
    """What was measured of one row with one seed.

    Attributes:
        perplexity: held-out perplexity; None for encoders.
        cosine: it is always known, as there is a dense model.
        tasks: zero-shot score by the task's name and the metric's, such as ``arc_easy acc``; None where it is no finite
            number.
        accuracy: mean accuracy of the tasks, a group with a score of its own in place of its tasks; None without two of
            them, or where one has none.
        seconds: time of compilation and evaluation together.
        compile_seconds: time of the compilation alone.
        peak_bytes: peak memory during the compilation; None where the system cannot start its count anew.
    """

    cosine: float
    tasks: dict[str, float | None]
    accuracy: float | None
    seconds: float
    compile_seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Key:
    """What a stored result belongs to: a row, a seed, the calibration sequences, and the row's options.

    Attributes:
        method: method of the row, or ``dense``.
        pattern: sparsity pattern of the row; empty for dense.
        setting: setting of the ablation; empty without one.
        seed: seed of the calibration draw and of learning; 0 for dense.
        calibration: hash of the calibration sequences, of all that the row's steps read; empty for dense.
        options: value of every option of the row, but for the seed and those that only save memory, as JSON; empty for
            dense.
    """

    method: str
    pattern: str = ""
    setting: str = ""
    seed: int = 0
    calibration: str = ""
    options: str = ""


@dataclass
class ResultFile:
    """The results so far, in memory and in a file.

    Attributes:
        path: JSON file, written after every result; None keeps them in memory only.
        identity: everything else that decides a result, by name; values that JSON can hold.
        results: result of each key.
    """

    path: Path | None
    identity: Mapping[str, Any]
    results: dict[Key, Measured] = field(default_factory=dict)

    def read(self) -> None:
        """Reads the results of an earlier run, if there is a file.

        Raises:
            OutputError: the file cannot be used, or its results belong to another comparison.
        """
        if self.path is None or not self.path.exists():
            return

        def refuse(problem: str) -> OutputError:
            return OutputError(
                f"{self.path} holds no results that can be continued ({problem}): --overwrite starts from scratch"
            )

        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise refuse(f"{type(error).__name__}: {error}") from error
        stored = checked(_File, content, refuse)
        if difference := _difference(stored.identity, json.loads(json.dumps(self.identity))):
            raise OutputError(
                f"{self.path} holds results of another comparison: {difference}; --overwrite starts from scratch, "
                "or choose another --output"
            )
        self.results = {
            checked(Key, each["key"], refuse): checked(Measured, each["measured"], refuse) for each in stored.results
        }

    def get(self, key: Key) -> Measured | None:
        """Returns the result of ``key``; None if there is none.

        Raises:
            OutputError: there is one, but with other options or of other calibration sequences.
        """
        for other in self.results:
            if dataclasses.replace(other, calibration=key.calibration, options=key.options) == key != other:
                changed = "the text changed"
                if other.options != key.options:
                    changed = f"option {_difference(json.loads(other.options), json.loads(key.options))}"
                raise OutputError(
                    f"{self.path} holds another result of {key.method} with seed {key.seed}: {changed}; --overwrite "
                    "starts from scratch, or choose another --output"
                )
        return self.results.get(key)

    def put(self, key: Key, measured: Measured) -> Measured:
        """Adds a result, replaces the file and returns the result; if interrupted, the earlier file stays intact.

        Raises:
            OutputError: the file cannot be written.
        """
        self.results[key] = measured
        if self.path is None:
            return measured
        results = [{"key": dataclasses.asdict(k), "measured": dataclasses.asdict(m)} for k, m in self.results.items()]
        stored = {"version": VERSION, "identity": self.identity, "results": results}
        text = json.dumps(stored, indent=1) + "\n"
        try:
            replace_file(self.path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        except OSError as error:
            raise OutputError(
                f"results {self.path} cannot be written: {error}; free disk space and run again"
            ) from error
        return measured


@dataclass(frozen=True)
class RowResult:
    """The result of one row over all seeds.

    Attributes:
        method: key of `permtriton.comparison.methods.METHODS`, or ``dense``.
        pattern: sparsity pattern; empty for dense.
        setting: setting of the ablation; empty without one.
        measured: what was measured with each seed.
        options: value of every option but the seed; nothing for dense.
    """

    method: str
    pattern: str
    setting: str
    measured: tuple[Measured, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What distinguishes the row, in words."""
        return ", ".join(part for part in (self.method, self.pattern, self.setting) if part)

    @property
    def values(self) -> list[float]:
        """Held-out perplexity (cosine for encoders) with each seed."""
        return [each.cosine if each.perplexity is None else each.perplexity for each in self.measured]

    @property
    def mean(self) -> float:
        """Mean of `values`."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """Sample standard deviation of `values`; 0 with one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def seconds(self) -> float:
        """Time that all seeds took together, with the evaluation."""
        return sum(each.seconds for each in self.measured)

    def average(self, value: Callable[[Measured], float | None]) -> float | None:
        """Returns the mean over seeds of a value; None if it was not measured with every seed."""
        known = [each for each in map(value, self.measured) if each is not None]
        return statistics.fmean(known) if len(known) == len(self.measured) else None


def _difference(stored: Any, present: Any, name: str = "") -> str:
    """Returns where two values made of dictionaries differ, in words; empty if they do not."""
    if isinstance(stored, dict) and isinstance(present, dict):
        for key in [*present, *(key for key in stored if key not in present)]:
            if difference := _difference(stored.get(key), present.get(key), f"{name} {key}".strip()):
                return difference
        return ""
    return "" if stored == present else f"{name} was {stored!r}, now {present!r}"
