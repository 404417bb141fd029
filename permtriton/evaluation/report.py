"""``permtriton report``: one HTML page about compiled folders, made of their records.

**Add a section:** its figures and tables in `Page` and `page_of`, its words in ``report.html.jinja``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from permtriton.checkpoint.read_record import described_sparsity
from permtriton.errors import ConfigError
from permtriton.evaluation.compare_results import Cell, columns, read_comparison
from permtriton.evaluation.report_folders import Compiled, MaskCorner, mask_corners, read_folders
from permtriton.evaluation.report_plots import Series, bitmap, chart
from permtriton.model.name import layer_number
from permtriton.util.extras import require
from permtriton.util.machine import format_bytes
from permtriton.util.output_files import check_file, path_of, real_path, write_file


@dataclass(frozen=True)
class Picture:
    """A figure with its words: ``alt`` is for those who cannot see it, and the ``series`` make the legend."""

    svg: str
    alt: str
    caption: str
    series: Sequence[Series] = ()


@dataclass(frozen=True)
class Table:
    caption: str
    columns: Mapping[str, Sequence[str]]  # the cells below each heading

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return list(zip(*self.columns.values(), strict=True))


@dataclass(frozen=True)
class Page:
    """Everything that a report shows; ``lead`` sums up the result, ``warning`` says why numbers do not compare."""

    title: str
    lead: str
    warning: str
    folders: Sequence[Compiled]
    tables: Sequence[Table]
    progress: Sequence[Picture]  # of the steps
    importance: Sequence[Picture]
    masks: Sequence[Picture]
    corners: Sequence[MaskCorner]


def report(
    folders: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    comparison: str | Path | None = None,
    masks: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes one HTML page about compiled folders, as ``permtriton report`` does.

    Args:
        folders: one folder that permtriton wrote, or several, which are shown side by side.
        output: file to write; None for ``FOLDER-report.html`` in the current folder, by the first folder's name.
        comparison: JSON report of ``permtriton compare``, whose table is shown, too.
        masks: name of the linear whose masks are drawn side by side; None for the last linear of the first layer.
        overwrite: whether an earlier file may be replaced.

    Returns:
        The absolute path of the file.

    Raises:
        PermTritonError: a folder cannot be read, or the file cannot be written.

    Example:
        >>> import permtriton
        >>> permtriton.report(["my-model-2of4", "my-model-2of4-fused"], "report.html").name
        'report.html'
    """
    require("a report", "jinja2")
    several: Sequence[Any] = folders if isinstance(folders, list | tuple) else [folders]
    paths = [path_of("folders", folder) for folder in several]
    if not paths:
        raise ConfigError("no folder: give at least one output of permtriton compile")
    default = f"{real_path(paths[0]).name}-report.html"
    target = path_of("output", default if output is None else output)
    check_file(target, overwrite=overwrite)
    read = None if comparison is None else read_comparison(path_of("comparison", comparison))
    compiled = read_folders(paths)
    page = html(page_of(compiled, read, mask_corners(compiled, masks)))
    write_file(target, page.encode("utf-8", "replace"))
    return real_path(target)


def html(page: Page) -> str:
    """Returns the page as HTML that needs no other file. All text is escaped; figures (SVG) are inserted unescaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("permtriton.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(page=page, version=metadata.version("permtriton"))


def page_of(
    folders: Sequence[Compiled], comparison: Mapping[str, Any] | None, corners: Sequence[MaskCorner] = ()
) -> Page:
    models = list(dict.fromkeys(folder.model for folder in folders))
    patterns = dict.fromkeys(described_sparsity(folder.record) for folder in folders)
    count = f", {len(folders)} folders side by side" if len(folders) > 1 else ""
    lead, group, warning = _verdict(folders), folders[0].pattern, ""
    if all(folder.pattern == group for folder in folders):
        lead += f" Of every {group.group} consecutive weights of a row, {group.kept} are kept"
        mixed = any("patterns" in folder.record for folder in folders)
        lead += ", but in linears with a pattern of their own." if mixed else "."
    if len(models) > 1:
        warning = f"The folders come from different models: {', '.join(models)}."
    elif len(_protocols(folders)) > 1:
        warning = "The folders were measured on different texts, or in different ways."
    return Page(
        title=f"{', '.join(models)} at {', '.join(patterns)}{count}",
        lead=lead,
        warning=warning,
        folders=folders,
        tables=[_results(folders), *([_comparison(comparison)] if comparison else ())],
        progress=_progress(folders),
        importance=_importance(folders),
        masks=[Picture(bitmap(c.kept.tolist()), f"Kept weights of {c.linear} in {c.label}", c.label) for c in corners],
        corners=corners,
    )


def _numbers(values: Sequence[float | None], digits: int = 3) -> list[str]:
    """Returns a column's cells, with as many decimals as give the smallest number ``digits`` significant digits."""
    smallest = min((abs(value) for value in values if value), default=1.0)
    decimals = min(max(digits - 1 - math.floor(math.log10(smallest)), 0), 6)
    return ["–" if value is None else f"{value:,.{decimals}f}" for value in values]


def _verdict(folders: Sequence[Compiled]) -> str:
    """Returns in one sentence how good the best of the compiled models is."""
    measured, protocols = [folder for folder in folders if folder.evaluation], _protocols(folders)
    if not measured:
        return f"{folders[0].model} was pruned; how good it still is was not measured."
    if len(protocols) > 1:
        return f"{len(measured)} compiled models, measured in ways that do not compare."
    measure, model, *_ = protocols[0]
    best = (min if measure == "perplexity" else max)(measured, key=lambda folder: folder.evaluation["compiled"])
    before, after = best.evaluation["dense"], best.evaluation["compiled"]
    dense, compiled = _numbers([before, after], 4)
    origin = f"pruned as in {best.label}" + f", the best of the {len(measured)} folders here" * (len(measured) > 1)
    if measure != "perplexity":
        return f"The last hidden states of {model}, {origin}, have a cosine of {compiled} with the dense model's."
    losing = f"goes from {dense} to {compiled} ({after / before - 1:+.1%}) when it is {origin}"
    return f"The perplexity of {model} on the held-out text {losing}."


def _protocols(folders: Sequence[Compiled]) -> list[tuple[Any, ...]]:
    """Returns the distinct (measure, model, text, dense model's value) with which the folders were measured."""
    measured = [(folder.model, folder.evaluation) for folder in folders if folder.evaluation]
    keys = ((entry["measure"], model, entry.get("text"), f"{entry['dense']:.4g}") for model, entry in measured)
    return list(dict.fromkeys(keys))


def _results(folders: Sequence[Compiled]) -> Table:
    """The measures of the dense and the compiled models, their time, memory and size."""
    evaluations = [folder.evaluation for folder in folders]
    ratios = [entry["compiled"] / entry["dense"] if entry.get("dense") else None for entry in evaluations]
    texts = dict.fromkeys(Path(entry["text"]).name for entry in evaluations if "text" in entry)
    caption = f"Held-out text: {', '.join(texts)}" if texts else "No held-out text was evaluated"
    columns = {
        "folder": [folder.label for folder in folders],
        _measure(folders): _numbers([entry.get("compiled") for entry in evaluations], 4),
        "dense model": _numbers([entry.get("dense") for entry in evaluations], 4),
        "ratio": _numbers(ratios),
        "seconds": _numbers([folder.seconds for folder in folders]),
        "peak memory": [format_bytes(folder.record["memory"]["peak"]) for folder in folders],
        "dense size": [format_bytes(folder.sizes["dense"]) for folder in folders],
        "packed size": [format_bytes(folder.sizes["packed"]) + " *" * (not folder.is_packed) for folder in folders],
    }
    return Table(caption, columns)


def _measure(folders: Sequence[Compiled]) -> str:
    return " or ".join(dict.fromkeys(measure for measure, *_ in _protocols(folders))) or "not measured"


def _comparison(comparison: Mapping[str, Any]) -> Table:
    measure, seeds = comparison["measure"], len(comparison["seeds"])
    known = {name: cells for name, cells in columns(comparison).items() if any(cell is not None for cell in cells)}
    conditions = (
        f"text {Path(comparison['text']).name}",
        f"{comparison['tokens']:,} tokens",
        f"{seeds} seeds, ± is their sample standard deviation" if seeds > 1 else "",
        comparison["device"],
    )
    caption = f"All methods on {Path(comparison['model']).name}: {'; '.join(filter(None, conditions))}"
    return Table(caption, {name: _cells(cells, 4 if name == measure else 3) for name, cells in known.items()})


def _cells(values: Sequence[Cell], digits: int) -> list[str]:
    numbers = [value for value in values if not isinstance(value, str)]
    return _numbers(numbers, digits) if len(numbers) == len(values) else [str(value or "") for value in values]


def _progress(folders: Sequence[Compiled]) -> list[Picture]:
    """The progress of the steps: the loss by round or epoch, and the error of each layer."""
    by_step: dict[str, list[tuple[Compiled, Mapping[str, Any]]]] = {}
    for folder in folders:
        for step in folder.record["steps"]:
            by_step.setdefault(step["name"], []).append((folder, step))
    pictures = [picture for name, reports in by_step.items() for picture in _history(name, reports)]
    for name, reports in by_step.items():
        errors = [
            (folder, [(part["name"], part["start"], part["end"]) for part in step["parts"]]) for folder, step in reports
        ]
        pictures += _by_layer(f"Step {name}: error", "error", errors)
    return pictures


def _history(name: str, reports: Sequence[tuple[Compiled, Mapping[str, Any]]]) -> list[Picture]:
    """Returns a figure of a step's losses by round or epoch; none if no folder has two losses."""
    series = []
    for folder, step in reports:
        for key, dashed in (("held_out", False), ("loss", True)):
            points = [(row[step["unit"]], row[key]) for row in step["history"] if row.get(key) is not None]
            series += [Series(folder.label, points, folder.colour, dashed)] if len(points) > 1 else []
    if not series:
        return []
    unit, ((_, start), *_, (_, end)) = reports[0][1]["unit"], series[0].points
    alt = f"Step {name}: from {start:.4f} to {end:.4f} in {len(series[0].points) - 1} {unit}s"
    caption = f"Step {name}: loss by {unit}, dashed on its samples, solid held out."
    return [Picture(chart(series, unit, "loss"), alt, caption, series)]


def _importance(folders: Sequence[Compiled]) -> list[Picture]:
    """The importance that masks retain before and after the permutation, for all folders on one axis."""
    retained = [(folder, folder.record["retained_importance"].items()) for folder in folders]
    percent = [
        (folder, [(name, 100 * s["before"], 100 * s["after"]) for name, s in shares]) for folder, shares in retained
    ]
    return _by_layer("Importance retained", "importance retained, %", percent)


def _by_layer(
    what: str, axis: str, folders: Sequence[tuple[Compiled, Sequence[tuple[str, float, float]]]]
) -> list[Picture]:
    """Draws the means over the modules of each layer before and after; nothing where no layer has a value.

    Args:
        folders: the folders, each with the values of its modules: (name, before, after).
    """
    series = []
    for folder, values in folders:
        by_layer: dict[int, list[tuple[float, float]]] = {}
        for name, before, after in values:
            if (number := layer_number(name)) is not None:
                by_layer.setdefault(number, []).append((before, after))
        for column, dashed in ((0, True), (1, False)) if by_layer else ():
            means = [(layer, fmean(pair[column] for pair in pairs)) for layer, pairs in sorted(by_layer.items())]
            series.append(Series(folder.label, means, folder.colour, dashed))
    if not series:
        return []
    caption = f"{what} by layer: dashed before, solid after."
    return [Picture(chart(series, "layer", axis), f"{what} by layer", caption, series)]
