"""What the command line says when runs overlap or were another one, disks are full and files change under its hands."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from permtriton.cli.main import app

from .desk import RUNNER, check_refusal
from .world import nothing_loads

QUICK = ("--recipe", "searched,mask", "--search-rounds", 1, "--micro-batch-size", 4)


@pytest.fixture
def interrupted(desk, monkeypatch) -> Path:
    """The state of a run that was interrupted while saving."""

    def stop(*_args: object, **options: object) -> None:
        if options.get("state_dict") != {}:  # else it is the rehearsal
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", stop)
        assert RUNNER.invoke(app, desk.compile(*QUICK)).exit_code == 130
    assert sorted(path.name for path in desk.folder.iterdir()) == [".out.searched.safetensors", "out"]
    return desk.folder / ".out.searched.safetensors"


@pytest.mark.slow
def test_another_run_is_refused_until_it_restarts(desk, interrupted):
    other = (*QUICK, "--search-rounds", 2, "--seed", 3)
    desk.refuses(
        desk.compile(*other), "belongs to another run: search_rounds was 1 and is 2; seed was 0 and is 3", "--restart"
    )
    result = RUNNER.invoke(app, desk.compile(*other, "--restart"))
    assert result.exit_code == 0, result.stderr
    assert "continuing" not in result.stderr
    assert [path.name for path in desk.folder.iterdir()] == ["out"]


def test_two_compilations_of_one_output(desk, monkeypatch):
    """The second one is refused before it loads anything; the first one is not disturbed."""
    nothing_loads(monkeypatch)

    def busy(*_args: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "held elsewhere")

    monkeypatch.setattr("fcntl.flock", busy)
    lock = desk.write(".out.lock", "process 1234 on node7\n")
    desk.refuses(desk.compile(), "another process (process 1234 on node7", str(lock), "wait for it to end")
    desk.refuses(["export", str(desk.out), "--output", str(desk.folder / "out"), "--overwrite"], "which is read")
    desk.write(".packed.lock", "process 1235 on node7\n")
    desk.refuses(["export", str(desk.out), "--output", str(desk.folder / "packed")], "process 1235 on node7")


@pytest.mark.slow
def test_a_full_disk_keeps_what_was_found(desk, interrupted, monkeypatch):
    """The states of the steps stay, and the same command continues once there is room."""
    before = desk.files()

    def full(*_args: object, **options: object) -> None:
        if options.get("state_dict") != {}:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", full)
        result = RUNNER.invoke(app, desk.compile(*QUICK))
    words = ("cannot be written: No space left on device", "nothing earlier was lost", "run the same command again")
    check_refusal(result.exit_code, result.stderr, words)
    assert desk.files().keys() == before.keys()
    result = RUNNER.invoke(app, desk.compile(*QUICK))
    assert "continuing after round 1" in result.stderr
    assert (result.exit_code, [path.name for path in desk.folder.iterdir()]) == (0, ["out"])


@pytest.mark.slow
def test_standard_output_that_has_no_such_characters(desk, tmp_path):
    """As in a locale of an old encoding, such as a Turkish one; what depends on it otherwise is nothing of ours."""
    model = shutil.copytree(desk.model, tmp_path / "ılık-漢")
    turkish = CliRunner(charset="iso-8859-9", env={"LC_ALL": "tr_TR.ISO-8859-9"})
    for more in ((), ("--json",)):
        result = turkish.invoke(app, ["inspect", str(model), *more])
        assert result.exit_code == 0, result.stderr
    result = turkish.invoke(app, desk.compile(model=model, output=desk.folder / "ılık-漢"))
    assert (result.exit_code, "ılık-\\u6f22" in result.stdout) == (0, True), result.stderr


# -- files that cannot be read --------------------------------------------------------------------------------------


def test_a_text_that_may_not_be_read(desk, monkeypatch):
    read = Path.read_text

    def refuse(path: Path, *arguments: object, **options: object) -> str:
        if path == desk.text:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    desk.refuses(desk.compile(), str(desk.text), "cannot be read", "Permission denied")
