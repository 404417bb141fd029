"""The command compare: its tables in every format, what it keeps, and what it refuses."""

import json
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import Result

from permtriton.cli import compare as module
from permtriton.cli.main import app

from .desk import RUNNER, Desk, check_refusal
from .world import nothing_loads

TASK = """
task: short
dataset_path: json
dataset_kwargs: {data_files: {test: short.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean}, {metric: acc_norm, aggregation: mean}]
"""


@pytest.fixture(autouse=True)
def _here(desk, monkeypatch):
    monkeypatch.chdir(desk.folder)


def command(desk: Desk, *more: object) -> list[str]:
    arguments = [
        "compare", desk.model, "--calibration", desk.text, "--eval-data", desk.text, "--samples", 4,
        "--sequence-length", 16, *more,
    ]  # fmt: skip
    return [str(argument) for argument in arguments]


def compare(desk: Desk, *more: object) -> Result:
    result = RUNNER.invoke(app, command(desk, *more))
    assert result.exit_code == 0, result.stderr
    return result


@pytest.fixture
def tasks(desk) -> Path:
    """A folder with one task of a few words: the model has few positions."""
    (desk.folder / "tasks").mkdir()
    rows = [{"context": "the quick", "choices": [" brown", " lazy"], "answer": answer} for answer in (0, 1, 0)]
    desk.write("tasks/short.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return desk.write("tasks/short.yaml", TASK).parent


def names(report: dict) -> list[tuple[str, str]]:
    return [(row["method"], row["pattern"]) for row in report["rows"]]


@pytest.mark.slow
def test_the_file_has_what_is_printed(desk, tasks):
    output = desk.folder / "table.json"
    result = compare(
        desk, "--methods", "wanda", "--seeds", "0,1", "--sparsity", "2:4,4:8",
        "--tasks", "short", "--tasks-dir", tasks, "--limit", 3, "--json", "--output", output,
    )  # fmt: skip
    report = json.loads(output.read_text())
    assert report == json.loads(result.stdout)
    assert names(report) == [("dense", ""), ("wanda", "2:4"), ("wanda", "4:8")]
    assert [len(row["values"]) for row in report["rows"]] == [1, 2, 2]
    assert len({row["mean"] for row in report["rows"]}) == 3
    for row in report["rows"]:
        assert row["values"] == [each["perplexity"] for each in row["by_seed"]]
    assert {"short acc", "short acc_norm"} == set(report["rows"][0]["tasks"])
    assert report["rows"][0]["kl"] == 0
    assert "lm_eval" in report["versions"]
    assert all(row["kl"] > 0 and row["cosine"] < 1 for row in report["rows"][1:])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seeds", "a"), ["seeds 'a'", "0,1,2"]),
        (("--seeds", "-1"), ["seeds '-1'"]),
        (("--methods", "fancy"), ["'fancy'", "permtriton compare --help"]),
        (("--eval-data", "none"), ["nothing to compare on"]),
        (("--output", "no/such/report.json"), ["no/such"]),
        (("--output", "report.pdf"), [".pdf", "expected .json"]),
        (("--sparsity", "4:2"), ["4:2"]),
        (("--sparsity", "2:4,5"), ["'5'"]),
        (("--sparsity", "2:4,4:8", "--pattern", "*.down_proj=1:4"), ["--pattern needs one --sparsity"]),
        (("--ablate", "heat", "--values", "1"), ["--ablate heat: no option of this name"]),
        (("--values", "1"), ["--ablate names an option, and --values its values: give both"]),
        (("--ablate", "calibration"), ["--ablate names an option, and --values its values: give both"]),
        (("--ablate", "learn-epochs", "--values", "1"), ["no effect on the method magnitude", "--methods"]),
        (("--ablate", "calibration", "--values", "demo"), ["--calibration has no effect with --ablate calibration"]),
        (("--calibration", "c5"), ["c5 is neither a file"]),
        (("--learn-epochs", "3"), ["--learn-epochs has no effect on the methods magnitude"]),
        (("--limit", "3"), ["--limit", "without --tasks"]),
    ],
)
def test_bad_comparisons(desk, options, words):
    desk.refuses(command(desk, "--methods", "magnitude", *options), *words)


def test_a_second_run_is_refused_before_the_work(desk, monkeypatch):
    nothing_loads(monkeypatch)
    with FileLock(desk.folder / ".t.json.lock"):
        result = RUNNER.invoke(app, command(desk, "--methods", "magnitude", "--output", "t.json"))
        check_refusal(result.exit_code, result.stderr, (".t.json.lock", "is being written by another process"))


def test_the_best_row_is_named_with_its_measure():
    def row(method: str, mean: float, pattern: str = "2:4") -> dict:
        return {"method": method, "pattern": pattern, "setting": "", "mean": mean}

    rows = [row("dense", 12.0, ""), row("wanda", 18.0), row("sparsegpt", 15.0)]
    report = {"measure": "perplexity", "patterns": ["2:4"], "rows": rows}
    assert module.verdict(report) == "best: sparsegpt, perplexity 12.00 -> 15.00 (+25.0%)"
    rows = [row("dense", 1.0, ""), row("wanda", 0.9), row("wanda", 0.95, "4:8")]
    report = {"measure": "cosine", "patterns": ["2:4", "4:8"], "rows": rows}
    assert module.verdict(report) == "best: wanda, 4:8, cosine with the dense model 0.9500"
