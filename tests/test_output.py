"""Output folders: one process at a time, leftovers of killed runs, and mount points."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from filelock import Timeout

from permtriton.checkpoint.output import claimed, replacing_folder
from permtriton.errors import OutputError
from permtriton.running.state import StateFile

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


def test_the_process_id_of_a_leftover_does_not_matter(place):
    """Ids are used again: the one of a living process, here this one, does not keep a leftover."""
    write(place / f".out.partial-{os.getpid()}", "half")
    write(place / ".out.partial-1", "half")
    save(place / "out")
    assert [path.name for path in place.iterdir()] == ["out"]


def test_only_leftovers_are_removed(place):
    kept = [".out.partial-1.lock", ".other.partial-1", "out.partial-1", ".out.partial-x", ".out.older"]
    for name in kept:
        write(place / name, "mine")
    (place / ".out.partial-7").write_text("a file, not a folder")
    save(place / "out")
    assert sorted(path.name for path in place.iterdir()) == sorted([*kept, ".out.partial-7", "out"])


@pytest.mark.parametrize("inside", [False, True])
def test_a_state_that_a_killed_run_was_writing_is_removed(place, inside):
    """But no link, file or folder of another name."""
    home, stem = (place / "out", "permtriton") if inside else (place, "out")
    write(place / "out", "earlier")
    write(place / "mine", "mine")
    write(home / f".{stem}.search.safetensors.abcd_123.tmp", "half")
    write(home / f".{stem}.search.safetensors.abcd.tmp", "mine")
    for name in ("search.safetensors.abcd_124.tmp", "partial-7"):
        (home / f".{stem}.{name}").symlink_to(place / "mine")
    (home / f".{stem}.search.safetensors.tmp").write_text("mine")
    kept = {path.name for path in home.iterdir()} - {f".{stem}.search.safetensors.abcd_123.tmp"}
    with claimed(place / "out", overwrite=True):
        pass
    assert {path.name for path in home.iterdir()} == kept
    assert set(files(place / "mine")) == {"model.safetensors", "more/merges.txt", "permtriton.json"}


def test_leftovers_inside_a_folder_that_cannot_be_renamed_are_removed(place):
    """The system may refuse a rename also of a folder that is no mount point: then files were copied inside."""
    earlier = write(place / "out", "earlier")
    write(place / "out" / ".permtriton.partial-7", "half")
    said: list[str] = []
    with claimed(place / "out", overwrite=True, say=said.append):
        assert files(place / "out") == earlier
    assert "removed .permtriton.partial-7" in said[0]


def test_a_holder_that_ends_meanwhile_is_refused_in_a_line(place, monkeypatch):
    def acquire(_lock: object) -> None:
        raise Timeout("")

    monkeypatch.setattr("permtriton.checkpoint.output.FileLock.acquire", acquire)
    with pytest.raises(OutputError, match="which has just ended"), claimed(place / "out", overwrite=True):
        pass


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


def test_half_removed_folders_are_not_restored(place, monkeypatch):
    """Killed while the replaced output is being deleted, a run leaves nothing that looks like an output."""
    write(place / "out", "earlier")
    monkeypatch.setattr("shutil.rmtree", lambda *_args, **_options: None)
    save(place / "out")
    monkeypatch.undo()
    assert len(list(place.glob(".out.*"))) == 1
    (place / "out").rename(place / "elsewhere")
    with claimed(place / "out", overwrite=True):
        assert [path.name for path in place.iterdir() if path.is_dir()] == ["elsewhere"]


def test_without_locks_it_says_so_and_removes_nothing(place, monkeypatch):
    def flock(*_args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    write(place / ".out.partial-1", "perhaps of a living process")
    said: list[str] = []
    expected = save(place / "out", "new", said.append)
    assert files(place / "out") == expected
    assert "no file locks (No locks available)" in said[0]
    assert sorted(path.name for path in place.iterdir()) == [".out.partial-1", "out"]


def test_the_lock_is_held_until_the_outermost_claim_ends(place):
    with claimed(place / "out", overwrite=True):
        save(place / "out")
        assert (place / ".out.lock").is_file()
        with (place / ".out.lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert [path.name for path in place.iterdir()] == ["out"]


def test_an_empty_folder_needs_no_overwrite(place):
    (place / "out").mkdir()
    with replacing_folder(place / "out", overwrite=False) as partial:
        expected = write(partial, "new")
    assert files(place / "out") == expected


@pytest.mark.parametrize("kind", ["output", "state"])
def test_everything_is_on_the_disk_before_it_is_renamed(place, monkeypatch, kind):
    """Else a power cut may leave the name without the content."""
    synced, renamed = set(), []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def record(change: Callable) -> Callable:
        def patched(self: Path, target: Path) -> Path:
            renamed.append(self.name)
            written = [self, *self.rglob("*")] if self.is_dir() else [self]
            assert {path.stat().st_ino for path in written} <= synced, self
            return change(self, target)

        return patched

    def remember(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", remember)
    monkeypatch.setattr(Path, "rename", record(rename))
    monkeypatch.setattr(Path, "replace", record(replace))
    if kind == "output":
        save(place / "out")
    else:
        StateFile(place / "state.safetensors", {}).write({"index": torch.arange(4)}, {})
    assert len(renamed) == 1
    assert place.stat().st_ino in synced, "the new name, too"


# -- mount points ----------------------------------------------------------------------------------------------------

BUSY = [errno.EBUSY, errno.EXDEV]


def fixed_in_place(monkeypatch, out: Path, code: int = errno.EBUSY) -> None:
    """Makes ``out`` a folder that cannot be renamed, nor replaced by another one."""
    rename = Path.rename

    def patched(self: Path, target: Path) -> Path:
        if out in (self, Path(target)):
            raise OSError(code, os.strerror(code))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", patched)


@pytest.mark.parametrize("mounted", [True, False], ids=["known", "not known"])
@pytest.mark.parametrize("earlier", [True, False], ids=["earlier output", "empty"])
@pytest.mark.parametrize("code", BUSY, ids=["EBUSY", "EXDEV"])
def test_a_mount_point_is_written_inside(place, monkeypatch, earlier, mounted, code):
    out = place / "out"
    out.mkdir()
    if earlier:
        write(out, "earlier")
        (out / "model-00001-of-00002.safetensors").write_text("a file that is not written any more")
    fixed_in_place(monkeypatch, out, code)
    monkeypatch.setattr("permtriton.checkpoint.output.is_mount", lambda path: mounted)
    expected = save(out)
    assert files(out) == expected
    assert [path.name for path in place.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "more", "permtriton.json"]


def test_everything_of_a_mount_point_stands_inside(place, monkeypatch):
    """What is beside a volume goes with the container, and may be on another disk or not writable."""
    out = place / "out"
    (out / "lost+found").mkdir(parents=True)
    fixed_in_place(monkeypatch, out)
    monkeypatch.setattr("permtriton.checkpoint.output.is_mount", lambda path: True)
    with claimed(out, overwrite=False) as folder, replacing_folder(out, overwrite=False) as partial:
        assert folder.resume_path.parent == partial.parent == out
        assert [path.name for path in place.iterdir()] == ["out"]
        write(partial, "new")
    assert sorted(path.name for path in out.iterdir()) == ["lost+found", "model.safetensors", "more", "permtriton.json"]


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs."""


def killed_at(number: int, monkeypatch) -> None:
    """The process ends at the change ``number`` that it makes to names: of renames and removals."""
    done = [0]

    def counted(change: Callable) -> Callable:
        def patched(*arguments: object, **options: object) -> object:
            done[0] += 1
            if done[0] >= number:
                raise Killed
            return change(*arguments, **options)

        return patched

    for owner, name in ((Path, "rename"), (Path, "rmdir"), (Path, "unlink"), (__import__("shutil"), "rmtree")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize("number", range(1, 12))
def test_killed_while_filling_a_mount_point(place, monkeypatch, number):
    """At every change: the earlier output is whole, or the next run completes the new one; nothing is between."""
    out = place / "out"
    earlier = write(out, "earlier")
    new = write(place / "expected", "new")
    monkeypatch.setattr("permtriton.checkpoint.output.is_mount", lambda path: True)
    with monkeypatch.context() as patch:
        fixed_in_place(patch, out)
        killed_at(number, patch)
        with pytest.raises(Killed):
            save(out)
    stopped = {name: content for name, content in files(out).items() if not name.startswith(".")}
    if "permtriton.json" in stopped:
        assert stopped in (earlier, new)
    with claimed(out, overwrite=True):
        assert {name: text for name, text in files(out).items() if name != ".permtriton.lock"} in (earlier, new)
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "more", "permtriton.json"]


def test_a_folder_of_someone_else_is_not_taken_for_leftovers(place, monkeypatch):
    out = place / "out"
    write(out / ".permtriton.partial-1", "half")
    (out / "thesis.txt").write_text("mine")
    monkeypatch.setattr("permtriton.checkpoint.output.is_mount", lambda path: True)
    with pytest.raises(OutputError, match="not written by permtriton"):
        save(out)
    assert (out / "thesis.txt").read_text() == "mine"


MOUNTED = """
import subprocess, sys
from pathlib import Path
import torch
from permtriton.checkpoint.output import is_mount, replacing_folder
from permtriton.errors import OutputError
from permtriton.running.state import StateFile

def full(act):
    try:
        act()
    except OutputError as error:
        assert "No space left on device" in str(error), error
    else:
        raise AssertionError("the disk is too large")

place = Path(sys.argv[1])
beside = place / "beside"
for kind in (["-t", "tmpfs", "-o", "size=1m", "tmpfs"], ["--bind", str(beside)]):
    out = place / f"a volume {len(kind)}"
    for folder in (out, beside):
        folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", *kind, str(out)], check=False).returncode:
        sys.exit(77)
    assert is_mount(out) and not is_mount(beside)
    for content in ("first", "second"):
        with replacing_folder(out, overwrite=content == "second") as partial:
            (partial / "model.safetensors").write_text(content)
            (partial / "permtriton.json").write_text(content)
        assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "permtriton.json"]
        assert {path.read_text() for path in out.iterdir()} == {content}
    if "tmpfs" in kind:
        def save():
            with replacing_folder(out, overwrite=True) as partial:
                (partial / "model.safetensors").write_bytes(bytes(1 << 21))
        full(save)
        assert {path.read_text() for path in out.iterdir()} == {"second"}
        state = StateFile(out / ".permtriton.search.safetensors", {"weights": "mine"})
        state.write({"stream": torch.arange(8)}, {})
        full(lambda: state.write({"stream": torch.arange(1 << 18)}, {}))
        assert state.read()[0]["stream"].tolist() == list(range(8))
        assert sorted(path.name for path in out.iterdir())[1:] == ["model.safetensors", "permtriton.json"]
print(sorted(path.name for path in place.iterdir()))
"""


def test_a_real_mount_point(place):
    """A small disk, which becomes full, and a bound folder.

    In a mount namespace of its own, which needs rights: the mounts are gone with the process.
    """
    try:
        command = ["unshare", "--mount", sys.executable, "-c", MOUNTED, str(place)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if result.returncode == 77 or "unshare failed" in result.stderr:
        pytest.skip(f"this user may not mount: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "['a volume 2', 'a volume 5', 'beside']\n"
