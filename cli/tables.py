"""Result tables as files: JSON, CSV or Markdown, by the extension of the file."""

import csv
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from permtriton.comparison.table import Rows, cell
from permtriton.durable import replace_file
from permtriton.errors import OutputError


def check_table(path: Path) -> None:
    """Refuses a file that `write_table` could not write; call it before the work starts.

    Raises:
        OutputError: another extension than .json, .csv or .md, a folder of that name, or no folder to write it into
            that can be written.
    """
    if path.suffix not in _WRITERS:
        raise OutputError(
            f"output {path}: its extension is {path.suffix or 'missing'}; expected one of {', '.join(_WRITERS)}"
        )
    if path.is_dir():
        raise OutputError(f"output {path} is a folder: give the name of a file")
    if not path.resolve().parent.is_dir():
        raise OutputError(f"output {path}: the folder {path.resolve().parent} does not exist; make it first")
    if not os.access(path.resolve().parent, os.W_OK):
        raise OutputError(f"output {path}: the folder {path.resolve().parent} cannot be written")


def write_table(path: Path, headers: Sequence[str], rows: Rows, report: Any) -> None:
    """Writes a result as `permtriton.durable.replace_file` does: an earlier file stays until the new one is whole.

    Args:
        path: file to write. ``.json`` holds the report; ``.csv`` and ``.md`` hold the rows.
        headers: name of each column.
        rows: cells, numbers as numbers: a CSV file holds all their digits, a Markdown table those that `cell` shows.
        report: everything that is known, as JSON can hold it.

    Raises:
        OutputError: as `check_table`, or the disk refuses.
    """
    check_table(path)
    text = _WRITERS[path.suffix](headers, rows, report)
    try:
        replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline=""))
    except OSError as error:
        raise OutputError(f"output {path} cannot be written: {error.strerror or error}") from error


def markdown(headers: Sequence[str], rows: Rows) -> str:
    """Returns a Markdown table."""
    lines = [headers, ["---"] * len(headers), *([cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(part.replace('|', chr(92) + '|') for part in line)} |\n" for line in lines)


def _json(headers: Sequence[str], rows: Rows, report: Any) -> str:
    from permtriton.checkpoint.plan_entries import to_json

    return to_json(report) + "\n"


def _csv(headers: Sequence[str], rows: Rows, report: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([headers, *rows])
    return text.getvalue()


_WRITERS: dict[str, Callable[[Sequence[str], Rows, Any], str]] = {
    ".json": _json,
    ".csv": _csv,
    ".md": lambda headers, rows, report: markdown(headers, rows),
}
