"""The command compare: its tables in every format, what it keeps, and what it refuses."""

import json
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import Result

from permtriton.cli import compare as module
from permtriton.cli.main import app
from permtriton.comparison import run as comparison
from permtriton.comparison.record import read_comparison

from .desk import RUNNER, Desk, check_refusal
from .folders import read_only
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


def numbers(report: dict) -> list[dict]:
    """The rows without times and memory."""
    found = json.loads(json.dumps(report["rows"]))
    for row in found:
        for each in (row, *row["by_seed"]):
            for name in ("seconds", "compile_seconds", "peak_bytes"):
                each.pop(name)
    return found


@pytest.fixture
def interrupted(monkeypatch):
    """Lets the second compilation be interrupted, the first time."""
    calls, compile = [], comparison.compile_model

    def sometimes(*arguments, **options):
        calls.append(arguments[2])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compile(*arguments, **options)

    monkeypatch.setattr(comparison, "compile_model", sometimes)
    return calls


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
    assert all(row["kl"] > 0 and row["cosine"] < 1 and row["peak_bytes"] > 2**20 for row in report["rows"][1:])


@pytest.mark.slow
def test_a_group_of_tasks_counts_once_in_the_mean(desk, tasks):
    for name, answers in (("other", "{{1 - answer}}"), ("third", "{{answer}}")):
        text = TASK.replace("task: short", f"task: {name}").replace("{{answer}}", answers)
        desk.write(f"tasks/{name}.yaml", text)
    group = {"group": "both", "task": ["short", "other"], "aggregate_metric_list": [{"metric": "acc"}]}
    desk.write("tasks/both.yaml", json.dumps(group))
    more = ("--methods", "magnitude", "--tasks-dir", tasks, "--json")
    report = json.loads(compare(desk, *more, "--tasks", "both,third").stdout)
    scores = report["rows"][0]["tasks"]
    assert (scores["both acc"], scores["short acc"]) == (0.5, scores["third acc"])
    mean = (0.5 + scores["third acc"]) / 2
    assert report["rows"][0]["accuracy"] == pytest.approx(mean)
    assert "mean acc" not in compare(desk, *more[:-1], "--tasks", "both").stdout, "of one result"


def test_a_comparison_with_a_score_that_is_no_number_continues_and_is_shown(desk, tasks):
    desk.write("tasks/metrics.py", "def nothing(values):\n    return float('nan')\n")
    desk.write(
        "tasks/short.yaml",
        TASK.replace(
            "acc_norm, aggregation: mean", "acc_norm, aggregation: !function metrics.nothing, higher_is_better: true"
        ),
    )
    more = ("--methods", "magnitude", "--tasks", "short", "--tasks-dir", tasks)
    compare(desk, *more, "--output", "t.json")
    assert "2 of 2 results" in compare(desk, *more, "--output", "t.json").stderr
    rows = read_comparison(desk.folder / "t.json")["rows"]
    assert [row["tasks"]["short acc_norm"] for row in rows] == [None, None]


@pytest.mark.slow
def test_a_comparison_in_the_folder_of_its_tasks_continues(desk, tasks, monkeypatch):
    """Its own files do not count, nor what Python and others keep there; the data of a task do."""
    monkeypatch.chdir(tasks)
    more = ("--methods", "magnitude", "--tasks", "short", "--tasks-dir", ".", "--output", "t.json")
    compare(desk, *more)
    for folder in (".git", "__pycache__"):
        (tasks / folder).mkdir()
        desk.write(f"tasks/{folder}/new", "anything")
    assert "2 of 2 results" in compare(desk, *more).stderr
    desk.write("tasks/short.jsonl", (tasks / "short.jsonl").read_text() * 2)
    assert "0 of 2 results" in compare(desk, *more).stderr


@pytest.mark.slow
def test_an_interrupted_comparison_continues(desk, interrupted):
    arguments = ("--methods", "magnitude,wanda", "--output", desk.folder / "t.json")
    result = RUNNER.invoke(app, command(desk, *arguments))
    assert result.exit_code == 130
    assert "continues after the last round, epoch, layer or row" in result.stderr.splitlines()[-1]
    assert not (desk.folder / "t.json").exists()
    continued = compare(desk, *arguments)
    assert "2 of 3 results" in continued.stderr
    assert [config.importance for config in interrupted] == ["magnitude", "wanda", "wanda"]
    report = json.loads((desk.folder / "t.json").read_text())
    again = compare(desk, *arguments, "--json")
    assert (len(interrupted), json.loads(again.stdout)) == (3, report), "finished: nothing is measured again"
    compare(desk, *arguments, "--methods", "wanda", "--overwrite")
    assert len(interrupted) == 4
    assert numbers(json.loads((desk.folder / "t.json").read_text())) == [numbers(report)[0], numbers(report)[2]]


@pytest.mark.slow
def test_without_an_output_nothing_stays_behind(desk, interrupted):
    before = desk.files()
    arguments = ("--methods", "magnitude,wanda")
    assert RUNNER.invoke(app, command(desk, *arguments)).exit_code == 130
    assert set(desk.files()) - set(before) == {".compare-tiny.rows.json"}
    result = compare(desk, *arguments)
    assert "2 of 3 results" in result.stderr
    assert len(interrupted) == 3
    assert desk.files() == before
    for word in ("magnitude", "wanda", "perplexity", "cosine", "KL", "seconds"):
        assert word in result.stdout


@pytest.mark.slow
def test_what_only_saves_memory_does_not_decide_what_is_kept(desk):
    """It is what a command advises where memory ran out in its second row."""
    compare(desk, "--methods", "wanda + distill", "--output", "t.json")
    more = ("--methods", "wanda + distill,magnitude", "--micro-batch-size", 2, "--activation-checkpointing")
    assert "2 of 3 results" in compare(desk, *more, "--output", "t.json").stderr
    assert read_comparison(desk.folder / "t.json")["rows"][2]["config"]["micro_batch_size"] == 2


@pytest.mark.slow
def test_where_something_else_is_compared_all_is_measured_anew(desk):
    arguments = ("--methods", "magnitude", "--output", "t.json")
    compare(desk, *arguments)
    other = desk.write("other.txt", desk.text.read_text() + " the end")
    for more, known in ((("--samples", "3"), 1), (("--eval-data", other), 0), (("--calibration", other), 1)):
        assert f"{known} of 2 results" in compare(desk, *arguments, *more).stderr


@pytest.mark.slow
def test_an_ablation_from_the_command_line(desk):
    file = desk.write("c.toml", '[learned]\ninit = "random"\n')
    options = ("--learn-epochs", 1, "--micro-batch-size", 4, "--config", file)
    options = ("--methods", "wanda + learned", *options, "--json")
    result = compare(desk, "--ablate", "learn-block-size", "--values", "8,16", *options)
    rows = json.loads(result.stdout)["rows"]
    assert [(row["method"], row["setting"]) for row in rows] == [
        ("dense", ""), ("wanda + learned", "learn_block_size 8"), ("wanda + learned", "learn_block_size 16"),
    ]  # fmt: skip
    assert all(row["compile_seconds"] > 0 for row in rows[1:])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seeds", "a"), ["seeds 'a'", "0,1,2"]),
        (("--seeds", "-1"), ["seeds '-1'"]),
        (("--methods", "fancy"), ["'fancy'", "magnitude, wanda"]),
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


@pytest.mark.parametrize(("output", "lock"), [(("--output", "t.json"), ".t.json.lock"), ((), ".compare-tiny.lock")])
def test_a_second_run_is_refused_before_the_work(desk, monkeypatch, output, lock):
    nothing_loads(monkeypatch)
    with FileLock(desk.folder / lock):
        result = RUNNER.invoke(app, command(desk, "--methods", "magnitude", *output))
        check_refusal(result.exit_code, result.stderr, (lock, "is being written by another process"))


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(desk, monkeypatch):
    nothing_loads(monkeypatch)
    read_only(monkeypatch)
    desk.refuses(command(desk), str(desk.folder), "finished results are kept", "Read-only file system", "--output")
    desk.refuses(command(desk, "--output", "t.json"), "t.json", "cannot be written: Read-only file system")


def test_a_folder_in_place_of_kept_results(desk):
    (desk.folder / ".t.json.rows.json").mkdir()
    result = RUNNER.invoke(app, command(desk, "--methods", "magnitude", "--output", "t.json"))
    check_refusal(result.exit_code, result.stderr, (".t.json.rows.json", "--overwrite"))


@pytest.mark.parametrize(("media", "measured"), [(True, "8 samples of 17 positions"), (False, "136 tokens in windows")])
def test_what_was_measured_stands_above_the_table(media, measured, capsys):
    """A model of images has no windows of tokens."""
    report = {"model": "m", "patterns": ["2:4"], "text": "t", "tokens": 136, "window": 17, "seeds": [0], "rows": [{}]}
    module._print(report, ["method", "what is measured"], [["dense", 1.0]], media=media)
    assert measured in " ".join(capsys.readouterr().out.split())
