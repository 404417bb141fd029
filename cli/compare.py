"""The command ``permtriton compare``: compares methods, or the settings of an ablation, and prints the table."""

from collections.abc import Sequence
from typing import Any

from permtriton.cli.console import out, print_json, table
from permtriton.cli.processor import suit_processor
from permtriton.comparison.request import Request
from permtriton.comparison.results import RowResult
from permtriton.comparison.summary import Rows, cell, columns
from permtriton.util.bars import BarProgress, err


def run(request: Request, *, json: bool) -> None:
    """Compares the rows and prints one line per row; errors are those of `Request.run`."""
    progress = BarProgress()
    suit_processor(request.source, progress)

    def show(report: dict[str, Any]) -> None:
        if json:
            print_json(report)
        else:
            _print(report, *columns(report), media=report["media"])

    request.run(progress, _say, show)


def _say(result: RowResult) -> None:
    err.print(f"{result.name}: {result.mean:.3f} ({result.seconds:.0f} s)", highlight=False)


def _print(report: dict[str, Any], headers: Sequence[str], rows: Rows, *, media: bool) -> None:
    seeds = f"{len(report['seeds'])} seeds" if len(report["seeds"]) > 1 else "one seed"
    tokens, window = report["tokens"], report["window"]
    measured = (
        f"{tokens // window} samples of {window} positions" if media else f"{tokens:,} tokens in windows of {window}"
    )
    title = f"{report['model']} at {', '.join(report['patterns'])}, on {report['text']} ({measured}), {seeds}"
    cells = [[cell(value) for value in row] for row in rows]
    shown = table(title, cells, *headers)
    for column, texts in zip(shown.columns, zip(headers, *cells, strict=True), strict=True):
        column.min_width = max(len(word) for text in texts for word in text.split() or [""])  # no number is broken
    out.print(shown, width=max(out.width, shown.__rich_measure__(out, out.options).minimum), crop=False)
    if any(row["peak_bytes"] is None for row in report["rows"][1:]):
        out.print("no peak memory: this system cannot start its count anew for each row")
