"""Steps that permtriton does not know, in a list."""

import runpy
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import permtriton
from permtriton import methods
from permtriton.methods import Heuristic, Mask, Refit, Stage, Step, steps

from . import zoo

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_step.py"


@pytest.fixture(scope="module")
def relative() -> type[Step]:
    return runpy.run_path(str(EXAMPLE))["Relative"]


@pytest.fixture
def here(tmp_path, monkeypatch, model_folder) -> Path:
    """A folder with a tiny model and a text."""
    shutil.copytree(model_folder.parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_list_takes_any_step(relative, tmp_path):
    model = zoo.build("llama")
    before = zoo.build("llama").state_dict()
    compiled = permtriton.compile(
        model, recipe=[Heuristic(), relative(power=2.0)], data=zoo.token_ids(), output=tmp_path / "out"
    )
    config = compiled.report["config"]
    assert (config["recipe"], config["relative_power"]) == ("heuristic,relative", 2.0)
    assert "--relative-power 2.0" in compiled.report["command"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weight = saved.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert ((weight.view(-1, 4) != 0).sum(1) == 2).all()
    assert set(weight[weight != 0].tolist()) <= set(before["model.layers.0.mlp.up_proj.weight"].flatten().tolist())


def test_options_by_name_reach_a_step_of_a_list(relative):
    config = permtriton.config_from({"relative_power": 3}, [relative()])
    assert config.steps[0].power == 3.0
    with pytest.raises(permtriton.PermTritonError, match="non-negative"):
        permtriton.config_from({"relative_power": -1}, [relative()])
    with pytest.raises(permtriton.PermTritonError, match="unknown option 'relative_power'"):
        permtriton.compile("demo", recipe=[Mask()], relative_power=3)


@pytest.mark.slow
def test_compare_takes_lists_of_steps(relative, here):
    text = {"calibration": "text.txt", "samples": 2, "sequence_length": 16, "eval_data": "text.txt"}
    methods = ["magnitude", [Heuristic(), relative(power=0.5)], [relative()]]
    report = permtriton.compare("tiny", methods=methods, **text)
    assert [row["method"] for row in report["rows"]] == [
        "dense", "magnitude", "heuristic + relative (power=0.5)", "relative"
    ]  # fmt: skip


def test_what_is_no_step_is_refused():
    @dataclass(frozen=True)
    class Nameless(Step):
        stage = Stage.PRUNE

    @dataclass(frozen=True)
    class Twin(Step):
        name, prefix, summary, stage = "mask", "twin", "the same name", Stage.PRUNE

    for step, words in (
        (Nameless(), "does not say its name"),
        (Twin(), "own step mask: choose another"),
        (object(), "or steps: their names"),
    ):
        with pytest.raises(permtriton.PermTritonError, match=words):
            permtriton.config_from({}, [step])


def test_methods_has_every_step():
    assert [getattr(methods, kind.__name__) for kind in steps.STEPS] == list(steps.STEPS)
    assert set(dir(methods)) >= {"Step", "Stage", "Outcome", "option", "Heuristic"}
    assert permtriton.config_from({}, [Heuristic(), Refit(exchanges=8)]).steps[1].exchanges == 8
    with pytest.raises(AttributeError, match="Heuristics"):
        methods.Heuristics  # noqa: B018


@pytest.mark.slow
def test_the_example_runs(here, capsys):
    runpy.run_path(str(EXAMPLE))["main"](["tiny", "--data", "text.txt", "--sequence-length", "16"])
    assert "50.0% to 50.0% zeros, by heuristic,relative" in capsys.readouterr().out
