"""Makes files survive a power cut: a rename may reach the disk before the content of the file that was renamed."""

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RANDOM_END = r"\.[0-9a-f]{8}\.tmp"  # regular expression for the end of a file's name while it is written


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file under a random name beside its place and renames it once it is on the disk.

    Until the rename, an earlier file is unchanged; if an exception prevents the rename, the new file is removed. Nobody
    can foresee the random name, so that no link or file that someone else made is ever written to.
    """
    temporary = path.with_name(f".{path.name.removeprefix('.')}.{secrets.token_hex(4)}.tmp")
    try:
        write(temporary)
        sync(temporary)  # else a power cut may leave the new name with no content
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_names(path.parent)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Waits for a folder's lock and holds it inside the context, unless the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Waits until a file, or a folder with everything in it, is on the disk.

    Call it before a rename that replaces something. It takes as long as the disk needs for data that is not yet
    written, which is little compared with hours of work.
    """
    if path.is_dir():
        for entry in path.iterdir():
            sync(entry)
    sync_names(path)


def sync_names(folder: Path) -> None:
    """Waits until changes of the names in a folder, or of the content of a file, are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)
