"""Output files: what a command must not replace, or cannot write, is refused before any work."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from permtriton.cli import evaluate
from permtriton.errors import OutputError
from permtriton.evaluation import compare
from permtriton.util.output_files import check_file, check_report_file, write_report_file

from .desk import Desk
from .world import nothing_loads

COMMANDS = ("evaluate", "compare", "report", "compile", "dry run", "export")
KINDS = {
    "evaluate": (evaluate.REPORT_KEYS, {"against": 1, "protocol": 1, "tokens_per_second": 1, "model": 1}),
    "compare": (compare.REPORT_KEYS, {"measure": 1, "patterns": 1, "rows": 1, "versions": 1, "model": 1}),
}


@pytest.fixture
def no_work(monkeypatch):
    nothing_loads(monkeypatch)


def commands(desk: Desk, output: object) -> dict[str, list[str]]:
    """A command of each kind that writes a file, with its output."""
    model, text = desk.model, desk.text
    arguments = {
        "evaluate": ["evaluate", model, "--eval-data", text, "--output", output],
        "compare": ["compare", model, "--eval-data", text, "--calibration", text, "--output", output],
        "report": ["report", desk.out, "--output", output],
    }
    return {name: [str(argument) for argument in each] for name, each in arguments.items()}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("evaluate", "tokenizer.json"),
        ("evaluate", "permtriton.json"),
        ("compare", "tokenizer.json"),
        ("report", "page.html"),
    ],
)
def test_a_file_of_someone_else_is_not_replaced(desk, no_work, command, name):
    file = desk.write(name, '{"version": "1.0", "versions": {}}' if name.endswith(".json") else "mine")
    desk.refuses(commands(desk, file)[command], f"{name} exists", "--overwrite")


@pytest.mark.parametrize("read", ["--calibration", "--eval-data", "--config"])
def test_an_output_that_holds_what_is_read_is_refused(desk, no_work, read):
    """It would go with the earlier output that `--overwrite` replaces."""
    text = desk.write("out/read.txt", desk.text.read_text() if read != "--config" else "samples = 4")
    desk.refuses(desk.compile(read, text), "contains", "read.txt, which is an input: choose another folder")


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_is_replaced_by_one_of_its_kind_only(tmp_path, kind):
    path, keys = tmp_path / "t.json", KINDS[kind][0]
    for other, (_, report) in KINDS.items():
        write_report_file(path, report)
        with nullcontext() if other == kind else pytest.raises(OutputError, match="exists: choose another file"):
            check_report_file(path, keys, overwrite=False)
        check_report_file(path, keys, overwrite=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [("t.md", r"is \.md; expected \.json"), ("table", "extension is missing"), ("no/t.json", "does not exist")],
)
def test_what_cannot_be_written_is_refused_before(tmp_path, name, words):
    with pytest.raises(OutputError, match=words):
        check_report_file(tmp_path / name, (), overwrite=False)


@pytest.mark.parametrize("failing", ["write_bytes", "replace"])
def test_an_earlier_file_survives_a_full_disk(tmp_path, monkeypatch, failing):
    def full(path: Path, *_arguments: object, **_named: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "t.json").write_text("earlier")
    monkeypatch.setattr(Path, failing, full)
    with pytest.raises(OutputError, match=r"t\.json cannot be written: No space left on device"):
        write_report_file(tmp_path / "t.json", {})
    monkeypatch.undo()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("t.json", "earlier")]


def test_what_is_no_file_is_never_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    for path, words in ((Path("/dev/null"), "is no plain file"), (tmp_path / "folder", "is a folder")):
        with pytest.raises(OutputError, match=words):
            check_file(path, overwrite=True)


def test_a_link_stays_one(desk):
    """What it leads to was checked, and is what is written; the folder of the link may take no file."""
    (desk.folder / "data").mkdir()
    link = desk.folder / "t.json"
    link.symlink_to("data/t.json")
    write_report_file(link, {"new": 1})
    assert link.is_symlink()
    assert json.loads((desk.folder / "data" / "t.json").read_text()) == {"new": 1}


# -- names ---------------------------------------------------------------------------------------------------------


def every_output(desk: Desk, output: str) -> dict[str, list[str]]:
    """Every command that has an output, with this one."""
    folders = {
        "compile": desk.compile("--output", output),
        "dry run": desk.compile("--output", output, "--dry-run"),
        "export": ["export", str(desk.out), "--output", output],
    }
    return {**commands(desk, output), **folders}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_name_is_not_the_default(desk, no_work, command):
    desk.refuses(every_output(desk, "")[command], "the name of an output is empty")
