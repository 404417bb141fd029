"""Recipes: what they may hold, how they are listed, and the recorded command, which gives no path away."""

import json
import shlex

import pytest

from permtriton import config_from
from permtriton.cli import compile as compile_command  # the module
from permtriton.cli import console
from permtriton.cli.main import app
from permtriton.driver.pipeline import compile_model
from permtriton.errors import ConfigError
from permtriton.methods.prune.mask import Mask
from permtriton.methods.recipe_config import CompileConfig, no_effect_refusal
from permtriton.methods.steps import STEPS
from permtriton.model.name import is_hub_name, shown_name
from permtriton.recipe import RECIPES, all_options, check_recipe
from permtriton.recipe import compile_command as command_of

from . import zoo
from .desk import RUNNER

CHANGES = [
    {},
    {"recipe": "mask"},
    {"recipe": "heuristic,mask", "heuristic_row_weights": "fisher", "samples": 8},
    {"recipe": "learned,mask", "learn_epochs": 3, "learn_gradient": "published", "activation_checkpointing": True},
    {"recipe": "permllm", "importance": "ria", "learn_learning_rate": 1e-3},
    {"recipe": "permllm", "importance": "ria", "layout": "portable"},
    {"recipe": "fast"},
    {"recipe": "heuristic,sparsegpt"},
    {"recipe": "heuristic,sparsegpt,distill", "distill_epochs": 3},
    {"recipe": "mask,distill", "distill_loss": "cosine"},
    {"sparsity": "4:8", "layout": "fused", "o_proj": "free", "skip_indivisible": True, "seed": 7},
]


# -- steps ---------------------------------------------------------------------------------------------------------


def test_steps_run_in_the_order_of_the_table():
    assert [kind.stage for kind in STEPS] == sorted(kind.stage for kind in STEPS)
    assert len({kind.name for kind in STEPS}) == len({kind.prefix for kind in STEPS}) == len(STEPS)


@pytest.mark.parametrize(("recipe", "importance"), [("mask", "wanda"), ("fast", "obs"), ("mask,distill", "wanda")])
def test_the_importance_follows_from_the_steps(recipe, importance):
    assert config_from({}, recipe).importance == importance
    assert config_from({"importance": "ria"}, recipe).importance == "ria"


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("fancy", ["'fancy'", "default, best, fast, values, permllm", "heuristic, learned, searched, mask"]),
        ("mask,fancy", ["'mask,fancy'", "'fancy' is no step;"]),
        ("fast,distill", ["'fast' is no step; the recipes are"]),
        ("", ["'' is no recipe"]),
        (3, ["recipe is 3", "default, best"]),
        (["default"], ["recipe is ['default']", "such as [Heuristic(), Mask()]"]),
        ("mask,mask", ["the step mask more than once"]),
        ("mask,sparsegpt", ["mask,sparsegpt prunes twice", "leave mask or sparsegpt out"]),
        ("heuristic", ["recipe heuristic prunes nothing", "one of the steps that prune, mask or "]),
        ((), ["(without steps) prunes nothing"]),
        ("mask,heuristic", ["heuristic cannot follow mask", "first come the steps that order channels"]),
        ("distill,mask", ["mask cannot follow distill"]),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_recipes_that_make_no_sense(recipe, words, given):
    with pytest.raises(ConfigError) as caught:
        config_from({"recipe": recipe} if given else {}, None if given else recipe)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_config_without_steps_prunes_nothing():
    with pytest.raises(ConfigError, match="prunes nothing"):
        check_recipe(CompileConfig())
    check_recipe(CompileConfig(steps=(Mask(),)))


def test_recipes_and_steps_are_listed(monkeypatch):
    report = json.loads(RUNNER.invoke(app, ["recipes", "--json"]).stdout)
    assert {name: each["steps"] for name, each in report["recipes"].items()} == {
        name: [step.name for step in recipe.steps] for name, recipe in RECIPES.items()
    }
    assert report["steps"] == {kind.name: kind.summary for kind in STEPS}
    monkeypatch.setattr(console.out, "_width", 250)
    text = " ".join(RUNNER.invoke(app, ["recipes"]).stdout.split())
    for words in [*RECIPES, *(recipe.summary for recipe in RECIPES.values()), *(kind.summary for kind in STEPS)]:
        assert words in text


# -- the command ---------------------------------------------------------------------------------------------------


def effective(config) -> dict:
    """The options that have an effect."""
    known = all_options()
    return {n: v for n, v in config.to_dict().items() if n not in known or not no_effect_refusal(known[n], config)}


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "+".join(map(str, changes)) or "nothing")
@pytest.mark.parametrize("model", ["demo", "org/model-7b"])
def test_the_command_line_reads_it_back(model, changes, monkeypatch):
    config = config_from(changes, model=model)
    found = []
    monkeypatch.setattr(compile_command, "run", lambda job, json: found.append((job.model.name, job.config)))
    program, *arguments = shlex.split(command_of(model, config))
    result = RUNNER.invoke(app, arguments)
    assert (program, result.exit_code) == ("permtriton", 0), result.output
    assert [name for name, _ in found] == [model]
    assert effective(found[0][1]) == effective(config)


def test_defaults_are_left_out():
    assert command_of("demo", config_from(model="demo")) == "permtriton compile demo"
    assert command_of("demo", config_from({}, "fast", "demo")) == "permtriton compile demo --recipe fast"
    published = {"importance": "ria", "learn_learning_rate": 5e-3}
    for given in (published, {"importance": "ria"}):
        command = command_of("org/model", config_from(given, "permllm"))
        assert command == "permtriton compile org/model --recipe permllm --importance ria --learn-learning-rate 0.005"
    config = config_from({"seed": 3, "importance": "ria"}, "sparsegpt")  # which chooses its own mask
    assert command_of("org/model", config) == "permtriton compile org/model --recipe sparsegpt --seed 3"


def test_the_recipe_is_named_as_it_was_typed():
    typed = config_from({}, "heuristic,sparsegpt")
    assert command_of("org/model", typed) == "permtriton compile org/model --recipe heuristic,sparsegpt"
    assert command_of("org/model", config_from({}, typed.steps)).endswith("--recipe heuristic,sparsegpt")


def test_folders_lose_their_path(tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    config = config_from({"calibration": str(tmp_path / "text.txt")})
    command = command_of(str(folder), config, eval_data="none", dtype=None, trust_remote_code=True)
    assert str(tmp_path) not in command
    assert shlex.split(command)[2] == "my model"
    assert "--calibration text.txt" in command
    assert command.endswith("--eval-data none --trust-remote-code")


@pytest.mark.parametrize(
    ("model", "shown", "hub"),
    [
        ("org/model-7b", "org/model-7b", True),
        ("gpt2", "gpt2", True),
        ("demo", "demo", False),
        ("/home/me/secret/model", "model", False),
        ("./model", "model", False),
        ("", "MODEL", False),
        ("<script>alert(1)</script>", "script>", False),
    ],
)
def test_names_for_others_to_read(model, shown, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (shown_name(model), is_hub_name(model)) == (shown, hub)


def test_the_command_of_options_that_are_allowed_only_together():
    """A block of 66 goes with a group of 6 only, and the default block of 64 does not."""
    config = config_from({"sparsity": "3:6", "learn_block_size": 66}, "heuristic,learned,mask", "org/model")
    words = shlex.split(command_of("org/model", config))
    assert words[words.index("--learn-block-size") + 1] == "66"
    assert words[words.index("--sparsity") + 1] == "3:6"


@pytest.mark.parametrize(("recipe", "measured"), [("sparsegpt", False), ("heuristic,sparsegpt", True)])
@pytest.mark.slow
def test_statistics_are_measured_only_where_a_step_uses_the_importance(recipe, measured):
    """They take a run of the model on all samples, and SparseGPT alone makes its own Hessians."""
    model = zoo.tiny_llama()
    compiled = compile_model(model, None, config_from(recipe=recipe), ids=zoo.tiny_ids(4, 16))
    assert ("calibrate" in compiled.report["seconds"]) == measured
    assert bool(compiled.report["retained_importance"]) == measured
