"""The benchmark of a real model: which commands it runs, what it counts, and how it continues."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import benchmarks.real.__main__ as benchmark
from benchmarks import readme_tables
from benchmarks.real import evaluate, inputs
from benchmarks.real.rows import OURS, PEERS, THEIRS, Job, command
from permtriton.cli import compile as compile_command
from permtriton.cli.main import app

from .desk import RUNNER
from .gguf_files import llama, write_gguf
from .sentences import SENTENCE, trained_tokenizer


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name in ("valid.txt", "test.txt"):
        (folder / name).write_text(SENTENCE * 40, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The model that the benchmark makes, of a tiny file in the place of the real one."""
    work = tmp_path_factory.mktemp("work")
    write_gguf(work / inputs.GGUF, llama())
    return inputs.made_model(work)


class Stand:
    """Runs the benchmark with commands that only say what they are asked."""

    def __init__(self, folder: Path, texts: Path, model: Path, monkeypatch) -> None:
        self.result, self.calls, self.broken = folder / "result.json", [], ""
        self._given = ["--texts", texts, "--work", folder, "--model", model, "--output", self.result]
        self._given += ["--window", 16, "--samples", 2, "--length", 8, "--threads", 1]
        self._patch = monkeypatch
        monkeypatch.setattr(benchmark, "run", self._run)

    def __call__(self, *more: object) -> dict:
        self.calls = []
        self._patch.setattr(sys, "argv", ["benchmarks.real", *map(str, self._given), *map(str, more)])
        benchmark.main()
        return json.loads(self.result.read_text())

    def _run(self, words, threads):
        words = [str(word) for word in words]
        assert threads == 1
        cost = {"seconds": 2.0, "cpu_seconds": 1.0, "peak_bytes": 5}
        if "benchmarks.real.evaluate" in words:
            if Path(words[5]).name.startswith("python-test"):
                return cost, f'{{"perplexity": {words[6]}.0}}\n'
            self.calls.append(f"evaluate {Path(words[3]).name}, {words[6]} windows")
            return cost, 'noise\n{"perplexity": 7.0}\n'
        folder = Path(words[-1])
        self.calls.append(f"prune {folder.name}")
        if self.broken and self.broken in folder.name:
            raise benchmark.subprocess.CalledProcessError(2, words[0], "Traceback\nRuntimeError: no GPU\n\n")
        folder.mkdir(exist_ok=True)
        (folder / "permtriton.json").write_text(
            '{"seconds": {"prove": 3.0}, "determinism": {"float32_matmul": "highest"}}'
        )
        return cost, "noise\nmethod_seconds 4.5\n"


@pytest.fixture
def stand(tmp_path, texts, model, monkeypatch) -> Stand:
    return Stand(tmp_path, texts, model, monkeypatch)


def test_rows_are_written_one_by_one_and_kept(stand):
    report = stand("--rows", "modelopt sparsegpt,fast,dense", "--tokens", 32)
    assert [row["name"] for row in report["rows"]] == ["dense", "fast", "modelopt sparsegpt"]
    assert stand.calls == [
        "prune modelopt-sparsegpt-seed0", "evaluate modelopt-sparsegpt-seed0, 2 windows",
        "prune fast-seed0", "evaluate fast-seed0, 2 windows", "evaluate model, 2 windows",
    ]  # fmt: skip
    dense, fast, peer = report["rows"]
    assert "pruning" not in dense
    assert fast["method"] == "--recipe fast"
    assert re.fullmatch(r"[0-9a-f]{7,}\+?|unknown", fast["pruning"].pop("commit"))
    assert fast["pruning"].pop("float32_matmul") == "highest"
    assert fast["pruning"] == {"seconds": 2.0, "cpu_seconds": 1.0, "peak_bytes": 5, "stages": {"prove": 3.0}}
    assert peer["pruning"]["stages"] == {"method": 4.5}
    assert fast["evaluation"]["perplexity"] == 7.0
    assert fast["evaluation"]["other_perplexity"] == 16.0
    assert report["command"] == (
        "python -m benchmarks.real --texts TEXTS --samples 2 --length 8 --tokens 32 --window 16 --threads 1 "
        "--model model"
    )
    assert stand("--rows", "dense,fast,default", "--tokens", 32)["rows"][0] == dense
    assert stand.calls == ["prune default-seed0", "evaluate default-seed0, 2 windows"]


def test_what_fails_is_listed_with_its_error_and_tried_again(stand):
    stand.broken = "modelopt"
    report = stand("--rows", "modelopt sparsegpt,dense", "--tokens", 16)
    assert [row.get("error") for row in report["rows"]] == [None, "RuntimeError: no GPU"]
    stand.broken = ""
    assert "error" not in stand("--rows", "modelopt sparsegpt", "--tokens", 16)["rows"][1]


def test_rows_of_other_inputs_are_not_mixed(stand):
    stand("--rows", "dense", "--tokens", 16)
    with pytest.raises(SystemExit, match="rows of other inputs"):
        stand("--rows", "fast", "--tokens", 16, "--samples", 3)


@pytest.mark.parametrize("row", OURS)
def test_our_rows_are_commands_of_permtriton(row, monkeypatch):
    jobs = []
    monkeypatch.setattr(compile_command, "run", lambda job, json: jobs.append(job))
    words = command(
        row, Job(Path("model"), Path("text.txt"), Path("ids.safetensors"), 32, 512, 1, Path("peers")), Path("out")
    )
    assert words[:3] == [sys.executable, "-m", "permtriton"]
    result = RUNNER.invoke(app, words[3:])
    assert result.exit_code == 0, result.output
    config = jobs[0].config
    assert (config.calibration.samples, config.calibration.sequence_length, config.seed) == (32, 512, 1)
    assert jobs[0].output == Path("out")


@pytest.mark.parametrize("row", THEIRS)
def test_their_rows_have_a_script_and_pinned_requirements(row):
    job = Job(Path("model"), Path("text.txt"), Path("ids.safetensors"), 32, 512, 0, Path("peers"))
    python, script, method, *rest = command(row, job, Path("out"))
    peer, _ = THEIRS[row]
    assert python == f"peers/{peer}/bin/python"
    assert method in Path(script).read_text()
    assert rest == ["model", "ids.safetensors", "out"]
    assert all("==" in line for line in (PEERS / f"{peer}.txt").read_text().split())


def test_an_evaluation(model, texts, tmp_path, monkeypatch, capsys):
    held_out = inputs.held_out_file(tmp_path, model, texts / "test.txt", 16)
    for folder, linears in ((model, 14), (pruned_copy(tmp_path), 0)):
        words = f"evaluate {shlex.quote(str(folder))} {shlex.quote(str(model))} {shlex.quote(str(held_out))} 3 2"
        monkeypatch.setattr(sys, "argv", shlex.split(words))
        evaluate.main()
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["perplexity"] > 1
        assert found["linears_not_2of4"] == linears
        assert ("kl" in found) == (folder != model)
    assert found["zeros"] == 0.5
    assert found["kl"] > 0


def pruned_copy(folder: Path) -> Path:
    """Returns a folder of the same model with the first half of each group of four weights set to 0."""
    pruned = llama()
    for name, parameter in pruned.named_parameters():
        if "proj" in name:
            parameter.data.view(*parameter.shape[:-1], -1, 4)[..., :2] = 0
    pruned.save_pretrained(folder / "pruned")
    trained_tokenizer().save_pretrained(folder / "pruned")
    return folder / "pruned"


def test_the_check_finds_a_plot_that_is_not_what_the_result_gives(tmp_path, monkeypatch):
    path = tmp_path / "plot.svg"
    monkeypatch.setattr(readme_tables, "ROOT", tmp_path)
    monkeypatch.setattr(readme_tables, "PAGES", ())
    monkeypatch.setattr(readme_tables, "TABLES", {})
    monkeypatch.setattr(readme_tables, "PLOTS", {path: lambda: "<svg>a</svg>"})
    monkeypatch.setattr(sys, "argv", ["readme_tables.py"])
    readme_tables.main()
    monkeypatch.setattr(sys, "argv", ["readme_tables.py", "--check"])
    readme_tables.main()
    for damage in (lambda: path.write_text("<svg/>"), path.unlink):
        damage()
        with pytest.raises(SystemExit, match=r"plot\.svg is not what"):
            readme_tables.main()
