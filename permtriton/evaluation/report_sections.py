"""The sections of a report: each function makes one, with text, figures and tables, from the records of the folders."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from permtriton.evaluation.compare_methods import DENSE
from permtriton.evaluation.compare_results import Cell, columns
from permtriton.evaluation.report_folders import Compiled, MaskCorner
from permtriton.evaluation.report_plots import Series, bitmap, chart, colour, legend
from permtriton.model.name import layer_number
from permtriton.util.machine import format_bytes


@dataclass(frozen=True)
class Picture:
    """A figure with its words: ``alt`` is for those who cannot see it, ``legend`` has colours and their names."""

    svg: str
    alt: str
    caption: str
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Table:
    """A table, whose rows may have a colour each, and which may be ``folded`` until the reader opens it."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    colours: Sequence[str] = ()
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A section with its anchor and heading; figures and tables stand side by side where there is room."""

    id: str
    title: str
    text: str
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()


def numbers(values: Sequence[float | None], digits: int = 3) -> list[str]:
    """Returns a column's cells, all with the decimals that give the smallest number ``digits`` significant digits."""
    smallest = min((abs(value) for value in values if value), default=1.0)
    decimals = min(max(digits - 1 - math.floor(math.log10(smallest)), 0), 6)
    return ["–" if value is None else f"{value:,.{decimals}f}" for value in values]


def verdict(folders: Sequence[Compiled]) -> str:
    """Returns in one sentence how good the best of the compiled models is."""
    measured = [folder for folder in folders if "dense" in folder.record["evaluation"]]
    if not measured:
        return f"{folders[0].model} was pruned; how good it still is was not measured."
    sign = 1 if measured[0].record["evaluation"]["measure"] == "perplexity" else -1
    if len(measures_of(measured)) > 1:
        return f"{len(measured)} compiled models, measured in ways that do not compare."
    best = min(measured, key=lambda folder: sign * folder.record["evaluation"]["compiled"])
    evaluation = best.record["evaluation"]
    dense, compiled = numbers([evaluation["dense"], evaluation["compiled"]], 4)
    way = f"pruned as in {best.label}" + f", the best of the {len(measured)} folders here" * (len(measured) > 1)
    if sign < 0:
        return f"The last hidden states of {best.model}, {way}, have a cosine of {compiled} with the dense model's."
    change = evaluation["compiled"] / evaluation["dense"] - 1
    return (
        f"The perplexity of {best.model} on the held-out text goes from {dense} to {compiled} ({change:+.1%}) when it "
        f"is {way}."
    )


def measures_of(folders: Sequence[Compiled]) -> list[tuple[Any, ...]]:
    """Returns how the folders were measured, each way once: (measure, model, text, the dense model's value)."""
    measured = [(folder, folder.record["evaluation"]) for folder in folders if "dense" in folder.record["evaluation"]]
    ways = ((entry["measure"], folder.model, entry.get("text"), f"{entry['dense']:.4g}") for folder, entry in measured)
    return list(dict.fromkeys(ways))


def result(folders: Sequence[Compiled], comparison: Mapping[str, Any] | None) -> Section:
    """The measures of the dense and the compiled models, their time and memory, and a report of ``compare``."""
    evaluations = [folder.record["evaluation"] for folder in folders]
    measures = dict.fromkeys(entry["measure"] for entry in evaluations if "dense" in entry)
    measured = [(entry["dense"], entry["compiled"]) if "dense" in entry else (None, None) for entry in evaluations]
    ratios = [compiled / dense if dense and compiled is not None else None for dense, compiled in measured]
    name = " or ".join(measures) or "not measured"
    table = {
        "folder": [folder.label for folder in folders],
        name: numbers([compiled for _, compiled in measured], 4),
        "dense model": numbers([dense for dense, _ in measured], 4),
        "ratio": numbers(ratios),
        "seconds": numbers([folder.seconds for folder in folders]),
        "peak memory": [format_bytes(folder.record["memory"]["peak"]) for folder in folders],
        "dense size": [format_bytes(folder.sizes["dense"]) for folder in folders],
        "packed size": [format_bytes(folder.sizes["packed"]) + " *" * (not folder.is_packed) for folder in folders],
    }
    text = "Seconds are those of the compilation without the evaluation."
    if not all(folder.is_packed for folder in folders):
        text += " * follows from the pattern: the kept values, and the position of each in its group."
    for folder in (folder for folder in folders if folder.is_quantized):
        text += f" {folder.label}: measured before it was stored in 8 bits; permtriton evaluate measures it as it is."
    texts = dict.fromkeys(Path(entry["text"]).name for entry in evaluations if {"dense", "text"} <= entry.keys())
    caption = f"Held-out text: {', '.join(texts)}" if texts else "No held-out text was evaluated"
    colours = [colour(number) for number in range(len(folders))]
    tables = [Table(caption, list(table), list(zip(*table.values(), strict=True)), colours)]
    pictures = [_quality(folders, measured, name)] if measures else []
    if comparison is not None:
        pictures.append(_compared(comparison))
        tables.append(_comparison(comparison))
    return Section("result", "Result", text, pictures, tables)


def _quality(
    folders: Sequence[Compiled], measured: Sequence[tuple[float | None, float | None]], measure: str
) -> Picture:
    shown = numbers([compiled for _, compiled in measured], 4)
    series = [
        Series(folder.label, [(folder.seconds, compiled)], number, "dots", [shown[number]])
        for number, (folder, (_, compiled)) in enumerate(zip(folders, measured, strict=True))
        if compiled is not None
    ]
    dense = next(value for value, _ in measured if value is not None)
    line = _dense_line(dense) if len(measures_of(folders)) == 1 else None
    svg = chart(series, "seconds to compile", measure, log=(True, True), reference=line)
    alt = f"{measure} against seconds; the table has the numbers"
    return Picture(svg, alt, "Quality against time.", legend(series))


def _dense_line(value: float) -> tuple[str, float]:
    return f"dense {numbers([value], 4)[0]}", value


def _compared(comparison: Mapping[str, Any]) -> Picture:
    """Returns the picture of a comparison; it names the methods that no other one beats in both time and measure."""
    sign = 1 if comparison["measure"] == "perplexity" else -1
    dense = next(row["mean"] for row in comparison["rows"] if row["method"] == DENSE)
    rows = [row for row in comparison["rows"] if row["method"] != DENSE]
    points = [((row["compile_seconds"] or row["seconds"]) / len(row["values"]), row["mean"]) for row in rows]
    labels = []
    for row, (seconds, mean) in zip(rows, points, strict=True):
        beaten = any(x < seconds and sign * y <= sign * mean for x, y in points)
        pattern = row["pattern"] if len(comparison["patterns"]) > 1 else ""
        labels.append("" if beaten else ", ".join(filter(None, (row["method"], pattern, row["setting"]))))
    series = [Series("methods", points, 0, "dots", labels)]
    measure, line = comparison["measure"], _dense_line(dense)
    svg = chart(series, "seconds to compile", measure, log=(True, True), reference=line)
    caption = "All methods by permtriton compare. Named are those that no other beats in both."
    return Picture(svg, f"{measure} of {len(rows)} methods against seconds", caption)


def _comparison(comparison: Mapping[str, Any]) -> Table:
    table = columns(comparison).items()
    shown = {name: values for name, values in table if any(value is not None for value in values)}
    cells = [_column(values, 4 if name == comparison["measure"] else 3) for name, values in shown.items()]
    seeds = len(comparison["seeds"])
    conditions = (
        f"text {Path(comparison['text']).name}",
        f"{comparison['tokens']:,} tokens",
        f"{seeds} seeds, ± is their sample standard deviation" if seeds > 1 else "",
        comparison["device"],
    )
    caption = f"All methods on {Path(comparison['model']).name}: {'; '.join(filter(None, conditions))}"
    return Table(caption, list(shown), list(zip(*cells, strict=True)), folded=True)


def _column(values: Sequence[Cell], digits: int) -> list[str]:
    known = [value for value in values if not isinstance(value, str)]
    return numbers(known, digits) if len(known) == len(values) else [str(value or "") for value in values]


Reports = list[tuple[int, Compiled, Mapping[str, Any]]]  # number of the folder, the folder, its record of a step


def search(folders: Sequence[Compiled]) -> Section:
    """The progress of the steps: the loss by round or epoch, and the error of each layer."""
    by_step: dict[str, Reports] = {}
    for number, folder in enumerate(folders):
        for step in folder.record["steps"]:
            by_step.setdefault(step["name"], []).append((number, folder, step))
    drawn = [_history(name, reports) for name, reports in by_step.items()]
    for name, reports in by_step.items():
        errors = [
            (number, folder.label, [(part["name"], part["start"], part["end"]) for part in step["parts"]])
            for number, folder, step in reports
        ]
        drawn.append(_by_layer(f"Step {name}: error", "error", errors, log=True))
    pictures = [picture for picture in drawn if picture is not None]
    text = (
        "How the loss on the calibration text fell while an order was searched or learned or kept weights were "
        "trained, and the error of each layer. Step 0 is the state before. Losses of different steps do not compare."
        if pictures
        else "The compilation searched, learned and trained nothing in rounds: order and weights follow from one "
        "calculation."
    )
    return Section("search", "How it was found", text, pictures)


def _history(name: str, reports: Reports) -> Picture | None:
    series, words, unit = [], [], reports[0][2]["unit"]
    for number, folder, step in reports:
        entries = step["history"]
        train_look = "dashed" if entries and "held_out" in entries[0] else "line"
        for key, look in (("held_out", "line"), ("loss", train_look)):
            known = [(entry[step["unit"]], entry[key]) for entry in entries if entry.get(key) is not None]
            if len(known) > 1:
                series.append(Series(folder.label, known, number, look))
        last = next((e for e in entries if e[step["unit"]] == step["kept"]), entries[-1]) if entries else {}
        if len(entries) > 1 and "moved" in last:
            place = f"{step['unit']} {last[step['unit']]}"
            words.append(f"{folder.label}: {last['moved']:,} channels are elsewhere after {place}.")
    if not series:
        return None
    both = any(curve.look == "dashed" for curve in series)
    caption = f"Step {name}: loss by {unit}{'; dashed on its samples, solid held out' * both}. {' '.join(words)}"
    points = series[0].points
    alt = f"Step {name}: from {points[0][1]:.4f} to {points[-1][1]:.4f} in {len(points) - 1} {unit}s"
    return Picture(chart(series, unit, "loss"), alt, caption, legend(series))


def importance(folders: Sequence[Compiled]) -> Section:
    """The importance that masks retain before and after the permutation, for all folders on one axis."""
    shares = []
    for number, folder in enumerate(folders):
        retained = folder.record["retained_importance"].items()
        values = [(name, 100 * entry["before"], 100 * entry["after"]) for name, entry in retained]
        shares.append((number, folder.label, values))
    picture = _by_layer("Importance retained", "importance retained, %", shares)
    scores = dict.fromkeys(folder.record["config"]["importance"] for folder in folders)
    text = (
        "A mask keeps the weights with the highest scores of each group, and the order of the channels decides who "
        "competes with whom. Shown is the share of all scores that a mask retains in the dense model's order (before) "
        "and in the new one (after)."
        + (f" Folders with different scores ({', '.join(scores)}) do not compare." if len(scores) > 1 else "")
    )
    return Section("importance", "Importance that masks retain", text, [picture] if picture else [])


def _by_layer(
    what: str, axis: str, folders: Sequence[tuple[int, str, Sequence[tuple[str, float, float]]]], *, log: bool = False
) -> Picture | None:
    """Draws the means over the modules of each layer before and after; None where no folder has a value.

    Args:
        folders: number and label of each folder, and the values of its modules: (name, before, after).
    """
    numbered = any(layer_number(name) is not None for *_, values in folders for name, *_ in values)
    series, place = [], "layer" if numbered else "part"
    for number, label, values in folders:
        by_place: dict[int, list[tuple[float, float]]] = {}
        for part, (name, before, after) in enumerate(values):
            layer = layer_number(name) if numbered else part
            if layer is not None:
                by_place.setdefault(layer, []).append((before, after))
        for column, look in enumerate(("dashed", "line") if by_place else ()):
            means = [(layer, fmean(pair[column] for pair in by_place[layer])) for layer in sorted(by_place)]
            series.append(Series(label, means, number, look))
    if not series:
        return None
    caption = f"{what} by {place}: dashed before, solid after."
    return Picture(chart(series, place, axis, log=(False, log)), f"{what} by {place}", caption, legend(series))


def masks(corners: Sequence[MaskCorner]) -> Section:
    """The kept weights of all folders side by side, as in the appendix of the paper."""
    rows, columns = corners[0].kept.shape
    text = (
        f"The mask of {corners[0].linear}: its first {rows} outputs (down) and {columns} inputs (across), kept weights "
        "dark, in the dense model's order. Without a permutation, every group of consecutive inputs keeps the same "
        "number; with one, the members of a group lie elsewhere, so that channels that matter need not compete."
    )
    words = [(corner, f"Kept weights of {corner.linear} in {corner.label}") for corner in corners]
    pictures = [Picture(bitmap(corner.kept.tolist()), alt, corner.label) for corner, alt in words]
    return Section("masks", "Masks", text, pictures)
