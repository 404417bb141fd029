"""What was measured of each row, and the file that keeps it, so that an interrupted comparison continues."""

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from permtriton.errors import OutputError
from permtriton.evaluation.measures import Distances
from permtriton.util.durable import replace_file
from permtriton.util.validation import checked


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


@dataclass
class ResultFile:
    """The results so far, in memory and in a file.

    Attributes:
        path: JSON file, written after every result; None keeps them in memory only.
        identity: what decides every result, by name; values that JSON can hold.
        results: each result by its `key`.
    """

    path: Path | None
    identity: Mapping[str, Any]
    results: dict[str, Measured] = field(default_factory=dict)

    def key(self, **inputs: Any) -> str:
        """Returns the hash of everything that decides a result: the identity, and what else JSON can hold."""
        return hashlib.sha256(json.dumps([self.identity, inputs], sort_keys=True).encode()).hexdigest()

    def read(self) -> None:
        """Reads the results of an earlier run, if there is a file.

        Raises:
            OutputError: the file cannot be used.
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
        stored = checked(dict[str, dict[str, Any]], content, refuse)
        self.results = {key: checked(Measured, each, refuse) for key, each in stored.items()}

    def put(self, key: str, measured: Measured) -> Measured:
        """Adds a result, replaces the file and returns the result; if interrupted, the earlier file stays intact.

        Raises:
            OutputError: the file cannot be written.
        """
        self.results[key] = measured
        if self.path is None:
            return measured
        text = json.dumps({key: asdict(each) for key, each in self.results.items()}, indent=1) + "\n"
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
