"""Output folders: claimed by one process at a time, written beside their place, and replaced as a whole.

Beside a folder OUT stand ``.OUT.lock``, ``.OUT.partial-PID`` (what is being written), ``.OUT.old-PID`` (the earlier
output while the new one takes its name) and the states of long stages. A mount point cannot be renamed, and what stands
beside it is on another disk: there everything stands inside, as ``.permtriton.lock`` and so on. The folder is then
filled in steps that a later run can take up: ``.permtriton.complete`` (whole; the earlier output may go) and
``.permtriton.moving`` (the earlier output is gone; files move into place, the report last).
"""

import errno
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from permtriton.durable import RANDOM_END, sync, sync_names
from permtriton.errors import OutputError
from permtriton.model.headers import REPORT_FILE
from permtriton.output_files import check_name

Say = Callable[[str], None]

LEFTOVER_FOLDER, LEFTOVER_STATE = r"\.{}\.(partial|old)-\d+", r"\.{}\.\w+\.safetensors"
OURS = re.compile(rf"\.permtriton\.(lock|partial-\d+|complete|moving|(\w+\.)?safetensors({RANDOM_END})?)")
EMPTY = "lost+found"  # what an empty file system holds
FIXED = (errno.EBUSY, errno.EXDEV)  # errors of renaming a mount point, or a folder from a container's image


@dataclass(frozen=True)
class OutputFolder:
    """Where an output and its working files stand.

    Attributes:
        path: absolute path of the output.
        inside: whether working files stand inside it, because it is a mount point.
    """

    path: Path
    inside: bool

    @classmethod
    def at(cls, output: Path) -> "OutputFolder":
        """Returns the folder at a path, which need not exist."""
        path = output.resolve()
        return cls(path, path.is_dir() and is_mount(path))

    @property
    def home(self) -> Path:
        """Folder of the working files."""
        return self.path if self.inside else self.path.parent

    @property
    def stem(self) -> str:
        """First part of the working files' names."""
        return "permtriton" if self.inside else self.path.name

    def file(self, end: str) -> Path:
        """Returns the path of a working file."""
        return self.home / f".{self.stem}.{end}"

    @property
    def resume_path(self) -> Path:
        """The ``resume_path`` for `permtriton.compile`, so that the lock covers the states of long stages, too."""
        return self.file("safetensors")


def is_mount(path: Path) -> bool:
    """Returns whether a folder is a mount point; `os.path.ismount` misses folders that are bound to others."""
    return os.path.ismount(path) or str(path) in (each.mountpoint for each in psutil.disk_partitions(all=True))


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuses, before any work, an output folder that could not be written at the end.

    Raises:
        OutputError: as `check_name`; or the folder exists, is not empty, and ``overwrite`` is off, or permtriton did
            not write it, or its parent is missing or cannot be written.
    """
    folder = OutputFolder.at(output)
    check_name(folder.path)
    if folder.path.exists() and not (folder.path.is_dir() and not _entries(folder.path)):
        if not overwrite:
            raise OutputError(f"output {output} exists: choose another folder, or replace it with --overwrite")
        if not (folder.path / REPORT_FILE).is_file():
            raise OutputError(
                f"output {output} was not written by permtriton (it holds no {REPORT_FILE}), so --overwrite leaves it "
                "alone: choose another folder"
            )
    if not folder.home.is_dir():
        raise OutputError(f"output {output}: the folder {folder.home} does not exist; make it first")
    if not os.access(folder.home, os.W_OK):
        raise OutputError(f"output {output}: the folder {folder.home} cannot be written")


@contextmanager
def claimed(output: Path, *, overwrite: bool, say: Say = lambda text: None) -> Iterator[OutputFolder]:
    """Keeps other processes from an output inside the ``with`` block, and repairs what a killed one left.

    The lock ends with its process, however that ends. It may be claimed again inside the block.

    Args:
        output: folder to write.
        overwrite: whether an earlier output of permtriton may be replaced.
        say: reports what was repaired.

    Raises:
        OutputError: as `check_output`; or another process has claimed the output, or the disk reports an error.
    """
    folder = OutputFolder.at(output)
    check_name(folder.path)
    if not folder.home.is_dir() or not os.access(folder.home, os.W_OK):
        check_output(output, overwrite=overwrite)
    with locked(folder, say) as alone:
        if alone:
            with _clear_errors(folder):
                _repair(folder, say)
        check_output(output, overwrite=overwrite)
        yield folder


@contextmanager
def locked(folder: OutputFolder, say: Say) -> Iterator[bool]:
    """Holds the lock of an output; yields whether it was free, and False where the file system has no locks.

    Raises:
        OutputError: another process holds it, or its file cannot be written.
    """
    path = folder.file("lock")
    lock = FileLock(path, timeout=0, is_singleton=True, fallback_to_soft=False)
    again = lock.is_locked
    try:
        lock.acquire()
    except Timeout:
        holder = "which has just ended"
        with suppress(OSError):
            holder = path.read_text(encoding="utf-8").strip()
        raise OutputError(
            f"output {folder.path} is being written by another process ({holder}; lock {path}): wait for it to end, or "
            "choose another folder"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
            raise _not_written(folder.path, error) from error
        say(
            f"{folder.home} has no file locks ({error.strerror}): see to it that no other process writes "
            f"{folder.path.name}; what killed runs left there is not removed"
        )
        path.unlink(missing_ok=True)
        yield False
        return
    try:
        if not again:
            with _clear_errors(folder):
                path.write_bytes(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield not again
    finally:
        if not again:
            path.unlink(missing_ok=True)  # while it is held: who opened the file before must make a new one
        lock.release()


def _repair(folder: OutputFolder, say: Say) -> None:
    """Completes or removes what killed processes left of an output; to be called with its lock held."""
    for place in (folder, OutputFolder(folder.path, inside=True)):
        stem = re.escape(place.stem)
        for path in sorted(place.home.iterdir()) if place.home.is_dir() else []:
            if not path.is_dir() or path.is_symlink():
                continue
            if re.fullmatch(LEFTOVER_STATE.format(stem) + RANDOM_END, path.name):
                shutil.rmtree(path)
            elif not re.fullmatch(LEFTOVER_FOLDER.format(stem), path.name):
                continue
            elif ".old-" in path.name and not folder.path.exists():
                path.rename(folder.path)
                say(f"restored {folder.path}: a killed run had moved it away")
            else:
                shutil.rmtree(path)
                say(f"removed {path.name}, which a killed run left in {place.home}")
    if _fill(folder.path):
        say(f"completed {folder.path}: a run was killed while its files moved into place")


@contextmanager
def replacing_folder(output: Path, *, overwrite: bool, say: Say = lambda text: None) -> Iterator[Path]:
    """Yields a temporary folder, which takes the place of ``output`` at the end of the ``with`` block.

    After a failure or an interruption the temporary folder is deleted, and an earlier output is unchanged.

    Raises:
        OutputError: as `claimed`.
    """
    with claimed(output, overwrite=overwrite, say=say) as folder, _clear_errors(folder):
        partial = folder.file(f"partial-{os.getpid()}")
        partial.mkdir()  # what another process made without locks is not removed below
        try:
            yield partial
            sync(partial)
            _put_in_place(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _clear_errors(folder: OutputFolder) -> Iterator[None]:
    """Turns errors of the disk into `OutputError`."""
    try:
        yield
    except OSError as error:
        raise _not_written(folder.path, error) from error
    except Exception as error:
        if "No space left" in str(error):  # safetensors wraps the error of the disk
            raise _not_written(folder.path, OSError(errno.ENOSPC, "no space left on the disk")) from error
        raise


def _not_written(output: Path, error: OSError) -> OutputError:
    where = f" ({error.filename})" if error.filename and Path(os.fsdecode(error.filename)) != output else ""
    return OutputError(
        f"output {output} cannot be written: {error.strerror or error}{where}. Nothing was saved, and nothing earlier "
        "was lost: run the same command again once this is solved"
    )


def _put_in_place(partial: Path, folder: OutputFolder) -> None:
    if not folder.inside:
        try:
            _rename(partial, folder.path)
            return
        except OSError as error:
            if error.errno not in FIXED or not folder.path.is_dir():
                raise
    inside = OutputFolder(folder.path, inside=True)
    if not folder.inside:
        partial = Path(shutil.move(partial, inside.file(partial.name.rpartition(".")[2])))  # copied to another disk
        sync(partial)
    partial.rename(inside.file("complete"))
    try:
        _fill(folder.path)
    except KeyboardInterrupt:
        _fill(folder.path)
        raise


def _rename(partial: Path, output: Path) -> None:
    """Renames ``partial`` to ``output``; after an exception either the old or the new folder is there, complete."""
    old = output.with_name(f".{output.name}.old-{os.getpid()}")
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


def _fill(output: Path) -> bool:
    """Moves a complete output, which stands inside the folder ``output``, into place of what is there.

    May be called again after it was stopped anywhere: then it goes on.

    Returns:
        Whether there was something to move.
    """
    inside = OutputFolder(output, inside=True)
    complete, moving = inside.file("complete"), inside.file("moving")
    if complete.is_dir():
        sync_names(output)
        for entry in _report_last(_entries(output), reverse=True):  # without its report, it is no output any more
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        complete.rename(moving)
    if not moving.is_dir():
        return False
    for entry in _report_last(moving.iterdir()):
        entry.rename(output / entry.name)
    sync_names(output)
    moving.rmdir()
    return True


def _report_last(entries: Iterable[Path], reverse: bool = False) -> list[Path]:
    return sorted(entries, key=lambda entry: (entry.name == REPORT_FILE, entry.name), reverse=reverse)


def _entries(output: Path) -> list[Path]:
    """Returns what a folder holds, apart from working files and what belongs to an empty file system."""
    if not output.is_dir():
        return []
    return [each for each in output.iterdir() if not OURS.fullmatch(each.name) and each.name != EMPTY]
