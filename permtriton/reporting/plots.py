"""Figures as SVG text. Colours are CSS variables of the page, so that a figure follows its light or dark scheme."""

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

WIDTH = 340  # of a figure, in units that are pixels on a phone
# Colours that stand for CSS variables until the SVG is written.
INK, MUTED, LINE, ACCENT = "#000001", "#000002", "#000003", "#000004"
_VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line", ACCENT: "--accent"}
PIXEL = (0.07, 0.53, 0.60)  # of pictures made of pixels: legible on white and on black
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "permtriton", "text.parse_math": False, "font.size": 10,
    "text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "axes.edgecolor": LINE,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": LINE,
    "grid.linewidth": 0.6, "figure.facecolor": "none", "axes.facecolor": "none", "xtick.major.size": 0,
    "ytick.major.size": 0,
}  # fmt: skip


def history(
    steps: Sequence[int],
    curves: Sequence[tuple[str, Sequence[float | None]]],
    moved: Sequence[int] = (),
    *,
    unit: str,
    kept: int | None = None,
    measure: str = "loss",
) -> str:
    """Draws curves by epoch or round and, below them, how many channels had moved.

    Args:
        steps: numbers of the epochs or rounds.
        curves: name and values of each curve; the first is drawn in the accent colour.
        moved: channels that were not where the base order has them, per step; empty leaves the lower part out.
        unit: what a step is called.
        kept: the step whose result was kept, which gets a ring.
        measure: what the curves show.
    """
    with _figure(250 if len(moved) else 190) as (figure, finish):
        if len(moved):
            upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
            lower.bar(steps, moved, color=MUTED, width=0.6)
            lower.set_ylabel("moved")
            lower.grid(False, axis="x")
        else:
            upper = lower = figure.subplots()
        for number, (name, values) in enumerate(curves):
            shown = np.array([np.nan if value is None else value for value in values], dtype=float)
            look = {"color": ACCENT, "marker": "o"} if number == 0 else {"color": MUTED, "linestyle": "--"}
            upper.plot(steps, shown, label=name, markersize=4, linewidth=1.6, **look)
        if kept is not None and kept in steps and curves:
            value = curves[0][1][list(steps).index(kept)]
            upper.plot([kept], [value], "o", markersize=10, markerfacecolor="none", markeredgecolor=INK, label="kept")
        upper.set_ylabel(measure)
        upper.grid(False, axis="x")
        if len(curves) > 1 or kept is not None:
            upper.legend(frameon=False)
        lower.set_xlabel(unit)
        lower.xaxis.get_major_locator().set_params(integer=True)
    return finish()


def dumbbells(rows: Sequence[str], before: Sequence[float], after: Sequence[float], limits: Any, *, unit: str) -> str:
    """Draws one line per row, from an open circle (before) to a filled one (after).

    Args:
        rows: name of each row, from the top.
        before: value at the open circle.
        after: value at the filled circle.
        limits: smallest and largest value of the axis.
        unit: label of the axis.
    """
    places = range(len(rows))
    with _figure(64 + 16 * len(rows)) as (figure, finish):
        axes = figure.subplots()
        axes.hlines(places, before, after, color=ACCENT, linewidth=1.6)
        axes.plot(before, places, "o", markersize=5, markerfacecolor="none", markeredgecolor=MUTED, label="before")
        axes.plot(after, places, "o", markersize=5, color=ACCENT, label="after")
        axes.set_yticks(places, [_plain(row) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(*limits)
        axes.set_xlabel(unit)
        axes.grid(False, axis="y")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return finish()


def ranking(rows: Sequence[tuple[str, float | None, float | None]], reference: str, *, unit: str) -> str:
    """Draws one line per method with its name above it, a filled dot and an open one.

    Args:
        rows: name, and values of the filled and of the open dot; None for no dot.
        reference: name of the row that is drawn in ink.
        unit: label of the axis.
    """
    with _figure(60 + 30 * len(rows)) as (figure, finish):
        axes = figure.subplots()
        for place, (name, filled, hollow) in enumerate(rows):
            axes.axhline(place, color=LINE, linewidth=0.6)
            axes.text(0, place - 0.34, _plain(name), transform=axes.get_yaxis_transform(), color=INK, fontsize=9.5)
            if hollow is not None:
                axes.plot([hollow], [place], "o", markersize=6, markerfacecolor="none", markeredgecolor=ACCENT)
            if filled is not None:
                axes.plot([filled], [place], "o", markersize=6, color=INK if name == reference else ACCENT)
        axes.set_ylim(len(rows) - 0.5, -0.9)
        axes.set_yticks([])
        axes.set_xlabel(unit)
        axes.grid(False)
        axes.spines["left"].set_visible(False)
    return finish()


def mask(kept: Tensor) -> str:
    """Draws which weights are kept, one pixel per weight, bool ``[rows, columns]``; pruned ones are transparent."""
    with _figure(WIDTH, None) as (figure, finish):
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        axes.imshow(_pixels(kept), interpolation="none", aspect="equal")
        axes.set(xticks=[], yticks=[])
        axes.grid(False)
        for side in axes.spines.values():
            side.set_visible(True)
    return finish()


def permutation(index: Sequence[int]) -> str:
    """Draws where each channel of an index comes from: new position to the right, dense position downwards."""
    with _figure(WIDTH) as (figure, finish):
        axes = figure.subplots()
        size = min(max(2500 / max(len(index), 1), 1.2), 9)
        axes.scatter(range(len(index)), index, s=size, color=PIXEL, linewidths=0, rasterized=True)
        axes.set_xlabel("position now")
        axes.set_ylabel("position in the dense model")
        axes.set(xlim=(-0.5, len(index) - 0.5), ylim=(len(index) - 0.5, -0.5), aspect="equal")
    return finish()


def _pixels(kept: Tensor) -> np.ndarray[Any, Any]:
    pixels = np.zeros((*kept.shape, 4))
    pixels[..., :3] = PIXEL
    pixels[..., 3] = kept.numpy()
    return pixels


def _plain(text: str) -> str:
    """Returns text without characters that XML does not allow."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


@contextmanager
def _figure(height: float, layout: Any = "constrained") -> Iterator[tuple[Any, Callable[[], str]]]:
    """Yields a figure and a function that returns it as SVG, to be called after the ``with`` block."""
    import matplotlib
    from matplotlib.figure import Figure

    written = io.StringIO()
    with matplotlib.rc_context(_STYLE):  # pyplot is left alone
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout=layout)
        yield figure, lambda: _svg(written.getvalue())
        figure.savefig(written, format="svg", dpi=200, metadata={"Date": None, "Creator": None})


def _svg(text: str) -> str:
    """Returns what a page needs of an SVG file: colours as variables, no identifiers but those that are used."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"<style.*?</style>|font-family:[^;]*; |<g/>", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*\n\s*", " ", text)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]  # identifiers are unique in the whole page
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{digest}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.strip()
