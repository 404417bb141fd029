"""The plot of a result file: perplexity against CPU seconds, as SVG whose text is text.

``python benchmarks/readme_tables.py`` writes it, beside the tables.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

from benchmarks.real.rows import DENSE, THEIRS
from permtriton.evaluation.report_plots import Scale

SHOWN = (  # without magnitude, which is far off
    "wanda", "sparsegpt", "fast", "default", "best",
    "llm-compressor sparsegpt", "llm-compressor wanda", "modelopt sparsegpt",
)  # fmt: skip
WIDTH, HEIGHT = 700, 420
LEFT, RIGHT, TOP, BOTTOM = 46, 686, 76, 376  # the edges of the axes
LETTER, LINE = 7.2, 16  # width of a letter and height of a line, generously
WORST = 3  # what has more than so many times the dense perplexity is drawn at the upper edge
THEMES = {
    "light": {"ink": "#1c2024", "muted": "#5b646d", "line": "#dfe3e6", "ours": "#0b7285", "theirs": "#c2410c"},
    "dark": {"ink": "#e8eaec", "muted": "#a3acb5", "line": "#353b41", "ours": "#4fc1d0", "theirs": "#f0a05a"},
}
FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif\""
Colours = Mapping[str, str]


@dataclass(frozen=True)
class Box:
    """A rectangle that text or a point covers."""

    left: float
    top: float
    right: float
    bottom: float

    def hits(self, other: "Box") -> bool:
        """Whether both cover some place."""
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.bottom <= other.top or other.bottom <= self.top)

    def within(self, other: "Box") -> bool:
        """Whether the other one covers all of it."""
        sides = self.left >= other.left and self.right <= other.right
        return sides and self.top >= other.top and self.bottom <= other.bottom


def place_labels(
    points: Sequence[tuple[float, float]], widths: Sequence[float], taken: Sequence[Box], page: Box
) -> list[Box]:
    """Returns a place for the label of each point, as near to it as can be, that covers nothing.

    Args:
        points: places of the points.
        widths: widths of the labels; 0 for none.
        taken: what else must not be covered.
        page: what the labels stay within.
    """
    covered = [*taken, *(Box(x - 5, y - 5, x + 5, y + 5) for x, y in points)]
    places = []
    for (x, y), width in zip(points, widths, strict=True):
        boxes = list(_around(x, y, width))
        free = (box for box in boxes if box.within(page) and not any(map(box.hits, covered)))
        places.append(next(free, boxes[0]))
        covered += places[-1:] if width else []
    return places


def _around(x: float, y: float, width: float) -> Iterator[Box]:
    """Yields places for a label of a point, the nearest first: beside it, above and below."""
    for rise in range(0, 160, 7):
        for middle in dict.fromkeys((y - rise, y + rise)):
            for left in (x + 8, x - 8 - width) if rise < LINE else (x - width / 2, x + 4, x - 4 - width):
                yield Box(left, middle - LINE / 2, left + width, middle + LINE / 2)


def anchored(box: Box, x: float) -> tuple[float, str]:
    """Returns where a label in a box begins, so that it keeps to its point at ``x`` whatever its real width."""
    if box.left > x:
        return box.left, "start"
    return (box.right, "end") if box.right < x else ((box.left + box.right) / 2, "middle")


@dataclass(frozen=True)
class Point:
    """A row of the result: the means over its seeds, and the range of its perplexities."""

    name: str
    seconds: float
    perplexity: float
    low: float
    high: float

    @property
    def side(self) -> str:
        """Whose it is, as `THEMES` names the colour."""
        return "theirs" if self.name in THEIRS else "ours"


def points(report: Mapping[str, Any]) -> tuple[float, list[Point]]:
    """Returns the perplexity of the dense model, and the points of the rows that ran, from the left."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        if "error" not in row:
            rows.setdefault(row["name"], []).append(row)
    found = []
    for name in SHOWN:
        if costs := [row["pruning"]["cpu_seconds"] for row in rows.get(name, []) if "pruning" in row]:
            values = [row["evaluation"]["perplexity"] for row in rows[name]]
            found.append(Point(name, fmean(costs), fmean(values), min(values), max(values)))
    return rows[DENSE][0]["evaluation"]["perplexity"], sorted(found, key=lambda point: point.seconds)


class LogScale(Scale):
    """A logarithmic axis."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        ratio = max(high / low, 1.2) ** 0.08  # free space at each end
        self.low, self.high, self.start, self.end = low / ratio, high * ratio, start, end

    def place(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 8) -> list[float]:
        """Returns round numbers on the axis, at most ``most``, unless the axis spans more decades."""
        if self.high < 3 * self.low:
            return super().ticks(most)
        exponents = range(math.floor(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
            ticks = [10.0**exponent * step for exponent in exponents for step in steps]
            ticks = [value for value in ticks if self.low <= value <= self.high]
            if len(ticks) <= most:
                break
        return ticks


class Axes:
    """Where seconds and perplexities are drawn, both on logarithmic axes that the points fill."""

    def __init__(self, dense: float, points: Sequence[Point]) -> None:
        self.dense, self.points = dense, points
        self.seconds = LogScale([p.seconds for p in points], LEFT, RIGHT)
        inside = [point.high for point in points if point.perplexity <= WORST * dense]
        self.perplexity = LogScale([dense, *inside], BOTTOM, TOP)

    def place(self, point: Point) -> tuple[float, float]:
        """Returns where a point is drawn: at the upper edge if it is beyond."""
        return self.seconds.place(point.seconds), max(self.perplexity.place(point.perplexity), TOP)

    def label(self, point: Point) -> str:
        """Returns what is written beside a point."""
        beyond = " (beyond the axis)" if point.perplexity > self.perplexity.high else ""
        return f"{point.name} {point.perplexity:,.{1 if point.perplexity < 100 else 0}f}{beyond}"

    def labels(self) -> list[Box]:
        """Returns the place of each label, which covers no point, no range and no other label."""
        dense = self.perplexity.place(self.dense)
        taken = [Box(RIGHT - 10 * LETTER, dense - 1.2 * LINE, RIGHT, dense + 2)]
        taken += [Box(x - 3, top, x + 3, bottom) for x, top, bottom in map(self.range, self.points)]
        widths = [len(self.label(point)) * LETTER for point in self.points]
        page = Box(LEFT, TOP - LINE, WIDTH, BOTTOM)
        return place_labels([self.place(point) for point in self.points], widths, taken, page)

    def range(self, point: Point) -> tuple[float, float, float]:
        """Returns the place of a point's range, and its upper and lower end."""
        top, bottom = (max(self.perplexity.place(end), TOP) for end in (point.high, point.low))
        return self.place(point)[0], top, bottom


def svg(report: Mapping[str, Any], theme: str) -> str:
    """Returns the plot in the colours of a theme, which lie on any background of that theme."""
    colour = THEMES[theme]
    dense, found = points(report)
    axes = Axes(dense, found)
    parts = [*_headings(report, colour), *_grid(axes, colour)]
    for point, box in zip(found, axes.labels(), strict=True):
        parts += _drawn(point, box, axes, colour)
    lines = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'{FONT} font-size="12.5">\n{lines}\n</svg>\n'
    )


def _headings(report: Mapping[str, Any], colour: Colours) -> Iterator[str]:
    samples, length = report["inputs"]["calibration"]
    means = "; mean and range over seeds" if any(row["seed"] for row in report["rows"]) else ""
    title = f"SmolLM2-135M-Instruct pruned to 2:4 with {samples} x {length} tokens"
    below = "CPU seconds of the whole command (both axes are logarithmic)"
    yield _text(8, 20, title, colour["ink"], 'font-size="15" font-weight="600"')
    yield _text(8, 42, f"perplexity on WikiText-2, lower is better{means}", colour["muted"])
    yield _text(RIGHT, HEIGHT - 8, below, colour["muted"], 'text-anchor="end"')
    for side, name, x in (("ours", "permtriton", RIGHT - 178), ("theirs", "other tools", RIGHT - 82)):
        yield _mark(side, x, 38, colour)
        yield _text(x + 10, 42, name, colour["ink"])


def _grid(axes: Axes, colour: Colours) -> Iterator[str]:
    for seconds in axes.seconds.ticks():
        yield _text(
            axes.seconds.place(seconds), BOTTOM + 18, f"{seconds:,.0f}", colour["muted"], 'text-anchor="middle"'
        )
    for value in axes.perplexity.ticks():
        y = axes.perplexity.place(value)
        yield _line(LEFT, y, RIGHT, y, colour["line"])
        yield _text(LEFT - 8, y + 4, f"{value:g}", colour["muted"], 'text-anchor="end"')
    y = axes.perplexity.place(axes.dense)
    yield _line(LEFT, y, RIGHT, y, colour["ink"], 'stroke-dasharray="6 4"')
    yield _text(RIGHT, y - 6, f"dense {axes.dense:.1f}", colour["ink"], 'text-anchor="end"')


def _drawn(point: Point, box: Box, axes: Axes, colour: Colours) -> Iterator[str]:
    x, y = axes.place(point)
    if point.high > point.low:
        _, top, bottom = axes.range(point)
        yield _line(x, top, x, bottom, colour[point.side], 'stroke-width="2"')
    middle = (box.top + box.bottom) / 2
    if abs(middle - y) > 1.5 * LINE:
        yield _line(x, y, min(max(x, box.left), box.right), box.top if middle > y else box.bottom, colour["muted"])
    yield _mark(point.side, x, y, colour)
    at, anchor = anchored(box, x)
    weight = ' font-weight="600"' if point.name == "default" else ""
    yield _text(at, middle + 4, axes.label(point), colour[point.side], f'text-anchor="{anchor}"{weight}')


def _mark(side: str, x: float, y: float, colour: Colours) -> str:
    if side == "ours":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour[side]}"/>'
    return f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" fill="{colour[side]}"/>'


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, more: str = "") -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{colour}" {more}/>'


def _text(x: float, y: float, words: str, colour: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" {more}>{escape(words)}</text>'
