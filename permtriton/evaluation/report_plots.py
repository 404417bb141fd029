"""Figures as SVG text. Colours are CSS variables of the page, so that a figure follows its light or dark scheme."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

WIDTH, HEIGHT = 380, 250  # of a figure, in units that are pixels on a phone
EDGES = (44, 374, 12, 206)  # left, right, top and bottom of its axes
LETTER, LINE = 6.8, 15  # width of a letter and height of a line, rounded up
COLOURS = 6  # number of colours of series, --c0 to --c5


@dataclass(frozen=True)
class Series:
    """A series of points in a figure."""

    name: str  # name in the legend; empty for none
    points: Sequence[tuple[float, float]]  # horizontal and vertical value of each
    colour: str = "var(--c0)"  # as CSS writes it
    look: str = "line"  # ``line``, ``dashed`` or ``dots``
    labels: Sequence[str] = ()  # texts beside the points; () for none


def colour(number: int) -> str:
    return f"var(--c{number % COLOURS})"


class Scale:
    """An axis from the value ``low``, drawn at the place ``start``, to the value ``high``, drawn at ``end``.

    All ``values`` lie on the axis; ``margin`` is the free space at each end, as a share of the values' range.
    """

    def __init__(
        self, values: Sequence[float], start: float, end: float, *, log: bool = False, margin: float = 0.06
    ) -> None:
        low, high = min(values), max(values)
        self.start, self.end, self.log = start, end, log and low > 0
        if self.log:
            ratio = max(high / low, 1.2) ** margin
            self.low, self.high = low / ratio, high * ratio
        else:
            room = margin * ((high - low) or abs(high) or 1)
            self.low, self.high = low - room, high + room

    def place(self, value: float) -> float:
        low, high, value = map(math.log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Returns round numbers on the axis, at most ``most``, unless a logarithmic axis spans more decades."""
        if not self.log or self.high < 3 * self.low:
            rough = 10 ** math.floor(math.log10((self.high - self.low) / most))
            step = next(rough * n for n in (1, 2, 5, 10) if (self.high - self.low) / (rough * n) <= most)
            return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        exponents = range(math.floor(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
            ticks = [10.0**exponent * step for exponent in exponents for step in steps]
            ticks = [value for value in ticks if self.low <= value <= self.high]
            if len(ticks) <= most:
                break
        return ticks


def chart(
    series: Sequence[Series],
    across: str,
    up: str,
    *,
    log: tuple[bool, bool] = (False, False),
    reference: tuple[str, float] | None = None,
) -> str:
    """Draws series on common axes.

    Args:
        series: at least one of them with a point.
        log: whether the horizontal and the vertical axis are logarithmic, where all values are positive.
        reference: name and value of a horizontal line.
    """
    left, right, top, bottom = EDGES
    points = [point for curve in series for point in curve.points]
    values = [y for _, y in points] + ([reference[1]] if reference else [])
    xs = Scale([x for x, _ in points], left + 8, right - 8, log=log[0])
    ys = Scale(values, bottom, top + LINE, log=log[1])
    parts = [_text(2, top - 1, up), _text(right, HEIGHT - 8, across, "end")]
    for value in ys.ticks():
        height = ys.place(value)
        parts += [_line(left, height, right, "--line"), _text(left - 5, height + 4, _tick(value), "end")]
    parts += [_text(xs.place(value), bottom + 16, _tick(value), "middle") for value in xs.ticks()]
    if reference:
        height = ys.place(reference[1])
        parts.append(_line(left, height, right, "--ink", ' stroke-dasharray="5 4"'))
        parts.append(_text(left + 4, height - 5, reference[0], colour="--ink"))
    drawn = [[(xs.place(x), ys.place(y)) for x, y in curve.points] for curve in series]
    for curve, places in zip(series, drawn, strict=True):
        parts += _series(curve, places)
    parts += _labels(series, drawn)
    return _svg(parts, f"0 0 {WIDTH} {HEIGHT}")


def bitmap(rows: Sequence[Sequence[bool]]) -> str:
    """Draws each true value as a square of one unit; neighbours in a row are one stroke."""
    strokes = []
    for y, row in enumerate(rows):
        path = f"M0 {y}.5"
        for value, run in groupby(row):
            length = len(list(run))
            path += f"h{length}" if value else f"m{length} 0"
        strokes.append(path)
    line = f'<path d="{"".join(strokes)}" stroke="var(--ink)" shape-rendering="crispEdges"/>'
    return _svg([line], f"0 0 {len(rows[0])} {len(rows)}")


def _series(series: Series, places: Sequence[tuple[float, float]]) -> Iterator[str]:
    is_line = series.look in ("line", "dashed")
    if is_line and len(places) > 1:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dashes = ' stroke-dasharray="4 3"' if series.look == "dashed" else ""
        yield f'<path d="M{path}" fill="none" stroke="{series.colour}" stroke-width="1.6"{dashes}/>'
    for x, y in places if series.look != "dashed" or len(places) == 1 else ():
        fill = "none" if series.look == "dashed" else series.colour
        radius = 2.4 if is_line else 4.2
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{series.colour}"/>'


def _labels(series: Sequence[Series], drawn: Sequence[Sequence[tuple[float, float]]]) -> Iterator[str]:
    """Yields the labels: right of their points, or left where there is no room, moved up until none overlap."""
    taken: list[tuple[float, float, float]] = []
    for curve, places in zip(series, drawn, strict=True):
        for (x, y), label in zip(places, curve.labels, strict=False):
            width = len(label) * LETTER
            left, height = x + 6 if x + 6 + width < WIDTH else x - 6 - width, y - 6
            while any(left < end and start < left + width and abs(height - at) < LINE for start, end, at in taken):
                height -= LINE / 3
            if label:
                taken.append((left, left + width, height))
                yield _text(left, height, label, colour="--ink")


def _svg(parts: Sequence[str], box: str) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-size="12">{"".join(parts)}</svg>'


def _line(left: float, height: float, right: float, colour: str, attributes: str = "") -> str:
    return f'<path d="M{left:.1f} {height:.1f}H{right:.1f}" stroke="var({colour})"{attributes}/>'


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = "--muted") -> str:
    shown = escape("".join(letter if letter.isprintable() else "?" for letter in words))
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="var({colour})" text-anchor="{anchor}">{shown}</text>'


def _tick(value: float) -> str:
    return f"{value:,g}" if abs(value) < 10**6 else f"{value:.3g}"
