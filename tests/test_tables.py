"""Result tables as files: what is in them, and that a file is whole or as it was before."""

import csv
import io
import json
from pathlib import Path

import pytest

from permtriton.comparison.tables import cell, check_table, markdown, write_table
from permtriton.errors import OutputError

HEADERS = ("method", "perplexity", "note")
ROWS = [("wanda | own", 16.3954321, None), ("dense", 12, 'with "quotes", comma')]
REPORT = {"rows": [1.25, 2], "model": "demo"}


def test_json_holds_the_report(tmp_path):
    write_table(tmp_path / "t.json", HEADERS, ROWS, REPORT)
    assert json.loads((tmp_path / "t.json").read_text()) == REPORT


def test_csv_holds_every_digit(tmp_path):
    write_table(tmp_path / "t.csv", HEADERS, ROWS, REPORT)
    rows = list(csv.reader(io.StringIO((tmp_path / "t.csv").read_text(), newline="")))
    assert rows == [list(HEADERS), ["wanda | own", "16.3954321", ""], ["dense", "12", 'with "quotes", comma']]


def test_markdown_is_a_table_for_people(tmp_path):
    write_table(tmp_path / "t.md", HEADERS, ROWS, REPORT)
    assert (tmp_path / "t.md").read_text() == markdown(HEADERS, ROWS)
    assert markdown(HEADERS, ROWS).splitlines() == [
        "| method | perplexity | note |",
        "| --- | --- | --- |",
        "| wanda \\| own | 16.395 |  |",
        '| dense | 12 | with "quotes", comma |',
    ]


@pytest.mark.parametrize(
    ("value", "shown"), [(None, ""), ("a", "a"), (7, "7"), (0.0, "0"), (0.000123456, "0.00012346"), (20398.4, "20398")]
)
def test_a_cell(value, shown):
    assert cell(value) == shown


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("t.txt", r"extension is \.txt; expected one of \.json, \.csv, \.md"),
        ("table", "extension is missing"),
        ("folder.md", "is a folder"),
        ("no/t.md", "does not exist; make it first"),
    ],
)
def test_what_cannot_be_written_is_refused_before(tmp_path, name, words):
    (tmp_path / "folder.md").mkdir()
    with pytest.raises(OutputError, match=words):
        check_table(tmp_path / name, overwrite=False)
    with pytest.raises(OutputError, match=words):
        write_table(tmp_path / name, HEADERS, ROWS, REPORT)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.md"]


@pytest.mark.parametrize("failing", ["write_bytes", "replace"])
def test_an_earlier_file_survives_a_full_disk(tmp_path, monkeypatch, failing):
    def full(path: Path, *_arguments: object, **_named: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "t.csv").write_text("earlier")
    monkeypatch.setattr(Path, failing, full)
    with pytest.raises(OutputError, match=r"t\.csv cannot be written: No space left on device"):
        write_table(tmp_path / "t.csv", HEADERS, ROWS, REPORT)
    monkeypatch.undo()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("t.csv", "earlier")]
