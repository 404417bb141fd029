"""Files are on the disk before they take a name, whoever writes them."""

import os
from pathlib import Path

import pytest
import torch

from permtriton.cli.tables import write_table
from permtriton.comparison.results import Key, Measured, ResultFile
from permtriton.durable import replace_file
from permtriton.reporting.pages import Page, write
from permtriton.running.state import StateFile

WRITERS = {
    "results": lambda path: ResultFile(path, {}).put(Key("dense"), Measured(1.0, 0.0, 1.0, {}, 1.0, 1.0, None)),
    "table.csv": lambda path: write_table(path, ["a"], [[1]], {}),
    "page.html": lambda path: write(Page("", "", (), ()), path, overwrite=True),
    "state.safetensors": lambda path: StateFile(path, {}).write({"a": torch.ones(1)}, {}),
}


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
    assert events == [f"sync .{name}.tmp", f"rename .{name}.tmp", f"sync {tmp_path.name}"]
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
