"""Result tables as files: JSON, CSV or Markdown, by the extension of the file."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from permtriton.comparison.summary import Rows, cell
from permtriton.errors import OutputError
from permtriton.util.output_files import check_file, to_json, write_file


@dataclass(frozen=True)
class Result:
    """What the results of one command have in common, by which an earlier one is told from other files.

    Attributes:
        headers: columns that its tables have, among others.
        keys: keys that its JSON report has, among others.
    """

    headers: Sequence[str]
    keys: Sequence[str]

    def wrote(self, path: Path) -> bool:
        """Returns whether a file is such a result."""
        try:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".json":
                report = json.loads(text)
                return isinstance(report, dict) and report.keys() >= set(self.keys)
            line = text.partition("\n")[0]
            names = next(csv.reader([line]), []) if path.suffix == ".csv" else map(str.strip, line.split("|"))
            return set(names) >= set(self.headers)
        except (OSError, ValueError, RecursionError, csv.Error):
            return False


def check_table(path: Path, *, overwrite: bool, like: Result | None = None, reads: Iterable[Path | str] = ()) -> None:
    """Refuses a file that `write_table` could not write or must not replace; call it before the work starts.

    Args:
        overwrite: whether an earlier file may be replaced, whoever wrote it.
        like: results that may be replaced in any case.
        reads: as `permtriton.util.output_files.check_file` takes it.

    Raises:
        OutputError: another extension than .json, .csv or .md, or as `permtriton.util.output_files.check_file`.
    """
    if path.suffix not in _WRITERS:
        raise OutputError(
            f"output {path}: its extension is {path.suffix or 'missing'}; expected one of {', '.join(_WRITERS)}"
        )
    check_file(path, overwrite=overwrite, ours=like.wrote if like else lambda path: False, reads=reads)


def write_table(path: Path, headers: Sequence[str], rows: Rows, report: Any) -> None:
    """Writes a result as `permtriton.util.output_files.write_file` does, in place of whatever is there.

    Args:
        path: file to write. ``.json`` holds the report; ``.csv`` and ``.md`` hold the rows.
        rows: cells, numbers as numbers: a CSV file holds all their digits, a Markdown table those that `cell` shows.
        report: everything that is known, as JSON can hold it.

    Raises:
        OutputError: as `check_table`, or the disk refuses.
    """
    check_table(path, overwrite=True)
    write_file(path, _WRITERS[path.suffix](headers, rows, report).encode())


def markdown(headers: Sequence[str], rows: Rows) -> str:
    """Returns a Markdown table."""
    lines = [headers, ["---"] * len(headers), *([cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(part.replace('|', chr(92) + '|') for part in line)} |\n" for line in lines)


def _csv(headers: Sequence[str], rows: Rows, report: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([headers, *rows])
    return text.getvalue()


_WRITERS: dict[str, Callable[[Sequence[str], Rows, Any], str]] = {
    ".json": lambda headers, rows, report: to_json(report) + "\n",
    ".csv": _csv,
    ".md": lambda headers, rows, report: markdown(headers, rows),
}
