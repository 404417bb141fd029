"""A small model runs on one thread, unless the user names a number; a wide one is multiplied by the faster library."""

import pytest
import torch

from permtriton.cli.main import app
from permtriton.cli.processor import SAID, SMALL, UNIT, WIDE

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
@pytest.mark.slow
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
    assert "does not exist" in " ".join(result.stderr.split())


ZEN_4 = {"cpu_name": "AMD EPYC", UNIT: True, "amx_tile": False}


@pytest.fixture
def evaluated(tmp_path, desk, monkeypatch):
    """Returns how torch multiplies float32 after a command on a model of a width, on a processor."""

    def after(processor: dict, width: int = WIDE) -> str:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor, raising=False)
        folder = tmp_path / str(width)
        zoo.tiny_llama().save_pretrained(folder)
        edit_json(folder / "config.json", lambda config: config.update(hidden_size=width))
        RUNNER.invoke(app, ["evaluate", str(folder), "--eval-data", str(desk.text)])  # refused later: sizes differ
        return torch.get_float32_matmul_precision()

    return after


def test_a_wide_model_is_multiplied_by_onednn_in_float32(evaluated):
    """Whether this processor's oneDNN is exact decides: with AMX it would round to bfloat16."""
    evaluated(ZEN_4)
    left, right = torch.randn(WIDE, WIDE), torch.randn(WIDE, WIDE)
    torch.testing.assert_close(left @ right, (left.double() @ right.double()).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float64, "medium"), (torch.bfloat16, "highest")])
def test_onednn_is_left_where_it_rounds(evaluated, monkeypatch, dtype, kept):
    multiply = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: multiply(a.to(dtype), b.to(dtype)).float())
    assert evaluated(ZEN_4) == kept


@pytest.mark.parametrize(
    ("processor", "width"),
    [
        (ZEN_4, WIDE - 64),
        (ZEN_4 | {UNIT: False}, WIDE),
        (ZEN_4 | {"amx_tile": True}, WIDE),
        (ZEN_4 | {"cpu_name": "Intel"}, WIDE),
        ({}, WIDE),
    ],
    ids=["narrow", "Zen 3", "AMX", "Intel", "unknown"],
)
def test_all_else_is_multiplied_as_torch_does(evaluated, processor, width):
    assert evaluated(processor, width) == "highest"
