"""Figures as SVG text. Colours are CSS variables of the page, so that a figure follows its light or dark scheme."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

WIDTH, HEIGHT = 380, 250  # of a figure, in units that are pixels on a phone
LEFT, RIGHT, TOP, BOTTOM = 54, 374, 27, 206  # the edges of its axes
COLOURS = 6  # number of colours of series, --c0 to --c5


@dataclass(frozen=True)
class Series:
    """A line in a figure."""

    name: str  # name in the legend
    points: Sequence[tuple[float, float]]  # horizontal and vertical value of each
    colour: str  # as CSS writes it
    dashed: bool = False


def colour(number: int) -> str:
    return f"var(--c{number % COLOURS})"


class Scale:
    """An axis from the place ``start`` to the place ``end``, on which all ``values`` lie, with free space around."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        room = 0.06 * ((high - low) or abs(high) or 1)
        self.low, self.high, self.start, self.end = low - room, high + room, start, end

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Returns round numbers on the axis, at most ``most``."""
        rough = 10 ** math.floor(math.log10((self.high - self.low) / most))
        step = next(rough * n for n in (1, 2, 5, 10) if (self.high - self.low) / (rough * n) <= most)
        return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def chart(series: Sequence[Series], across: str, up: str) -> str:
    """Draws series on common axes with the names ``across`` and ``up``; at least one of the series has a point."""
    points = [point for curve in series for point in curve.points]
    xs = Scale([x for x, _ in points], LEFT, RIGHT)
    ys = Scale([y for _, y in points], BOTTOM, TOP)
    parts = [_text(2, 11, up), _text(RIGHT, HEIGHT - 8, across, "end")]
    for value in ys.ticks():
        height = ys.place(value)
        parts.append(f'<path d="M{LEFT} {height:.1f}H{RIGHT}" stroke="var(--line)"/>')
        parts.append(_text(LEFT - 5, height + 4, f"{value:,g}", "end"))
    parts += [_text(xs.place(value), BOTTOM + 16, f"{value:,g}", "middle") for value in xs.ticks()]
    for curve in series:
        parts += _line(curve, [(xs.place(x), ys.place(y)) for x, y in curve.points])
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


def _line(series: Series, places: Sequence[tuple[float, float]]) -> Iterator[str]:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dashes = ' stroke-dasharray="4 3"' if series.dashed else ""
    yield f'<path d="M{path}" fill="none" stroke="{series.colour}" stroke-width="1.6"{dashes}/>'
    for x, y in places:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{series.colour}"/>'


def _svg(parts: Sequence[str], box: str) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-size="12">{"".join(parts)}</svg>'


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    shown = escape("".join(letter if letter.isprintable() else "?" for letter in words))
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="var(--muted)" text-anchor="{anchor}">{shown}</text>'
