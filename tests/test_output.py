"""Output folders: one process at a time, and leftovers of killed runs."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from permtriton.checkpoint.output import claimed, replacing_folder
from permtriton.errors import OutputError

from .folders import files

HOLD = """
import sys, time
from pathlib import Path
from permtriton.checkpoint.output import replacing_folder
with replacing_folder(Path(sys.argv[1]), overwrite=True) as partial:
    (partial / "permtriton.json").write_text("new")
    print("holding", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def place(tmp_path) -> Path:
    """The parent of the output ``out``, with nothing else in it."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def write(folder: Path, content: str) -> dict[str, bytes]:
    """Writes an output by hand: its report, weights and a folder; returns all files' bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "more").mkdir(exist_ok=True)
    for name in ("model.safetensors", "more/merges.txt", "permtriton.json"):
        (folder / name).write_text(f"{content} {name}")
    return files(folder)


def save(out: Path, content: str = "new", say: Callable[[str], None] = lambda text: None) -> dict[str, bytes]:
    with replacing_folder(out, overwrite=True, say=say) as partial:
        return write(partial, content)


@contextmanager
def another_process(out: Path) -> Iterator[subprocess.Popen]:
    """Runs a process that has claimed the output and written half of it."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_second_process_is_refused_and_a_killed_one_is_not_in_the_way(place):
    """The lock dies with its process, even by SIGKILL; what that process left is removed, and this is said."""
    earlier = write(place / "out", "earlier")
    with another_process(place / "out") as process:
        before = files(place)
        with pytest.raises(OutputError, match=f"out is being written by another process .*{process.pid}"):
            save(place / "out")
        assert files(place) == before
        save(place / "another")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert files(place / "out") == earlier
    assert sorted(path.name for path in place.glob(".out.*")) == [".out.lock", f".out.partial-{process.pid}"]
    said: list[str] = []
    assert save(place / "out", "new", said.append) == files(place / "out")
    assert [line for line in said if f"removed .out.partial-{process.pid}" in line] == said != []
    assert sorted(path.name for path in place.iterdir()) == ["another", "out"]


def test_only_leftovers_are_removed(place):
    kept = [".out.partial-1.lock", ".other.partial-1", "out.partial-1", ".out.partial-x", ".out.older"]
    for name in kept:
        write(place / name, "mine")
    (place / ".out.partial-7").write_text("a file, not a folder")
    write(place / ".out.dense-5", "half")
    save(place / "out")
    assert sorted(path.name for path in place.iterdir()) == sorted([*kept, ".out.partial-7", "out"])


def test_a_state_that_a_killed_run_was_writing_is_removed(place):
    """But no folder, and no link or file of another name."""
    write(place / "mine", "mine")
    write(place / ".out.search.safetensors.abcd0124.tmp", "mine")
    (place / ".out.partial-7").symlink_to(place / "mine")
    for name in ("abcd0123.tmp", "abcd.tmp", "tmp"):
        (place / f".out.search.safetensors.{name}").write_text("half")
    kept = {path.name for path in place.iterdir()} - {".out.search.safetensors.abcd0123.tmp"}
    with claimed(place / "out", overwrite=True):
        pass
    assert {path.name for path in place.iterdir()} == kept
    assert set(files(place / "mine")) == {"model.safetensors", "more/merges.txt", "permtriton.json"}


@pytest.mark.parametrize("output", ["is missing", "is there"])
def test_an_output_that_was_moved_away_comes_back(place, output):
    """A run killed between its two renames leaves the earlier output under another name only."""
    earlier = write(place / ".out.old-1", "earlier")
    if output == "is there":
        earlier = write(place / "out", "later")
    said: list[str] = []
    with claimed(place / "out", overwrite=True, say=said.append):
        assert files(place / "out") == earlier
    assert [path.name for path in place.iterdir()] == ["out"]
    assert ("restored" in said[0]) == (output == "is missing")


def test_without_locks_it_says_so_and_removes_nothing(place, monkeypatch):
    def flock(*_args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    left = {".out.partial-1", f".out.partial-{os.getpid()}"}  # in a container, the number may be the same each time
    for name in left:
        write(place / name, "perhaps of a living process")
    said: list[str] = []
    expected = save(place / "out", "new", said.append)
    assert files(place / "out") == expected
    assert "no file locks (No locks available)" in said[0]
    assert {path.name for path in place.iterdir()} == {"out", *left}


def test_an_empty_folder_needs_no_overwrite(place):
    (place / "out").mkdir()
    with replacing_folder(place / "out", overwrite=False) as partial:
        expected = write(partial, "new")
    assert files(place / "out") == expected


def test_everything_is_on_the_disk_before_it_is_renamed(place, monkeypatch):
    """Else a power cut may leave the name without the content."""
    synced, renamed = set(), []
    fsync, rename = os.fsync, Path.rename

    def recorded(self: Path, target: Path) -> Path:
        renamed.append(self.name)
        assert {path.stat().st_ino for path in [self, *self.rglob("*")]} <= synced, self
        return rename(self, target)

    def remember(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", remember)
    monkeypatch.setattr(Path, "rename", recorded)
    save(place / "out")
    assert len(renamed) == 1
    assert place.stat().st_ino in synced, "the new name, too"


# -- mount points ----------------------------------------------------------------------------------------------------


def test_a_mount_point_is_refused_in_a_line(place, monkeypatch):
    """Some are known by their device only; others, which are bound folders, by the system's list only."""
    (place / "out").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("os.path.ismount", lambda path: path == place / "out")
        with pytest.raises(OutputError, match=r"out is a mount point, .*: give a folder inside it"):
            save(place / "out")
    bound = type("Partition", (), {"mountpoint": str(place / "out")})
    monkeypatch.setattr("psutil.disk_partitions", lambda all: [bound])
    with pytest.raises(OutputError, match="is a mount point"):
        save(place / "out")
    save(place / "out" / "inside")
    assert [path.name for path in place.iterdir()] == ["out"]
