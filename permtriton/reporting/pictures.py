"""The sections of a report that are pictures: how losses fell, what masks retain, and masks themselves."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from torch import Tensor

from permtriton.checkpoint.masks import Masks
from permtriton.errors import ConfigError
from permtriton.model.name import layer_number
from permtriton.reporting.compiled import Compiled, kind_of
from permtriton.reporting.pages import Picture, Section
from permtriton.reporting.plots import Series, chart, legend, svg


def search(folders: Sequence[Compiled]) -> Section:
    """What the steps report of their way: loss by round or epoch, the error of each layer."""
    reported: dict[str, list[tuple[int, Compiled, Mapping[str, Any]]]] = {}
    for number, folder in enumerate(folders):
        for step in folder.record["steps"]:
            reported.setdefault(step["name"], []).append((number, folder, step))
    pictures = [*_histories(reported), *_errors(reported)]
    text = (
        "How the loss on the calibration text fell while an order was searched or learned or kept weights were "
        "trained, and the error of each layer. Step 0 is the state before. Losses of different steps do not compare."
        if pictures
        else "The compilation searched, learned and trained nothing in rounds: order and weights follow from one "
        "calculation."
    )
    return Section("search", "How it was found", text, pictures)


Reported = Mapping[str, Sequence[tuple[int, Compiled, Mapping[str, Any]]]]


def _histories(reported: Reported) -> Iterator[Picture]:
    for name, of in reported.items():
        series, words = [], []
        for number, folder, step in of:
            entries, unit = step["history"], step["unit"]
            for key, look in (
                ("held_out", "line"),
                ("loss", "dashed" if "held_out" in (entries or [{}])[0] else "line"),
            ):
                known = [(entry[unit], entry[key]) for entry in entries if entry.get(key) is not None]
                if len(known) > 1:
                    series.append(Series(folder.label, known, number, look))
            last = next((e for e in entries if e[unit] == step["kept"]), entries[-1]) if entries else {}
            if len(entries) > 1 and "moved" in last:
                words.append(f"{folder.label}: {last['moved']:,} channels are elsewhere after {unit} {last[unit]}.")
        if series:
            unit = of[0][2]["unit"]
            both = any(each.look == "dashed" for each in series)
            caption = (
                f"Step {name}: loss by {unit}{'; dashed on its samples, solid held out' * both}. {' '.join(words)}"
            )
            points = [point for each in series[:1] for point in each.points]
            alt = f"Step {name}: from {points[0][1]:.4f} to {points[-1][1]:.4f} in {len(points) - 1} {unit}s"
            yield Picture(chart(series, unit, "loss"), alt, caption, legend(series))


def _errors(reported: Reported) -> Iterator[Picture]:
    for name, of in reported.items():
        series, place = [], "layer"
        for number, folder, step in of:
            for when, look in (("start", "dashed"), ("end", "line")):
                errors = _means((layer_number(part["name"]), part[when]) for part in step["parts"])
                if step["parts"] and not errors:
                    place, errors = "part", dict(enumerate(part[when] for part in step["parts"]))
                if errors:
                    series.append(Series(folder.label, list(errors.items()), number, look))
        if series:
            caption = f"Step {name}: error of each {place} before the step (dashed) and after it."
            svg = chart(series, place, "error", log=(False, True))
            yield Picture(svg, f"Step {name}: error by {place}, before and after", caption, legend(series))


def importance(folders: Sequence[Compiled]) -> Section:
    """What masks retain before and after the permutation, of all folders on one axis."""
    shares: list[Mapping[str, Any]] = [folder.record["retained_importance"] for folder in folders]
    kinds = list(dict.fromkeys(kind_of(name) for each in shares for name in each))
    views = (
        ("layer", layer_number, ()),
        ("kind of linear", lambda name: kinds.index(kind_of(name)), [name.removesuffix("_proj") for name in kinds]),
    )
    pictures = []
    for view, key, names in views:
        series = []
        for number, (folder, each) in enumerate(zip(folders, shares, strict=True)):
            shift = 0.12 * (number - (len(folders) - 1) / 2) if names else 0.0
            for when, look in (("before", "rings" if names else "dashed"), ("after", "dots" if names else "line")):
                means = _means((key(name), 100 * entry[when]) for name, entry in each.items())
                points = [(place + shift, mean) for place, mean in means.items()]
                if points:
                    series.append(Series(folder.label, points, number, look))
        if series:
            svg = chart(series, view, "importance retained, %", names=names)
            how = "rings before, dots after" if names else "dashed before, solid after"
            pictures.append(Picture(svg, f"Importance retained by {view}", f"By {view}: {how}.", legend(series)))
    scores = dict.fromkeys(folder.record["config"]["importance"] for folder in folders)
    text = (
        "A mask keeps the weights with the highest scores of each group, and the order of the channels decides who "
        "competes with whom. Shown is the share of all scores that a mask retains in the dense model's order (before) "
        "and in the new one (after)."
        + (f" Folders with different scores ({', '.join(scores)}) do not compare." if len(scores) > 1 else "")
    )
    return Section("importance", "Importance that masks retain", text, pictures)


def _means(values: Iterable[tuple[int | None, float]]) -> dict[int, float]:
    """Returns the mean of the values of each place, from the first place to the last."""
    by_place: dict[int, list[float]] = {}
    for place, value in values:
        if place is not None:
            by_place.setdefault(place, []).append(value)
    return {place: fmean(by_place[place]) for place in sorted(by_place)}


@dataclass(frozen=True)
class MaskCorner:
    """The first rows and columns of a linear's mask, in the dense model's order.

    Attributes:
        label: the folder that it is of.
        linear: name of the linear.
        kept: which weights are kept, bool ``[rows, columns]``.
    """

    label: str
    linear: str
    kept: Tensor


def mask_corners(folders: Sequence[Compiled], linear: str | None, size: int = 128) -> list[MaskCorner]:
    """Reads the corner of one linear's mask from each folder.

    Args:
        folders: compiled folders.
        linear: name of the linear; None for the last one of the first layer that all folders prune, such as its
            ``down_proj``.
        size: most rows and columns.

    Raises:
        ConfigError: a folder does not prune this linear.
        ModelError: a folder is damaged.
    """
    masks = {folder.label: Masks(folder.record, folder.pruned, folder.tensor) for folder in folders}
    if linear is None:
        common = set[str].intersection(*(set(each.linears) for each in masks.values()))
        names = [name for name in next(iter(masks.values())).linears if name in common]
        linear = next((name for name in reversed(names) if layer_number(name) == layer_number(names[0])), "")
    if not linear:
        return []
    for label, each in masks.items():
        if linear not in each.linears:
            raise ConfigError(f"{label} prunes no linear {linear!r}; the names are such as {each.linears[-1]}")
    return [MaskCorner(label, linear, each.mask(linear)[:size, :size]) for label, each in masks.items()]


def masks(corners: Sequence[MaskCorner]) -> Section:
    """Which weights are kept, of all folders side by side, as in the appendix of the paper."""
    text = (
        f"The mask of {corners[0].linear}: its first {corners[0].kept.shape[0]} outputs (down) and "
        f"{corners[0].kept.shape[1]} inputs (across), kept weights dark, in the dense model's order. Without a "
        "permutation, every group of consecutive inputs keeps the same number; with one, the members of a group lie "
        "elsewhere, so that a channel that matters may keep nearly all of its weights."
        if corners
        else ""
    )
    pictures = [
        Picture(_bitmap(each.kept), f"Kept weights of {each.linear} in {each.label}", each.label) for each in corners
    ]
    return Section("masks", "Masks", text, pictures)


def _bitmap(kept: Tensor) -> str:
    """Draws each kept weight as a square of one unit; kept neighbours of a row are one stroke."""
    strokes = []
    for y, row in enumerate(kept.tolist()):
        path = f"M0 {y}.5"
        for value, run in groupby(row):
            length = len(list(run))
            path += f"h{length}" if value else f"m{length} 0"
        strokes.append(path)
    rows, columns = kept.shape
    line = f'<path d="{"".join(strokes)}" stroke="var(--ink)" shape-rendering="crispEdges"/>'
    return svg([line], f"0 0 {columns} {rows}")
