"""The recorded command: the command line reads it back to the same options, and it gives no path away."""

import shlex

import pytest

from permtriton.cli import compile as compile_command  # the module
from permtriton.cli.main import app
from permtriton.command import compile_command as command_of
from permtriton.command import config_for, is_hub_name, shown_name
from permtriton.config import RECIPES, check_explicit_options
from permtriton.errors import ConfigError

from .desk import RUNNER

CHANGES = [
    {},
    {"permutation": "none"},
    {"permutation": "heuristic", "row_weights": "none", "samples": 8},
    {"permutation": "learned", "epochs": 3, "group_scale": False, "activation_checkpointing": True},
    {"permutation": "learned", "importance": "ria", "learning_rate": 1e-3},
    {"weight_update": "sparsegpt"},
    {"weight_update": "distill", "objective": "cosine"},
    {"sparsity": "4:8", "layout": "fused", "o_proj": "free", "skip_indivisible": True, "seed": 7},
]


def effective(config) -> dict:
    """The options that have an effect."""
    found = {}
    for name, value in config.to_dict().items():
        try:
            check_explicit_options({name: None}, config)
            found[name] = value
        except ConfigError:
            pass
    return found


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "+".join(changes) or "nothing")
@pytest.mark.parametrize("model", ["demo", "org/model-7b"])
def test_the_command_line_reads_it_back(model, changes, recipe, monkeypatch):
    try:
        config = config_for(model, changes, recipe)
    except ConfigError:
        pytest.skip("the recipe refuses this option")
    found = []
    monkeypatch.setattr(compile_command, "run", lambda job: found.append((job.source.name, job.config)))
    program, *arguments = shlex.split(command_of(model, config))
    result = RUNNER.invoke(app, arguments)
    assert (program, result.exit_code) == ("permtriton", 0), result.output
    assert [name for name, _ in found] == [model]
    assert effective(found[0][1]) == effective(config)


def test_defaults_are_left_out():
    assert command_of("demo", config_for("demo", {})) == "permtriton compile demo"
    assert command_of("demo", config_for("demo", {}, "fast")) == "permtriton compile demo --recipe fast"
    config = config_for("org/model", {"seed": 3, "epochs": 7})  # without learning, epochs have no effect
    assert command_of("org/model", config) == "permtriton compile org/model --seed 3"


def test_folders_lose_their_path(tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    config = config_for("demo", {"calibration": str(tmp_path / "text.txt")})
    command = command_of(str(folder), config, eval_text="none", dtype=None, trust_remote_code=True)
    assert str(tmp_path) not in command
    assert shlex.split(command)[2] == "my model"
    assert "--calibration text.txt" in command
    assert command.endswith("--eval-text none --trust-remote-code")


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
