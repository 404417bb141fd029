"""A step that nobody knows of but this file: it compiles, continues, and is seen in every place that a step is."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner

from permtriton.methods import steps
from permtriton.methods.sizes import Memory
from permtriton.methods.step import Outcome, Stage, Step
from permtriton.passes.plan import linear_module
from permtriton.util.option import option

from . import zoo
from .sentences import SENTENCE, trained_tokenizer

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
FACTORS, STATE, PASSES = 7 << 20, 5 << 20, 6000.0  # what the step says that it needs
PARTS = [{"name": f"half {number}", "start": 0.5, "end": 0.25, "seconds": 0.0, "scale": 1} for number in (1, 2)]
LEFT = {"a linear": "it stands alone"}


@dataclass(frozen=True)
class Own(Step):
    """Options of a step that multiplies kept weights by one."""

    name: ClassVar[str] = "own"
    prefix: ClassVar[str] = "own"
    summary: ClassVar[str] = "kept weights multiplied by one: no time at all"
    stage: ClassVar[Stage] = Stage.TRAIN
    executed: ClassVar[list[int]] = []  # the rounds of this process
    interrupted_in: ClassVar[int] = 0

    rounds: int = option(2, "How often kept weights are multiplied.", minimum=1)

    def conflicts(self, config, steps):
        return "step own is refused with 4:8: choose `sparsity=2:4`" if config.sparsity.group == 8 else ""

    def memory(self, sizes):
        return Memory(FACTORS)

    def passes(self, sizes):
        return PASSES

    def state_bytes(self, sizes):
        return 2 * STATE  # the new one is written beside the old

    def run(self, run):
        state = run.state(self.name)
        stored = state.read()
        history = stored[1]["history"] if stored else [{"round": 0, "loss": 0.75}]
        for number in range(len(history), self.rounds + 1):
            for _, name in run.plan.linears():
                with torch.no_grad():
                    linear_module(run.model, name).weight.mul_(1)
            history.append({"round": number, "loss": 0.5 / number})
            state.write({"factor": torch.ones(1)}, history=history)
            self.executed.append(number)
            if number == Own.interrupted_in:
                raise KeyboardInterrupt
        return Outcome("round", history, parts=PARTS, left=LEFT)


def main(folder: Path) -> None:
    """Adds the step to the table of all, runs commands, and prints what each of them printed, as JSON."""
    steps.STEPS = (*steps.STEPS, Own)
    tokenizer = trained_tokenizer()
    for part in (zoo.tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=64), tokenizer):
        part.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(SENTENCE * 300, encoding="utf-8")
    from permtriton.cli.main import app  # its flags are made when it is imported

    (folder / "own.toml").write_text('recipe = "heuristic,mask,own"\nown_rounds = 3\n')
    (folder / "other.toml").write_text("own_loops = 3\n")
    texts = ("--calibration", str(folder / "text.txt"), "--samples", "2", "--sequence-length", "16")
    model = ("compile", str(folder / "model"), *texts, "--eval-data", "none", "--output", str(folder / "out"))
    own = (*model, "--recipe", "heuristic,mask,own")
    file = (*model, "--config")
    found = {}

    def call(name: str, *arguments: str) -> None:
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": "250"})
        found[name] = {"code": done.exit_code, "out": done.stdout, "err": done.stderr, "executed": [*Own.executed]}
        Own.executed.clear()

    call("dry run", *own, "--dry-run")
    call("dry run as JSON", *own, "--dry-run", "--json")
    Own.interrupted_in = 2
    call("interrupted", *own, "--own-rounds", "3")
    found["interrupted"]["files"] = sorted(path.name for path in folder.iterdir())
    Own.interrupted_in = 0
    call("another run", *own, "--own-rounds", "4")
    call("resumed", *file, str(folder / "own.toml"))  # the file has the same options
    call("report", "report", str(folder / "out"), "--output", str(folder / "report.html"))
    call("help", "compile", "--help")
    call("all help", "compile", "--help-all")
    call("recipes", "recipes")
    call("unknown", *file, str(folder / "other.toml"), "--dry-run")
    call("too few", *own, "--own-rounds", "0")
    call("conflict", *own, "--sparsity", "4:8")
    call("idle", *model, "--recipe", "mask", "--own-rounds", "3")
    sys.stdout.write(json.dumps(found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def results(folder) -> dict[str, dict]:
    """What each command printed, in a process of its own: this one has made its flags already."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_own_step", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def record(results, folder) -> dict:
    assert results["resumed"]["code"] == 0, results["resumed"]["err"]
    return json.loads((folder / "out" / "permtriton.json").read_text())


def words(result: dict) -> str:
    assert result["code"] == 0, result["err"]
    return " ".join(result["out"].split())


def test_its_time_memory_and_disk_are_in_the_dry_run(results):
    report = json.loads(results["dry run as JSON"]["out"])
    assert report["memory"]["stages"]["own"] == FACTORS
    assert report["seconds"]["own"] > 0
    assert report["disk"]["states of interrupted runs"] == 2 * STATE
    assert ", own " in words(results["dry run"])


def test_an_interrupted_run_continues_from_its_state(results, folder, record):
    stopped, resumed = results["interrupted"], results["resumed"]
    assert (stopped["code"], stopped["executed"]) == (130, [1, 2])
    assert ".out.own.safetensors" in stopped["files"]
    assert "found .out.own.safetensors: its step will continue" in resumed["err"]
    assert resumed["executed"] == [3]
    given = {"model", "text.txt", "own.toml", "other.toml"}
    assert {path.name for path in folder.iterdir()} - given == {"out", "report.html"}


def test_its_state_is_refused_by_another_run(results):
    other = results["another run"]
    assert (other["code"], other["executed"]) == (2, [])
    assert "belongs to another run: own_rounds was 3 and is 4" in other["err"].splitlines()[-1]


def test_its_outcome_is_recorded_and_shown(results, record):
    assert record["steps"][-1] == {
        "name": "own",
        "samples": 2,
        "unit": "round",
        "history": [{"round": number, "loss": loss} for number, loss in enumerate((0.75, 0.5, 0.25, 0.5 / 3))],
        "kept": None,
        "parts": PARTS,
        "left": LEFT,
    }
    assert [step["name"] for step in record["steps"]] == ["heuristic", "mask", "own"]
    assert (record["config"]["recipe"], record["config"]["own_rounds"]) == ("heuristic,mask,own", 3)
    assert "own" in record["seconds"]
    assert "--recipe heuristic,mask,own" in record["command"]
    assert "--own-rounds 3" in record["command"]
    shown = words(results["resumed"])
    assert "own: loss" in shown
    assert "0.7500 to 0.1667 (round 3 of 3)" in shown
    assert "own: half 2" in shown
    assert "left as it was: it stands alone" in shown


def test_the_report_draws_it(results, folder, record):
    words(results["report"])
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Step own: from 0.7500 to 0.1667 in 3 rounds" in page


def test_its_option_is_in_the_whole_help_alone(results):
    everything = words(results["all help"])
    assert "--own-rounds " in everything
    assert "Step own" in everything
    assert "How often kept weights are multiplied. [default: 2]" in everything
    assert "own-rounds" not in words(results["help"])


def test_it_is_listed_with_the_recipes(results):
    assert f"own {Own.summary}" in words(results["recipes"]).replace("│", "").replace("  ", " ")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("conflict", "error: step own is refused with 4:8: choose --sparsity 2:4"),
        ("too few", "error: --own-rounds is 0: expected an integer of at least 1"),
        ("unknown", "unknown option 'own_loops': did you mean own_rounds?"),
        ("idle", "--own-rounds has no effect with --recipe mask"),
    ],
)
def test_what_is_refused(results, command, message):
    result = results[command]
    assert result["code"] == 2
    assert message in result["err"].splitlines()[-1]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
