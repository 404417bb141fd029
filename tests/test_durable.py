"""Files are on the disk before they take a name, whoever writes them, and nothing else is touched on the way."""

import os
import re
import stat
from pathlib import Path

import pytest
import torch

from permtriton.evaluation.compare_results import Measured, ResultFile
from permtriton.kernels.autotune import write_entries
from permtriton.running.resume import StateFile
from permtriton.util.durable import RANDOM_END, replace_file
from permtriton.util.output_files import write_file, write_report_file

MEASURED = Measured(perplexity=1.0, cosine=1.0, tasks={}, accuracy=None, seconds=1.0, compile_seconds=1.0)
RANDOM = re.compile(rf"{RANDOM_END}$")
WRITERS = {
    "results": lambda path: ResultFile(path, {}).get("dense", lambda: MEASURED),
    "report.json": lambda path: write_report_file(path, {}),
    "page.html": lambda path: write_file(path, b"a page"),
    "state.safetensors": lambda path: StateFile(path, {}).write({"a": torch.ones(1)}),
    "autotune.json": lambda path: write_entries(path, "a GPU", {}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch, name):
    events, fsync, replace = [], os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        events.append(f"sync {RANDOM.sub('', Path(os.readlink(f'/proc/self/fd/{descriptor}')).name)}")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append(f"rename {RANDOM.sub('', path.name)}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    WRITERS[name](tmp_path / name)
    assert events == [f"sync .{name}", f"rename .{name}", f"sync {tmp_path.name}"]
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


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "state.safetensors"])  # for its owner only
def test_a_file_has_the_mode_that_the_user_gives_new_files(tmp_path, name, umask, mode):
    before = os.umask(umask)
    try:
        WRITERS[name](tmp_path / name)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
