"""Files are on the disk before they take a name, whoever writes them, and nothing else is touched on the way."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from permtriton.comparison.results import Key, Measured, ResultFile
from permtriton.comparison.tables import write_table
from permtriton.kernels.autotune import write_entries
from permtriton.running.state import StateFile
from permtriton.util.durable import replace_file
from permtriton.util.output_files import write_file

MEASURED = Measured(
    perplexity=1.0, cosine=1.0, tasks={}, accuracy=None, seconds=1.0, compile_seconds=1.0, peak_bytes=None
)
WRITERS = {
    "results": lambda path: ResultFile(path, {}).put(Key("dense"), MEASURED),
    "table.csv": lambda path: write_table(path, ["a"], [[1]], {}),
    "page.html": lambda path: write_file(path, b"a page"),
    "state.safetensors": lambda path: StateFile(path, {}).write({"a": torch.ones(1)}, {}),
    "autotune.json": lambda path: write_entries(path, "a GPU", {}),
}
HOLD = """
import sys, time
from pathlib import Path
from permtriton.util.durable import replace_file

def write(temporary):
    temporary.write_text("half")
    print("holding", flush=True)
    sys.stdin.readline()

replace_file(Path(sys.argv[1]), write)
"""


@pytest.mark.parametrize("name", WRITERS)
def test_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch, name):
    events, fsync, replace = [], os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    WRITERS[name](tmp_path / name)
    assert events == [f"sync {name}", f"rename {name}", f"sync {tmp_path.name}"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_a_failure_the_earlier_file_is_all_there_is(tmp_path, error):
    def interrupted(path: Path) -> None:
        path.write_text("half")
        raise error

    (tmp_path / "file").write_text("earlier")
    with pytest.raises(error):
        replace_file(tmp_path / "file", interrupted)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "earlier")]


@pytest.mark.parametrize("name", WRITERS)
def test_no_name_that_can_be_foreseen_is_written_to(tmp_path, name):
    """A link or a file that someone put under the temporary name of another writer stays as it is."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / f".{name}.tmp").symlink_to("precious")
    WRITERS[name](tmp_path / name)
    assert (tmp_path / "precious").read_text() == "mine"
    (tmp_path / f".{name}.tmp").unlink()
    (tmp_path / f".{name}.tmp").write_text("mine, too")
    WRITERS[name](tmp_path / name)
    assert (tmp_path / f".{name}.tmp").read_text() == "mine, too"
    assert {path.name for path in tmp_path.iterdir()} == {"precious", f".{name}.tmp", name}


def test_a_link_in_place_of_the_output_is_replaced_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "file").symlink_to("precious")
    replace_file(tmp_path / "file", lambda path: path.write_text("new"))
    assert [(tmp_path / name).read_text() for name in ("precious", "file")] == ["mine", "new"]


def test_nobody_else_can_reach_a_half_written_file(tmp_path):
    def write(path: Path) -> None:
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        path.write_text("new")

    replace_file(tmp_path / "file", write)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "state.safetensors"])  # for its owner only
def test_a_file_has_the_mode_that_the_user_gives_new_files(tmp_path, name, umask, mode):
    before = os.umask(umask)
    try:
        WRITERS[name](tmp_path / name)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


def test_what_a_killed_writer_left_is_removed_and_a_living_one_is_not_disturbed(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        [left] = tmp_path.iterdir()
        os.utime(left, (0, 0))
        replace_file(tmp_path / "file", lambda path: path.write_text("new"))
        assert (left / "file").read_text() == "half"
        process.kill()
    kept = [".file.abcdefgh.tmp", ".other.abcdefgh.tmp", ".file.ABCDEFGH.tmp"]
    (tmp_path / kept[0]).symlink_to("precious")
    for folder in ("precious", *kept[1:]):
        (tmp_path / folder).mkdir()
        os.utime(tmp_path / folder, (0, 0))
    (tmp_path / ".file.just1234.tmp").mkdir()
    replace_file(tmp_path / "file", lambda path: path.write_text("newer"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, ".file.just1234.tmp", "file", "precious"])
    assert (tmp_path / "file").read_text() == "newer"
