"""Output files of commands: checked before any work, and written as a whole."""

import json
import os
import re
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil

from permtriton.errors import ConfigError, OutputError, PermTritonError
from permtriton.util.durable import replace_file

LONGEST = 200  # bytes of a name; file systems take 255, and working files add up to 50


def to_json(report: Any) -> str:
    """Returns ``report`` as indented JSON with each list of integers on one line."""
    text = json.dumps(report, indent=1)
    return re.sub(r"\[\n\s*(-?\d+(?:,\n\s*-?\d+)*)\n\s*\]", lambda match: "[" + " ".join(match[1].split()) + "]", text)


def path_of(what: str, name: str | Path) -> Path:
    if not isinstance(name, str | Path):
        raise ConfigError(f"{what} is a {type(name).__name__}: expected a path")
    return Path(name)


def real_path(path: Path) -> Path:
    """Returns the absolute path without links; `Path.resolve` would raise for a link that leads in a circle."""
    return Path(os.path.realpath(path))


def check_name(output: Path) -> None:
    """Refuses a file or folder whose name is too long for the longer names of the working files beside it."""
    if (size := len(output.name.encode())) > LONGEST:
        raise OutputError(
            f"output {output.name[:40]}... has {size} bytes, but at most {LONGEST} fit: choose a shorter name"
        )


def check_file(output: Path, *, overwrite: bool, ours: Callable[[Path], bool] = lambda path: False) -> None:
    """Refuses, before any work, an output file that could not be written at the end, or must not be replaced.

    Args:
        ours: returns whether an earlier file is a result that may be replaced in any case.
    """
    check_name(output)
    if output.is_dir():
        raise OutputError(f"output {output} is a folder: give the name of a file")
    if output.exists():
        if not output.is_file():
            raise OutputError(f"output {output} is no plain file: choose another name")
        if not overwrite and not ours(output):
            raise OutputError(f"output {output} exists: choose another file, or replace it with `overwrite=True`")
    check_parent(output)


def is_mount_point(path: Path) -> bool:
    """Returns whether a resolved path is a mount point, which no rename can replace."""
    # os.path.ismount misses bind mounts within one file system
    return os.path.ismount(path) or str(path) in (
        partition.mountpoint for partition in psutil.disk_partitions(all=True)
    )


def check_parent(output: Path) -> None:
    """Refuses an output whose folder does not exist or cannot be written."""
    folder = real_path(output).parent
    if not folder.is_dir():
        raise OutputError(f"output {output}: the folder {folder} does not exist; make it first")
    try:
        tempfile.TemporaryFile(dir=folder).close()  # permissions may allow what the system refuses, as in /proc
    except OSError as error:
        problem = error.strerror or str(error)
        raise OutputError(f"output {output}: the folder {folder} cannot be written: {problem}") from error


def disk_error(error: Exception) -> OSError | None:
    """Returns ``error`` as an OSError if the disk caused it, else None. Messages from Rust hold ``(os error 28)``."""
    if isinstance(error, OSError):
        return error
    number = None if isinstance(error, PermTritonError) else re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def write_file(output: Path, content: bytes) -> None:
    """Writes a file as `permtriton.util.durable.replace_file` does: an earlier one stays until the new one is whole.

    If ``output`` is a link, the file that the link leads to is replaced.
    """
    try:
        replace_file(real_path(output), lambda temporary: temporary.write_bytes(content))
    except OSError as error:
        raise OutputError(f"output {output} cannot be written: {error.strerror or error}") from error


def check_report_file(path: Path, keys: Collection[str], *, overwrite: bool) -> None:
    """Refuses a file that is not .json, could not be written or must not be replaced; call it before the work starts.

    Args:
        keys: keys that tell an earlier report of the same command, which may be replaced, from other files.
    """
    if path.suffix != ".json":
        raise OutputError(f"output {path}: its extension is {path.suffix or 'missing'}; expected .json")

    def ours(path: Path) -> bool:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(report, dict) and report.keys() >= set(keys)

    check_file(path, overwrite=overwrite, ours=ours)


def write_report_file(path: Path, report: Any) -> None:
    """Writes a report as `write_file` does, in place of any earlier file."""
    write_file(path, f"{to_json(report)}\n".encode())
