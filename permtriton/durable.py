"""Makes files survive a power cut: a rename may reach the disk before the content of the file that was renamed."""

import errno
import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file under a temporary name and renames it once it is on the disk.

    Until then an earlier file stays as it was, and after a failure or an interruption the temporary file is removed.

    Args:
        path: File to write.
        write: Writes the content to the path that it is given.

    Raises:
        OSError: The disk is full or fails.
        Exception: Whatever ``write`` raises.
    """
    temporary = path.with_name(f".{path.name.removeprefix('.')}.tmp")
    try:
        write(temporary)
        sync(temporary)  # else a power cut may leave the new name with no content
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_names(path.parent)


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
    _sync(path)


def sync_names(folder: Path) -> None:
    """Waits until the names in a folder are on the disk: what was created, renamed or removed there."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot do it for folders
            raise
    finally:
        os.close(descriptor)
