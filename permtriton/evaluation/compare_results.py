"""The results of a comparison: the file that keeps them until all are known, the rows of its report, and its table."""

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, with_config
from typing_extensions import TypedDict

from permtriton.checkpoint.read_record import OPEN
from permtriton.errors import ModelError, OutputError, reading
from permtriton.evaluation.compare_methods import DENSE
from permtriton.evaluation.measures import DISTANCES, Distances
from permtriton.model.headers import read_json
from permtriton.util.output_files import to_json, write_file
from permtriton.util.validation import checked

Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class Measured(Distances):
    """The measurements of one row with one seed."""

    perplexity: float | None  # held-out perplexity; None for encoders
    cosine: float  # never None, because a comparison always has a dense model
    # zero-shot score by the task's name and the metric's, such as ``arc_easy acc``; None where it is no finite number
    tasks: dict[str, float | None]
    # mean of ``acc`` over the tasks that have this metric; a group that has a score counts as one task. None for fewer
    # than two such tasks, or if one accuracy is no finite number
    accuracy: float | None
    seconds: float  # time of compilation and evaluation together
    compile_seconds: float  # time of the compilation alone


@dataclass
class ResultFile:
    """The finished results, in memory and, if ``path`` is not None, in a file from which a comparison continues."""

    path: Path | None  # JSON file, written after every result
    identity: Mapping[str, Any]  # the inputs that decide every result, by name, as JSON values
    results: dict[str, Measured] = field(default_factory=dict)  # each result by its `key`

    def key(self, **inputs: Any) -> str:
        """Returns the hash of everything that decides a result: the identity and ``inputs``, which are JSON values."""
        return hashlib.sha256(json.dumps([self.identity, inputs], sort_keys=True).encode()).hexdigest()

    def read(self) -> None:
        if self.path is not None and self.path.exists():
            hint = "--overwrite starts from scratch"
            with reading(f"{self.path} holds no results that can be continued ({hint})", OutputError):
                stored = json.loads(self.path.read_text(encoding="utf-8"))
                self.results = {key: Measured(**result) for key, result in stored.items()}

    def get(self, key: str, measure: Callable[[], Measured]) -> Measured:
        """Returns a result that is kept, or measures it and keeps it; if interrupted, the earlier file stays intact."""
        if key not in self.results:
            self.results[key] = measure()
            if self.path is not None:
                results = {key: asdict(result) for key, result in self.results.items()}
                write_file(self.path, to_json(results).encode())
        return self.results[key]


def row_of(entries: Mapping[str, Any], measured: Sequence[Measured]) -> dict[str, Any]:
    """Returns a row of a report, from its other ``entries`` and its measurements with each seed."""

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if len(known) == len(measured) else None

    values = [run.cosine if run.perplexity is None else run.perplexity for run in measured]
    return {
        **entries,
        "values": values,
        "mean": statistics.fmean(values),
        "spread": statistics.stdev(values) if len(values) > 1 else 0.0,
        **{name: mean(getattr(run, name) for run in measured) for name in DISTANCES},
        "tasks": {name: mean(run.tasks[name] for run in measured) for name in measured[0].tasks},
        "accuracy": mean(run.accuracy for run in measured),
        "seconds": round(sum(run.seconds for run in measured), 1),
        "compile_seconds": round(sum(run.compile_seconds for run in measured), 1),
        "by_seed": [asdict(run) for run in measured],
    }


def measure_of(row: Mapping[str, Any]) -> str:
    """Returns the name of the measure of a row's values."""
    return "cosine" if row["by_seed"][0]["perplexity"] is None else "perplexity"


@with_config(OPEN)
class Row(TypedDict):
    """The entries of a row that are read, beside the means of `DISTANCES`; each entry is for all seeds together."""

    method: str  # name of the method, or ``dense``
    pattern: str  # sparsity pattern; empty for dense
    setting: str  # setting of the ablation; empty without one
    values: Annotated[list[float], Field(min_length=1)]  # held-out perplexity (cosine for encoders) with each seed
    mean: float
    spread: float  # sample standard deviation of the values; 0 with one seed
    tasks: dict[str, float | None]  # mean of each score of `Measured`; None if it is None with any seed
    seconds: float  # time of all seeds together, with the evaluation
    compile_seconds: float | None  # the same without the evaluation


@with_config(OPEN)
class ComparisonReport(TypedDict):
    """The entries of the JSON report of ``permtriton compare`` that are read."""

    model: str
    measure: str
    text: str
    tokens: int
    seeds: list[int]
    patterns: list[str]
    ablation: str | None
    device: str
    rows: Annotated[list[Row], Field(min_length=1)]


def read_comparison(path: Path) -> dict[str, Any]:
    def refuse(problem: str) -> ModelError:
        return ModelError(f"{path}: {problem}: expected a file that permtriton compare --output wrote")

    return dict(checked(ComparisonReport, read_json(path), refuse))


def row_name(row: Mapping[str, Any], *, with_pattern: bool = True) -> str:
    pattern = row["pattern"] if with_pattern else ""
    return ", ".join(filter(None, (row["method"], pattern, row["setting"])))


def columns(report: Mapping[str, Any]) -> dict[str, list[Cell]]:
    rows, measure = report["rows"], report["measure"]
    dense = next((row["mean"] for row in rows if row["method"] == DENSE), None)
    table: dict[str, list[Cell]] = {"method": [row["method"] for row in rows]}
    if len(report["patterns"]) > 1:
        table["pattern"] = [row["pattern"] for row in rows]
    if report["ablation"]:
        table["setting"] = [row["setting"] for row in rows]
    table[measure] = [row["mean"] for row in rows]
    if len(report["seeds"]) > 1:
        table["±"] = [row["spread"] if len(row["values"]) > 1 else None for row in rows]
    if measure == "perplexity":
        table["against dense"] = [row["mean"] / dense if dense else None for row in rows]
    for name, distance in DISTANCES.items():
        if any(row.get(name) is not None for row in rows):
            table[distance.header] = [row.get(name) for row in rows]  # the measure's own column keeps its place
    for name in rows[0]["tasks"]:
        table[name] = [row["tasks"].get(name) for row in rows]
    if rows[0].get("accuracy") is not None:
        table["mean acc"] = [row.get("accuracy") for row in rows]
    table["seconds"] = [row["compile_seconds"] / len(row["values"]) if row["compile_seconds"] else None for row in rows]
    return table


def cell(value: Cell) -> str:
    """Returns a cell as text: a float with five significant digits, and nothing for None."""
    if value is None:
        return ""
    return format(value, ".5g") if isinstance(value, float) else str(value)
