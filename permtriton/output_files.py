"""Output files of commands: refused before any work where they must not be replaced, and written as a whole."""

import os
from collections.abc import Callable
from pathlib import Path

from permtriton.durable import replace_file
from permtriton.errors import OutputError


def check_file(output: Path, *, overwrite: bool, ours: Callable[[Path], bool] = lambda path: False) -> None:
    """Refuses, before any work, an output file that could not be written at the end, or that is someone else's.

    Args:
        output: file to write.
        overwrite: whether an earlier file may be replaced, whoever wrote it.
        ours: returns whether an earlier file is a result that may be replaced in any case.

    Raises:
        OutputError: it may not be replaced, or is no plain file, or its folder does not exist or cannot be written.
    """
    if output.is_dir():
        raise OutputError(f"output {output} is a folder: give the name of a file")
    if output.exists():
        if not output.is_file():
            raise OutputError(f"output {output} is no plain file: choose another name")
        if not overwrite and not ours(output):
            raise OutputError(f"output {output} exists: choose another file, or replace it with --overwrite")
    folder = output.resolve().parent
    if not folder.is_dir():
        raise OutputError(f"output {output}: the folder {folder} does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"output {output}: the folder {folder} cannot be written")


def write_file(output: Path, content: bytes) -> None:
    """Writes a file as `permtriton.durable.replace_file` does: an earlier one stays until the new one is whole.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        replace_file(output, lambda temporary: temporary.write_bytes(content))
    except OSError as error:
        raise OutputError(f"output {output} cannot be written: {error.strerror or error}") from error
