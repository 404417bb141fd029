"""The sections of a report that are tables: the result, what was done and verified, orders and what stays dense."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from permtriton.checkpoint.card import checks, facts
from permtriton.checkpoint.plan_entries import destination, grouped
from permtriton.evaluation.compare_methods import DENSE, FUSED
from permtriton.evaluation.compare_results import Cell, columns
from permtriton.reporting.compiled import Compiled
from permtriton.reporting.pages import Picture, Section, Table, numbers
from permtriton.reporting.plots import Series, chart, colour, legend
from permtriton.util.machine import format_bytes


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
    """Returns in which ways the folders that were measured were: measure, model, text and the dense model's value."""
    measured = [(folder, folder.record["evaluation"]) for folder in folders if "dense" in folder.record["evaluation"]]
    ways = ((each["measure"], folder.model, each.get("text"), f"{each['dense']:.4g}") for folder, each in measured)
    return list(dict.fromkeys(ways))


def result(folders: Sequence[Compiled], comparison: Mapping[str, Any] | None) -> Section:
    """How good the dense and the compiled models are, what they took, and the result of ``permtriton compare``."""
    evaluations = [folder.record["evaluation"] for folder in folders]
    measures = dict.fromkeys(each["measure"] for each in evaluations if "dense" in each)
    measured = [(each["dense"], each["compiled"]) if "dense" in each else (None, None) for each in evaluations]
    ratios = [compiled / dense if dense and compiled is not None else None for dense, compiled in measured]
    cells = zip(
        (folder.label for folder in folders),
        numbers([compiled for _, compiled in measured], 4),
        numbers([dense for dense, _ in measured], 4),
        numbers(ratios),
        numbers([folder.seconds for folder in folders]),
        (format_bytes(folder.record["memory"]["peak"]) for folder in folders),
        (format_bytes(folder.sizes["dense"]) for folder in folders),
        (format_bytes(folder.sizes["packed"]) + "" if folder.is_packed else f"{format_bytes(folder.sizes['packed'])} *"
         for folder in folders),
        strict=True,
    )  # fmt: skip
    name = " or ".join(measures) or "not measured"
    head = ("folder", name, "dense model", "ratio", "seconds", "peak memory", "dense size", "packed size")
    text = "Seconds are those of the compilation without the evaluation."
    if not all(folder.is_packed for folder in folders):
        text += " * follows from the pattern: the kept values, and the position of each in its group."
    for folder in folders:
        if folder.is_quantized:
            text += f" {folder.label}: measured before its weights lost bits; permtriton evaluate measures it as it is."
    texts = dict.fromkeys(Path(each["text"]).name for each in evaluations if {"dense", "text"} <= each.keys())
    caption = f"Held-out text: {', '.join(texts)}" if texts else "No held-out text was evaluated"
    tables = [Table(caption, head, list(cells), [colour(number) for number in range(len(folders))])]
    pictures = list(_quality(folders, measured, name))
    if comparison is not None:
        if any(row["method"] != DENSE for row in comparison["rows"]):
            pictures.append(_compared(comparison))
        tables.append(_comparison(comparison))
    return Section("result", "Result", text, pictures, tables)


def _quality(
    folders: Sequence[Compiled], measured: Sequence[tuple[float | None, float | None]], measure: str
) -> Iterator[Picture]:
    shown = numbers([compiled for _, compiled in measured], 4)
    series = [
        Series(folder.label, [(folder.seconds, compiled)], number, "dots", [shown[number]])
        for number, (folder, (_, compiled)) in enumerate(zip(folders, measured, strict=True))
        if compiled is not None
    ]
    if series:
        lines = [(f"dense {numbers([value], 4)[0]}", value) for value, _ in measured if value is not None]
        line = lines[0] if len(measures_of(folders)) == 1 else None
        svg = chart(series, "seconds to compile", measure, log=(True, True), reference=line)
        alt = f"{measure} against seconds; the table has the numbers"
        yield Picture(svg, alt, "Quality against time.", legend(series))


def _compared(comparison: Mapping[str, Any]) -> Picture:
    """Returns the picture of a comparison, with the names of the methods that no other one beats in both values."""
    sign = 1 if comparison["measure"] == "perplexity" else -1
    dense = next(row["mean"] for row in comparison["rows"] if row["method"] == DENSE)
    rows = [row for row in comparison["rows"] if row["method"] != DENSE]
    points = [((row["compile_seconds"] or row["seconds"]) / len(row["values"]), row["mean"]) for row in rows]
    series = []
    for look, fused in (("dots", False), ("rings", True)):
        chosen = [number for number, row in enumerate(rows) if row["method"].endswith(FUSED) == fused]
        labels = [
            ""
            if any(x < points[n][0] and sign * y <= sign * points[n][1] for x, y in points)
            else _name(comparison, rows[n])
            for n in chosen
        ]
        if chosen:
            series.append(Series(look, [points[n] for n in chosen], 0, look, labels))
    line = (f"dense {numbers([dense], 4)[0]}", dense)
    svg = chart(series, "seconds to compile", comparison["measure"], log=(True, True), reference=line)
    caption = "All methods by permtriton compare. Named are those that no other beats in both; rings: layout fused."
    return Picture(svg, f"{comparison['measure']} of {len(rows)} methods against seconds", caption)


def _name(comparison: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    pattern = row["pattern"] if len(comparison["patterns"]) > 1 else ""
    return ", ".join(filter(None, (row["method"].removesuffix(FUSED), pattern, row["setting"])))


def _comparison(comparison: Mapping[str, Any]) -> Table:
    headers, rows = columns(comparison)
    shown = [
        (name, [row[n] for row in rows]) for n, name in enumerate(headers) if any(row[n] is not None for row in rows)
    ]
    cells = [_column(values, 4 if name == comparison["measure"] else 3) for name, values in shown]
    seeds = len(comparison["seeds"])
    conditions = (
        f"text {Path(comparison['text']).name}",
        f"{comparison['tokens']:,} tokens",
        f"{seeds} seeds, ± is their sample standard deviation" if seeds > 1 else "",
        comparison["device"],
    )
    caption = f"All methods on {Path(comparison['model']).name}: {'; '.join(filter(None, conditions))}"
    return Table(caption, [name for name, _ in shown], list(zip(*cells, strict=True)), folded=True)


def _column(values: Sequence[Cell], digits: int) -> list[str]:
    known = [value for value in values if not isinstance(value, str)]
    return numbers(known, digits) if len(known) == len(values) else [str(value or "") for value in values]


def orders(folders: Sequence[Compiled]) -> Section:
    """Where permutations went, what they cost at run time, and what stays dense."""
    ends = _merged(folders, _ends)
    left = _merged(folders, lambda each: [*each.record["skipped"].items(),
                                          *(("barrier", why) for why in each.record["barriers"])])  # fmt: skip
    text = (
        "A folded permutation is part of the weights, and one that a norm writes costs no extra bytes: both are free. "
        "A gather copies its input once per linear; its bytes are counted in 16 bits, read and written."
    )
    which = ("folders",) if len(folders) > 1 else ()
    tables = [
        Table("Permutations, * for every layer", ("permutation", "where it ends", "moved", *which), ends),
        Table("Left dense, or in its order", ("what", "why", *which), left),
        beside(folders, _cost, "Cost at run time"),
    ]
    return Section("orders", "Orders of channels", text, tables=tables)


def _merged(
    folders: Sequence[Compiled], rows_of: Callable[[Compiled], Iterable[tuple[str, ...]]]
) -> list[tuple[str, ...]]:
    """Returns the rows of all folders, each once, and which folders have it if there are several."""
    labels_by_row: dict[tuple[str, ...], list[str]] = {}
    for folder in folders:
        for row in rows_of(folder):
            labels_by_row.setdefault(row, []).append(folder.label)
    if len(folders) == 1:
        return list(labels_by_row)
    return [(*row, "all" if len(of) == len(folders) else "; ".join(of)) for row, of in labels_by_row.items()]


def _ends(folder: Compiled) -> Iterator[tuple[str, ...]]:
    spaces = [space for space in folder.record["permutations"] if space["moved"] or space["reason"]]
    cells = [(space["name"], destination(space), f"{space['channels']:,}") for space in spaces]
    for row, members in grouped(cells):
        moved = [spaces[number]["moved"] for number in members]
        span = f"{min(moved):,}" + (f" to {max(moved):,}" if max(moved) > min(moved) else "")
        yield (*row[:2], f"{span} of {row[2]}")


def details(folders: Sequence[Compiled]) -> Section:
    """What was done, how long each stage took, and what was compared with the dense model."""
    text = (
        "A folder is only written if every check passes; differences are relative to the largest output. Speed at run "
        "time is not measured."
    )
    tables = [
        beside(folders, facts, "What was done"),
        _stages(folders),
        beside(folders, checks, "What was verified"),
    ]
    return Section("details", "Done and verified", text, tables=tables)


def _stages(folders: Sequence[Compiled]) -> Table:
    """Returns the seconds of each stage, in the order in which they ran; those of later folders alone are last."""
    order = dict.fromkeys(stage for folder in folders for stage in folder.record["seconds"])
    seconds = [[folder.record["seconds"].get(stage) for stage in order] for folder in folders]
    seconds = [[*values, sum(value for value in values if value is not None)] for values in seconds]
    cells = [["–" if value is None else f"{value:,.1f}" for value in values] for values in seconds]
    rows = list(zip([*order, "in all"], *cells, strict=True))
    return Table("Seconds by stage", ("", *(folder.label for folder in folders)), rows)


def repeat(folders: Sequence[Compiled]) -> Section:
    """The commands."""
    text = (
        "The same command on the same machine gives the same result. Sums depend on the processor and the number of "
        "threads, and so, a little, do orders that are searched or learned."
    )
    if any("trained" in folder.record for folder in folders):
        text += " How a folder was trained after pruning is not recorded: its command gives the model before that."
    code = ["\n".join(dict.fromkeys(folder.record["command"] for folder in folders))]
    return Section("repeat", "Repeat it", text, code=code)


def beside(
    folders: Sequence[Compiled], rows_of: Callable[[Mapping[str, Any]], Iterable[tuple[str, str]]], caption: str
) -> Table:
    """Returns a table with a row per name that a record has, and a column per folder."""
    found = [dict(rows_of(folder.record)) for folder in folders]
    names = dict.fromkeys(name for rows in found for name in rows)
    cells = [(name, *(rows.get(name, "–") for rows in found)) for name in names]
    return Table(caption, ("", *(folder.label for folder in folders)), cells)


def _cost(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "gathers", f"{sum(space['gathers'] for space in record['permutations']):,}"
    yield "bytes per token", f"{sum(space['bytes_per_token'] for space in record['permutations']):,}"
    yield "hidden states", _hidden_states(record["hidden_states"])


def _hidden_states(order: Mapping[str, Any]) -> str:
    if "why" in order:
        return f"in an order that is not known ({order['why']})"
    return "in a new order; permtriton.json has its inverse" if order["permuted"] else "in the dense model's order"
