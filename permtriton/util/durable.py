"""Makes files survive a power cut: a rename may reach the disk before the content of the file that was renamed."""

import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RANDOM_END = r"\.[a-z0-9_]{8}\.tmp"  # what follows a file's name in that of the folder that holds it until it is whole
NOT_YET_LOCKED = 60  # seconds in which a folder may have been made and not yet locked, with a margin


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file in a new folder beside its place and renames it once it is on the disk.

    Until then an earlier file stays as it was, and after a failure or an interruption the folder is removed. What a
    killed process left is removed by the next one that writes the file. The folder has a random name and only its owner
    can reach it, so that neither a link nor a file that someone put there is ever written to.

    Args:
        write: Writes the content to the path that it is given.

    Raises:
        OSError: The disk is full or fails.
        Exception: Whatever ``write`` raises.
    """
    _remove_leftovers(path)
    with _new_folder(path) as folder:
        temporary = folder / path.name
        write(temporary)
        sync(temporary)  # else a power cut may leave the new name with no content
        temporary.replace(path)
    sync_names(path.parent)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder inside the ``with`` block, after whoever does; goes on without where there are none.

    Raises:
        OSError: The folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks, where `_remove_leftovers` removes nothing either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Yields a folder for a half-written file, locked meanwhile: this tells it from those of killed processes."""
    folder = Path(tempfile.mkdtemp(".tmp", f".{path.name.removeprefix('.')}.", path.parent))
    try:
        with locked_folder(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(path: Path) -> None:
    """Removes the folders that killed processes left of a file."""
    name = re.compile(rf"\.{re.escape(path.name.removeprefix('.'))}{RANDOM_END}")
    for folder in [each for each in path.parent.iterdir() if name.fullmatch(each.name)]:
        with suppress(OSError):  # a link, held by a living process, of another user, or removed meanwhile
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(descriptor).st_mtime > NOT_YET_LOCKED:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def sync(path: Path) -> None:
    """Waits until a file, or a folder with everything in it, is on the disk.

    Call it before a rename that replaces something. It costs as long as the disk takes for what is not yet written,
    which is little beside hours of work.

    Raises:
        OSError: The disk is full or fails; a write that seemed to succeed may fail only here.
    """
    if path.is_dir():
        for entry in path.iterdir():
            sync(entry)
    sync_names(path)


def sync_names(folder: Path) -> None:
    """Waits until the names in a folder, or the content of a file, are on the disk: what was changed there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot do it for folders
            raise
    finally:
        os.close(descriptor)
