"""The report of a comparison, as its JSON file holds it, and its table, which the terminal, files and pages show."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from permtriton.comparison.methods import DENSE
from permtriton.comparison.results import RowResult
from permtriton.comparison.run import Benchmark
from permtriton.data.media import is_media
from permtriton.data.samples import Samples
from permtriton.evaluation.measures import DISTANCES
from permtriton.model.forward import with_tokens
from permtriton.model.seq2seq import with_decoder_ids
from permtriton.util import machine

Cell = str | int | float | None
Rows = Sequence[Sequence[Cell]]


def report_of(
    results: Sequence[RowResult],
    benchmark: Benchmark,
    *,
    model: str,
    text: str,
    seeds: Sequence[int],
    ablation: str | None,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Returns what is known of a comparison, as JSON can hold it.

    Args:
        results: result of each row, the dense model's first.
        model: name of the dense model.
        ablation: name of the option that has several values, or None.
    """
    dense = benchmark.dense
    first, *others = [result.options for result in results if result.options]
    windows = with_tokens(dense, with_decoder_ids(dense, Samples.of(benchmark.windows)))
    return {
        "model": model,
        "measure": "cosine" if results[0].measured[0].perplexity is None else "perplexity",
        "text": text,
        "media": is_media(dense, text),
        "tokens": windows.positions,
        "window": windows.tokens,
        **({} if windows.special is None else {"special_tokens": windows.special.words}),
        "seeds": list(seeds),
        "patterns": list(dict.fromkeys(result.pattern for result in results if result.pattern)),
        "ablation": ablation,
        "config": {name: value for name, value in first.items() if all(each.get(name) == value for each in others)},
        "versions": dict(versions),
        "device": machine.device_name(dense.device),
        "system": platform.platform(),
        "rows": [_row(result) for result in results],
    }


def _row(result: RowResult) -> dict[str, Any]:
    peaks = [each.peak_bytes for each in result.measured if each.peak_bytes is not None]
    return {
        "method": result.method,
        "pattern": result.pattern,
        "setting": result.setting,
        "config": dict(result.options),
        "values": result.values,
        "mean": result.mean,
        "spread": result.spread,
        **{name: result.average(attrgetter(name)) for name in DISTANCES},
        "tasks": {name: _score(result, name) for name in result.measured[0].tasks},
        "accuracy": result.average(attrgetter("accuracy")),
        "seconds": round(result.seconds, 1),
        "compile_seconds": round(sum(each.compile_seconds for each in result.measured), 1),
        "peak_bytes": max(peaks) if len(peaks) == len(result.measured) else None,
        "by_seed": [asdict(each) for each in result.measured],
    }


def _score(result: RowResult, task: str) -> float | None:
    return result.average(lambda each: each.tasks[task])


def columns(report: Mapping[str, Any]) -> tuple[list[str], list[list[Cell]]]:
    """Returns the headers and the rows of a report's table.

    Args:
        report: what `report_of` returned, or `permtriton.comparison.record.read_comparison`.
    """
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
        if any(row[name] is not None for row in rows):
            table[distance.header] = [row[name] for row in rows]  # in its place, where it is the measure
    for name in rows[0]["tasks"]:
        table[name] = [row["tasks"][name] for row in rows]
    if rows[0].get("accuracy") is not None:
        table["mean acc"] = [row["accuracy"] for row in rows]
    table["seconds"] = [row["compile_seconds"] / len(row["values"]) if row["compile_seconds"] else None for row in rows]
    table["peak MiB"] = [row["peak_bytes"] // 2**20 if row["peak_bytes"] else None for row in rows]
    return list(table), [list(row) for row in zip(*table.values(), strict=True)]


def cell(value: Cell) -> str:
    """Returns a cell as people read it: five significant digits, and nothing for None."""
    if value is None:
        return ""
    return format(value, ".5g") if isinstance(value, float) else str(value)
