"""`permtriton evaluate`: folders in every format, the same numbers in every output, and refusals in one line."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import permtriton
from permtriton import demo
from permtriton.cli.main import app
from permtriton.data.held_out import read_held_out
from permtriton.driver.pipeline import compile_model
from permtriton.evaluation.evaluate import measure_model
from permtriton.evaluation.tasks import Tasks
from permtriton.model.load import load_model
from permtriton.model.source import Source
from permtriton.model.tokenizer import load_tokenizer

from .desk import RUNNER, check_refusal
from .folders import edit_json
from .lm_tasks import datasets_cache, write_tasks  # noqa: F401 (a fixture)
from .world import nothing_loads

MEASURES = ("perplexity", "dense_perplexity", "kl", "cosine", "tasks")


def run(*arguments: object) -> str:
    """Runs ``permtriton evaluate`` and returns what it prints on standard output."""
    result = RUNNER.invoke(app, ["evaluate", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr or repr(result.exception)
    return result.stdout


@pytest.fixture(scope="module")
def compiled(model_folder, tmp_path_factory) -> dict[str, Path]:
    """The tiny model, compiled in both layouts and exported from both; and what the compilation has in memory."""
    root = tmp_path_factory.mktemp("compiled")
    source = Source(str(model_folder))
    folders = {}
    for layout in ("portable", "fused"):
        options = {"recipe": "heuristic,mask", "layout": layout, "calibration": str(model_folder.parent / "text.txt")}
        config = permtriton.config_from({**options, "samples": 4, "sequence_length": 16})
        made = compile_model(load_model(source), load_tokenizer(source), config)
        folders[layout] = made.save_pretrained(root / layout)
        if layout == "portable":
            folders["memory"] = made
        exported = root / f"{layout}-packed"
        assert RUNNER.invoke(app, ["export", str(folders[layout]), "--output", str(exported)]).exit_code == 0
        folders[f"{layout}-packed"] = exported
    return folders


@pytest.fixture
def options(model_folder, tmp_path) -> list[object]:
    tasks = write_tasks(tmp_path / "tasks")
    return [
        "--against", model_folder, "--eval-data", model_folder.parent / "text.txt",
        "--tasks", "foxes,dogs", "--tasks-dir", tasks, "--json",
    ]  # fmt: skip


# -- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_format_gives_the_numbers_of_the_model_in_memory(compiled, model_folder, options, tmp_path):
    source, made = Source(str(model_folder)), compiled["memory"]
    tokenizer = load_tokenizer(source)
    expected = measure_model(
        made.model,
        tokenizer,
        held_out=read_held_out("", model_folder.parent / "text.txt", tokenizer, made.model, 32)[0],
        dense=load_model(source),
        hidden_order=made.plan.hidden_order(made.indices),
        tasks=Tasks(["foxes", "dogs"], folder=tmp_path / "tasks"),
    )
    reports = {name: json.loads(run(compiled[name], *options)) for name in compiled if name != "memory"}
    portable, packed = reports["portable"], reports["portable-packed"]
    for name in ("perplexity", "kl", "cosine"):
        assert portable[name] == pytest.approx(getattr(expected, name), rel=1e-6)
    scores = {task.name: {metric: score.value for metric, score in task.scores.items()} for task in expected.tasks}
    found = {task["name"]: {metric: s["value"] for metric, s in task["scores"].items()} for task in portable["tasks"]}
    assert found == scores
    assert portable["kl"] > 1e-5, "the model was pruned"
    assert 0.5 < portable["cosine"] < 1
    assert {name: portable[name] for name in MEASURES} == {name: packed[name] for name in MEASURES}
    fused, fused_packed = reports["fused"], reports["fused-packed"]
    assert {name: fused[name] for name in MEASURES} == {name: fused_packed[name] for name in MEASURES}
    assert fused["dense_perplexity"] == portable["dense_perplexity"]


def test_the_token_is_in_no_report(model_folder, options, tmp_path, monkeypatch):
    words = ["evaluate", str(model_folder), *map(str, options[2:4]), "--token", "hf_secret", "--token=hf_secret"]
    monkeypatch.setattr(sys, "argv", ["permtriton", *words])
    said = RUNNER.invoke(app, [*words, "--json", "--output", str(tmp_path / "out.json")])
    assert said.exit_code == 0, said.output
    assert "secret" not in said.output
    report = json.loads((tmp_path / "out.json").read_text())
    typed = f"permtriton evaluate {model_folder} {options[2]} {options[3]}"
    assert report["command"] == f"{typed} --token TOKEN --token=TOKEN"


@pytest.mark.slow
def test_the_order_of_hidden_states_is_read_from_the_folder(compiled, options, tmp_path):
    assert json.loads((compiled["portable"] / "permtriton.json").read_text())["hidden_states"]["permuted"]
    folder = Path(shutil.copytree(compiled["portable"], tmp_path / "model"))
    right = json.loads(run(folder, *options[:4], "--json"))["cosine"]
    edit_json(folder / "permtriton.json", lambda report: report.update(hidden_states={"permuted": False}))
    assert json.loads(run(folder, *options[:4], "--json"))["cosine"] < 0.5 < right


# -- outputs -------------------------------------------------------------------------------------------------------


def test_the_file_has_what_is_printed(compiled, options, tmp_path):
    file = tmp_path / "result.json"
    printed = json.loads(run(compiled["portable"], *options, "--output", file))
    stored = json.loads(file.read_text())
    assert stored == printed
    assert {"model", "against", "text", "protocol", "command", "versions", "device", "dtype"} <= set(stored)
    assert stored["protocol"].endswith(
        "windows of 32 tokens that do not overlap, without special tokens; the first token of each is not predicted"
    )
    assert stored["tokens"] == stored["windows"] * 32
    assert {"torch", "transformers", "permtriton", "lm_eval"} <= set(stored["versions"])
    assert "tokens per second" in run(compiled["portable"], *options[:-1])
    assert [path.name for path in tmp_path.glob("*result*")] == ["result.json"]


@pytest.mark.parametrize(
    ("more", "shown"), [((), "perplexity"), (("--json",), '"perplexity": ')], ids=["table", "json"]
)
def test_a_result_that_cannot_be_written_is_printed(desk, monkeypatch, more, shown):
    """It may have taken hours."""

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    arguments = ["evaluate", str(desk.model), "--eval-data", str(desk.text), "--output", str(desk.folder / "r.json")]
    result = RUNNER.invoke(app, [*arguments, *more])
    check_refusal(result.exit_code, result.stderr, ("r.json cannot be written: No space left on device",))
    assert shown in result.stdout
    assert [path.name for path in desk.folder.iterdir()] == ["out"]


@pytest.mark.slow
def test_the_demo_has_a_text_of_its_own(tmp_path):
    """It is the default for the demo, and for what is compared with it."""
    few = ("--window", 64, "--eval-windows", 2, "--json")
    report = json.loads(run("demo", *few))
    assert (report["text"], report["window"], report["tokens"]) == ("demo", 64, 128)
    assert 5 < report["perplexity"] < 30
    assert (report["against"], report["kl"], report["tasks"]) == (None, None, [])
    shutil.copytree(demo.FOLDER, tmp_path / "model")
    report = json.loads(run(tmp_path / "model", "--against", "demo", *few))
    assert (report["text"], report["kl"]) == ("demo", 0)


def test_tasks_alone_need_no_text(desk, options):
    report = json.loads(run(desk.model, "--eval-data", "none", *options[4:], "--limit", 3))
    assert (report["text"], report["protocol"], report["perplexity"]) == (None, None, None)
    assert [task["samples"] for task in report["tasks"]] == [3, 2]


def test_tasks_do_not_need_the_text_that_nobody_named(desk, options, monkeypatch):
    import datasets

    fetch = datasets.load_dataset

    def no_hub(*arguments: object, **named: object) -> object:
        if "json" in (*arguments, named.get("path")):  # the tasks' own files
            return fetch(*arguments, **named)
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", no_hub)
    result = RUNNER.invoke(app, ["evaluate", str(desk.model), *map(str, options[4:])])
    assert result.exit_code == 0, result.stderr
    assert "no perplexity, tasks only: dataset wikitext2" in result.stderr
    report = json.loads(result.stdout)
    assert (report["text"], report["perplexity"], len(report["tasks"])) == (None, None, 2)
    desk.refuses(["evaluate", str(desk.model)], "wikitext2", "no network")
    for asked in (["--eval-data", "wikitext2"], ["--against", str(desk.model)]):
        desk.refuses(["evaluate", str(desk.model), *asked, *map(str, options[4:])], "wikitext2", "no network")


# -- refusals ------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused_before_the_work(desk, compiled, options, monkeypatch):
    text = ["--eval-data", str(desk.text)]
    portable = str(compiled["portable"])
    desk.refuses(["evaluate", str(desk.model), *text, "--against", portable], "already been compiled", "original model")
    desk.refuses(["evaluate", str(desk.model), *text, "--against", "demo"], "vocabular", "compiled from")
    desk.refuses(["evaluate", str(desk.model), "--eval-data", "nothing.txt"], "nothing.txt is neither a file")
    desk.refuses(["evaluate", str(desk.model), "--eval-data", "none"], "nothing to evaluate")
    desk.refuses(["evaluate", str(desk.model), *text, "--batch-size", "0"], "batch size is 0")
    nothing_loads(monkeypatch)
    desk.refuses(["evaluate", str(desk.model), *text, "--limit", "3"], "--limit", "without --tasks")
    desk.refuses(["evaluate", str(desk.model), *text, "--tasks", ""], "no task")
    desk.refuses(["evaluate", str(desk.model), *text, "--output", "t.xlsx"], "extension is .xlsx")
    desk.refuses(["evaluate", str(desk.model), *text, "--tasks", "foxes", "--tasks-dir", "no"], "no does not exist")
    desk.refuses(
        ["evaluate", str(desk.model), *text, "--tasks", "foxes", "--limit", "0", "--tasks-dir", str(options[7])],
        "limit is 0",
    )


def test_lm_eval_is_imported_for_tasks_only(desk, options, monkeypatch):
    monkeypatch.delitem(sys.modules, "permtriton.evaluation.tasks")
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # its import is now an error
    run(*options[:4], desk.model)
    desk.refuses(["evaluate", str(desk.model), *map(str, options)], "by tasks needs lm_eval", '".[eval]"')
    monkeypatch.undo()
