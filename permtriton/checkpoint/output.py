"""Output folders: claimed by one process at a time, written beside their place, and replaced as a whole.

Beside a folder OUT are its lock (``.OUT.lock``), what is being written (``.OUT.partial-PID``), the dense folder that it
is made from (``.OUT.dense-PID``), the earlier output while the new one takes its name (``.OUT.old-PID``), and states of
long stages (``.OUT.STAGE.safetensors``). Where a name is taken, ``-2`` is added to it, or a higher number.
"""

import errno
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from permtriton.errors import OutputError
from permtriton.model.headers import REPORT_FILE
from permtriton.util.durable import RANDOM_END, sync, sync_names
from permtriton.util.output_files import check_name, check_parent, disk_error, is_mount_point, real_path

Say = Callable[[str], None]

LEFTOVER_FOLDER, LEFTOVER_STATE = r"\.{}\.(partial|old|dense)-\d+(-\d+)?", r"\.{}\.\w+\.safetensors"


def resume_path(output: Path) -> Path:
    """Returns the ``resume_path`` of an output for `permtriton.compile`, which the lock of the output covers, too."""
    return _beside(real_path(output), "safetensors")


def _beside(path: Path, end: str) -> Path:
    return path.with_name(f".{path.name}.{end}")


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuses, before any work, an output folder that could not be written at the end, or must not be replaced."""
    path = real_path(output)
    check_name(path)
    if is_mount_point(path):
        raise OutputError(f"output {output} is a mount point, which no new folder can replace: give a folder inside it")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        if not overwrite:
            raise OutputError(f"output {output} exists: choose another folder, or replace it with `overwrite=True`")
        if not (path / REPORT_FILE).is_file():
            raise OutputError(
                f"output {output} was not written by permtriton (it holds no {REPORT_FILE}), so `overwrite=True` "
                "leaves it alone: choose another folder"
            )
    check_parent(output)


def check_apart(output: Path, source: Path) -> None:
    """Refuses an output that is, contains, or is inside the source that it is made from."""
    inner, outer = real_path(source), real_path(output)
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise OutputError(
            f"output {output} is, contains or is in {inner}, which is read: choose another folder with `output=`"
        )


@contextmanager
def claimed(output: Path, *, overwrite: bool, say: Say = lambda text: None) -> Iterator[None]:
    """Locks an output for this process inside the ``with`` block, and repairs what killed processes left of it.

    The system releases the lock however the process ends. Inside the block the process may claim the output again.
    """
    path = real_path(output)
    check_name(path)
    check_parent(output)
    with locked(path, say) as alone:
        if alone:
            with _clear_errors(path):
                _repair(path, say)
        check_output(output, overwrite=overwrite)
        yield


@contextmanager
def locked(output: Path, say: Say) -> Iterator[bool]:
    """Locks a resolved path; yields False if this process already has the lock, or the file system has none."""
    path = _beside(output, "lock")
    lock = FileLock(path, timeout=0, is_singleton=True, fallback_to_soft=False)
    if lock.is_locked:
        yield False
        return
    try:
        lock.acquire()
    except Timeout:
        holder = "which has just ended"
        with suppress(OSError):
            holder = path.read_text(encoding="utf-8").strip()
        raise OutputError(
            f"output {output} is being written by another process ({holder}; lock {path}): wait for it to end, or "
            "choose another folder"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
            raise _not_written(output, error) from error
        say(
            f"{output.parent} has no file locks ({error.strerror}): make sure that no other process writes "
            f"{output.name}; leftovers of killed runs are not removed"
        )
        path.unlink(missing_ok=True)
        yield False
        return
    try:
        with _clear_errors(output):
            path.write_bytes(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield True
    finally:
        path.unlink(missing_ok=True)  # before the release, so that a process that has opened it makes a new one
        lock.release()


def _repair(output: Path, say: Say) -> None:
    """Restores or removes what killed processes left of an output, which this process has locked."""
    name = re.escape(output.name)
    for path in sorted(output.parent.iterdir()):
        if path.is_file() and re.fullmatch(LEFTOVER_STATE.format(name) + RANDOM_END, path.name):
            path.unlink()
        elif path.is_symlink() or not path.is_dir() or not re.fullmatch(LEFTOVER_FOLDER.format(name), path.name):
            continue
        elif path.name.startswith(f".{output.name}.old-") and not output.exists():
            path.rename(output)
            say(f"restored {output}: a killed run had moved it away")
        else:
            shutil.rmtree(path)
            say(f"removed {path.name}, which a killed run left in {output.parent}")


@contextmanager
def replacing_folder(output: Path, *, overwrite: bool, say: Say = lambda text: None) -> Iterator[Path]:
    """Yields a temporary folder, which takes the place of ``output`` at the end of the ``with`` block.

    After a failure or an interruption the temporary folder is deleted, and an earlier output stays as it was.
    """
    path = real_path(output)
    with claimed(path, overwrite=overwrite, say=say), _clear_errors(path), _temporary(path, "partial") as partial:
        yield partial
        sync(partial)
        _rename(partial, path)


@contextmanager
def working_folder(output: Path) -> Iterator[Path]:
    """Yields an empty folder beside a claimed output; it is removed at the end of the ``with`` block."""
    path = real_path(output)
    with _clear_errors(path), _temporary(path, "dense") as folder:
        yield folder


@contextmanager
def _temporary(output: Path, kind: str) -> Iterator[Path]:
    """Yields a new folder beside an output, numbered if its name is taken, as leftovers stay without file locks."""
    for number in count(1):
        folder = _beside(output, f"{kind}-{os.getpid()}" + (f"-{number}" if number > 1 else ""))
        with suppress(FileExistsError):
            folder.mkdir()
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _clear_errors(output: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if (reported := disk_error(error)) is None:
            raise
        raise _not_written(output, reported) from error


def _not_written(output: Path, error: OSError) -> OutputError:
    where = f" ({error.filename})" if error.filename and Path(os.fsdecode(error.filename)) != output else ""
    return OutputError(
        f"output {output} cannot be written: {error.strerror or error}{where}. Nothing was saved, and nothing earlier "
        "was lost: run the same command again once this is solved"
    )


def _rename(partial: Path, output: Path) -> None:
    """Renames ``partial`` to ``output``; after an exception either the old or the new folder is there, complete."""
    old = _beside(output, f"old-{os.getpid()}")
    try:
        if output.exists():
            output.rename(old)
        partial.rename(output)
        sync_names(output.parent)
    finally:
        if old.exists() and not output.exists():
            old.rename(output)
        if old.exists():
            old.rename(partial)  # so that a half-deleted folder is never restored
            shutil.rmtree(partial, ignore_errors=True)
