"""A small model runs on one thread, unless the user names a number."""

import pytest
import torch

from permtriton.cli.main import app
from permtriton.cli.threads import SAID, SMALL

from . import zoo
from .desk import RUNNER
from .folders import edit_json
from .gguf_files import llama, write_gguf

SHORT = ["--samples", "2", "--sequence-length", "8", "--calibration"]


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch):
    """Two threads, as on a machine with two cores where nobody named a number."""
    before = torch.get_num_threads()
    for name in SAID:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("command", ["compile", "dry run", "compare", "evaluate"])
def test_each_command_spares_threads(desk, command, tmp_path):
    data = [*SHORT, str(desk.text), "--eval-data", str(desk.text)]
    arguments = {
        "compile": ["compile", "--recipe", "mask", "--output", str(tmp_path / "out"), *data],
        "dry run": ["compile", "--dry-run", "--recipe", "mask", *data],
        "compare": ["compare", "--methods", "magnitude", "--output", str(tmp_path / "a.json"), *data],
        "evaluate": ["evaluate", "--eval-data", str(desk.text)],
    }[command]
    result = RUNNER.invoke(app, [arguments[0], str(desk.model), *arguments[1:]])
    assert result.exit_code == 0, result.stderr
    assert torch.get_num_threads() == 1
    assert "one thread, because the model is small; OMP_NUM_THREADS=2 takes more" in " ".join(result.stderr.split())


def test_a_gguf_file_tells_its_size(desk, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", llama())
    RUNNER.invoke(app, ["evaluate", str(tmp_path / "tiny.gguf"), "--eval-data", str(desk.text)])
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("name", SAID)
def test_who_names_a_number_gets_it(desk, monkeypatch, name):
    monkeypatch.setenv(name, "2")
    assert RUNNER.invoke(app, ["evaluate", str(desk.model), "--eval-data", str(desk.text)]).exit_code == 0
    assert torch.get_num_threads() == 2


def test_a_large_model_keeps_all_threads(tmp_path, desk):
    zoo.tiny_llama().save_pretrained(tmp_path / "large")
    edit_json(tmp_path / "large/config.json", lambda config: config.update(hidden_size=SMALL + 64))
    RUNNER.invoke(app, ["evaluate", str(tmp_path / "large"), "--eval-data", str(desk.text)])  # refused: sizes differ
    assert torch.get_num_threads() == 2


def test_a_model_that_cannot_be_read_is_refused_by_what_reads_it(tmp_path):
    result = RUNNER.invoke(app, ["evaluate", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "is not a folder" in " ".join(result.stderr.split())
