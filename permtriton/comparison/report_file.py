"""The report of a command as a JSON file."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from permtriton.errors import OutputError
from permtriton.util.output_files import check_file, to_json, write_file


def check_report_file(path: Path, keys: Collection[str], *, overwrite: bool, reads: Iterable[Path | str] = ()) -> None:
    """Refuses a file that could not be written or must not be replaced; call it before the work starts.

    Args:
        keys: keys that tell an earlier report of the same command, which may be replaced, from other files.
        overwrite: whether any earlier file may be replaced, whoever wrote it.
        reads: as `permtriton.util.output_files.check_file` takes it.

    Raises:
        OutputError: another extension than .json, or as `permtriton.util.output_files.check_file`.
    """
    if path.suffix != ".json":
        raise OutputError(f"output {path}: its extension is {path.suffix or 'missing'}; expected .json")

    def ours(path: Path) -> bool:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(report, dict) and report.keys() >= set(keys)

    check_file(path, overwrite=overwrite, ours=ours, reads=reads)


def write_report_file(path: Path, report: Any) -> None:
    """Writes a report as `permtriton.util.output_files.write_file` does, in place of whatever is there.

    Raises:
        OutputError: the disk refuses.
    """
    check_file(path, overwrite=True)
    write_file(path, f"{to_json(report)}\n".encode())
