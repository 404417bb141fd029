"""Options: round trips, recipes, precedence, and errors that say what to set."""

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from permtriton.cli.main import compare, compile
from permtriton.cli.options import build_config
from permtriton.config import (
    OPTIONS,
    RECIPES,
    CalibrationConfig,
    CompileConfig,
    LearnConfig,
    SearchConfig,
    UpdateConfig,
    check_explicit_options,
    defaults,
    read_config_file,
)
from permtriton.errors import ConfigError
from permtriton.option import options_of
from permtriton.sparsity import NMPattern

# A value of every option that is not its default.
OTHER = {
    "sparsity": "4:8",
    "importance": "ria",
    "permutation": "heuristic",
    "weight_update": "distill",
    "update_mask": "keep",
    "row_weights": "none",
    "objective": "cosine",
    "layout": "fused",
    "o_proj": "free",
    "skip_indivisible": True,
    "seed": 7,
    "calibration": "pile",
    "samples": 3,
    "sequence_length": 77,
    "block_size": 32,
    "sinkhorn_rounds": 0,
    "tau_start": 0.9,
    "tau_end": 0.2,
    "epochs": 4,
    "batch_size": 6,
    "micro_batch_size": 2,
    "learning_rate": 0.02,
    "weight_decay": 0.0,
    "learn_layers": "last:2",
    "start": "random",
    "start_noise": 0.3,
    "base_order": "identity",
    "clamp_logits": 2.0,
    "group_scale": False,
    "keep_epoch": "last",
    "activation_checkpointing": False,
    "rounds": 3,
    "damping": 0.5,
    "search_block": 128,
    "update_epochs": 5,
    "update_learning_rate": 0.03,
    "update_batch_size": 2,
    "reconstruct_loss": "squared",
    "window": "mlp",
}
PARTS = (CompileConfig, CalibrationConfig, LearnConfig, SearchConfig, UpdateConfig)


def option_names() -> set[str]:
    return {f.name for c in PARTS for f in fields(c)} - {"learn", "search", "update"}


def build(model: str = "some/model", recipe: str | None = None, file: Path | None = None, **flags: object):
    return build_config(model, recipe, file, flags)


def test_the_table_of_other_values_is_complete():
    assert set(OTHER) == option_names()
    default = CompileConfig().to_dict()
    assert [name for name, value in OTHER.items() if default[name] == value] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_to_dict_reads_back_to_an_equal_config(recipe):
    config = CompileConfig.from_options({}, recipe)
    assert CompileConfig.from_options(config.to_dict()) == config


@pytest.mark.parametrize("name", OTHER)
def test_each_option_lands_and_survives_a_round_trip(name):
    config = CompileConfig.from_options({name.replace("_", "-"): OTHER[name]})
    options = config.to_dict()
    assert options[name] == OTHER[name]
    assert {k: v for k, v in options.items() if k != name} == {
        k: v for k, v in CompileConfig().to_dict().items() if k != name
    }
    assert CompileConfig.from_options(options) == config


def test_every_option_is_a_flag():
    assert set(OPTIONS) == option_names()


def test_every_config_option_is_a_flag_of_compile():
    assert set(OPTIONS) <= set(inspect.signature(compile).parameters)


def test_no_flag_of_the_commands_is_dropped_on_the_way():
    """A parameter of a command either reaches the config or steers the run."""
    running = {
        "model", "recipe", "eval_text", "device", "dtype", "output", "overwrite", "config", "json",
        "trust_remote_code", "seeds", "methods", "patterns", "ablate", "values", "tasks", "tasks_dir", "limit",
        "restart", "dry_run", "devices", "shard", "offload",
    }  # fmt: skip
    for command in (compile, compare):
        assert set(inspect.signature(command).parameters) <= running | set(OPTIONS)


def test_a_flag_takes_part_only_if_the_user_set_it():
    """A value that equals the default is still the user's, and wins over the recipe."""
    given = {"permutation": "learned", "epochs": LearnConfig.epochs}
    assert build(recipe="demo", **given).learn.epochs == LearnConfig.epochs
    assert all(inspect.signature(compile).parameters[name].default is None for name in OPTIONS)


def test_defaults_name_the_recipes_that_differ():
    assert defaults("epochs") == "50; demo: 12"
    assert defaults("group_scale") == "true; published: false"
    assert defaults("sparsity") == "2:4"


@pytest.mark.parametrize("part", PARTS)
def test_docstrings_hold_what_the_options_say(part):
    text = " ".join(part.__doc__.split())
    assert [o.name for o in options_of(part) if f"{o.name}: {o.help} Expects {o.expected}." not in text] == []


@pytest.mark.parametrize("name", OPTIONS)
def test_every_limit_refuses(name):
    """`Option.expected` describes what `Option.check` accepts, from Python and from a file."""
    option = OPTIONS[name]
    part = next(c for c in PARTS if option in options_of(c))
    bad = {bool: 1, int: option.minimum - 1, float: float("nan"), NMPattern: "2:4"}.get(option.type, "last:0")
    if name == "calibration":
        bad = 3
    with pytest.raises(ConfigError, match=f"^{name} is .*expected "):
        part(**{name: bad})


def test_every_option_of_a_part_needs_what_runs_it():
    needs = {name: option.needs for name, option in OPTIONS.items() if option.needs}
    runs = {LearnConfig: {"permutation": ("learned",)}, SearchConfig: {"permutation": ("searched",)}}
    for part, needed in runs.items():
        assert all(needs.pop(option.name) == needed for option in options_of(part))
    for option in options_of(UpdateConfig):
        (values,) = needs.pop(option.name).values()
        assert set(values) <= {"reconstruct", "distill"}
    shared = {"micro_batch_size", "activation_checkpointing"}
    assert set(needs) == {"update_mask", "o_proj", "row_weights", "objective"} | shared
    for name in shared:
        assert needs[name] == {"permutation": ("learned", "searched"), "weight_update": ("reconstruct", "distill")}


def test_default_recipe_is_the_dataclass():
    assert CompileConfig.from_options({}) == CompileConfig()


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({}, 1e-3),
        ({"importance": "wanda"}, 1e-3),
        ({"importance": "ria"}, 5e-3),
        ({"importance": "ria", "learning_rate": 2e-3}, 2e-3),
        ({"importance": "ria", "learning-rate": 2e-3}, 2e-3),
    ],
)
def test_published_learning_rate(given, rate):
    assert CompileConfig.from_options(given, "published").learn.learning_rate == rate


def test_published_is_the_paper_to_the_letter():
    config = CompileConfig.from_options({}, "published")
    learn = config.learn
    assert (config.importance, config.permutation, config.weight_update) == ("wanda", "learned", "none")
    assert (learn.block_size, learn.sinkhorn_rounds, learn.epochs, learn.batch_size) == (64, 5, 50, 16)
    assert (learn.tau_start, learn.tau_end, learn.weight_decay) == (1.0, 0.1, 0.1)
    assert (learn.start, learn.base_order, learn.clamp_logits) == ("random", "identity", 1.0)
    assert (learn.group_scale, learn.keep_epoch) == (False, "last")
    assert (config.calibration.calibration, config.calibration.samples, config.calibration.sequence_length) == (
        "c4",
        128,
        1024,
    )


def test_flags_win_over_the_file_and_the_file_over_the_recipe(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text('recipe = "published"\nepochs = 9\nlearning-rate = 0.5\nsparsity = "4:8"\n', encoding="utf-8")
    config = build(file=file, epochs=3)
    assert config.learn.epochs == 3
    assert (config.learn.learning_rate, config.sparsity) == (0.5, NMPattern(4, 8))
    assert config.learn.start == "random", "from the recipe that the file names"
    assert build(recipe="demo", file=file).learn.start == "identity", "the flag's recipe wins over the file's"


@pytest.mark.parametrize("name", ["start_noise", "clamp_logits", "group_scale", "keep_epoch", "epochs"])
def test_options_are_reachable_by_file(tmp_path, name):
    file = tmp_path / "options.toml"
    value = OTHER[name]
    text = {bool: str(value).lower(), str: f'"{value}"'}.get(type(value), str(value))
    file.write_text(f"{name} = {text}\n", encoding="utf-8")
    assert getattr(build(file=file).learn, name) == value


def test_demo_model_takes_the_demo_recipe_and_text_by_default():
    assert build("demo") == CompileConfig.from_options({"calibration": "demo"}, "demo")
    assert build("demo", recipe="default").learn.epochs == LearnConfig.epochs
    assert build("demo", calibration="c4").calibration.calibration == "c4"
    assert build("demo-like").calibration.calibration == "c4"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fancy": 1}, ["'fancy'", "block_size", "weight_update"]),
        ({"learn": {}}, ["'learn'"]),
        ({"importance": "taylor"}, ["importance", "'taylor'", "wanda", "ria"]),
        ({"permutation": "magic"}, ["permutation", "'magic'", "heuristic"]),
        ({"weight_update": "admm"}, ["weight_update", "'admm'", "sparsegpt"]),
        ({"layout": "folded"}, ["layout", "'folded'", "portable, fused"]),
        ({"o_proj": "loose"}, ["o_proj", "'loose'", "tied, free"]),
        ({"epochs": "3"}, ["epochs", "'3'", "expected int", "got str"]),
        ({"epochs": True}, ["epochs", "True", "expected int"]),
        ({"epochs": 2.0}, ["epochs", "expected int", "got float"]),
        ({"skip_indivisible": 1}, ["skip_indivisible", "expected bool"]),
        ({"calibration": 3}, ["calibration", "expected str"]),
        ({"sparsity": "4:2"}, ["4:2", "2:4"]),
        ({"sparsity": 24}, ["'24'", "N:M"]),
        ({"samples": 0}, ["samples is 0", "at least 1"]),
        ({"samples": -3}, ["samples is -3"]),
        ({"sequence_length": 1}, ["sequence_length is 1", "2"]),
        ({"seed": -1}, ["seed is -1"]),
        ({"epochs": 0}, ["epochs is 0", "at least 1"]),
        ({"batch_size": 0}, ["batch_size is 0"]),
        ({"micro_batch_size": -1}, ["micro_batch_size is -1"]),
        ({"learning_rate": 0.0}, ["learning_rate is 0.0", "positive"]),
        ({"learning_rate": float("nan")}, ["learning_rate is nan"]),
        ({"learning_rate": float("inf")}, ["learning_rate is inf"]),
        ({"tau_start": 0}, ["tau_start is 0.0"]),
        ({"tau_end": -0.1}, ["tau_end is -0.1"]),
        ({"sinkhorn_rounds": -1}, ["sinkhorn_rounds is -1", "negative"]),
        ({"weight_decay": float("nan")}, ["weight_decay is nan"]),
        ({"weight_decay": float("inf")}, ["weight_decay is inf"]),
        ({"start_noise": float("inf")}, ["start_noise is inf"]),
        ({"clamp_logits": -1}, ["clamp_logits is -1.0"]),
        (
            {"permutation": "searched", "weight_update": "sparsegpt"},
            ["searched", "sparsegpt", "no better", "heuristic"],
        ),
        ({"learn_layers": "first:1"}, ["'first:1'", "last:K"]),
        ({"learn_layers": "last:0"}, ["'last:0'", "at least 1"]),
        ({"block_size": 30, "permutation": "learned"}, ["block_size 30", "2:4", "multiple of 4"]),
        ({"block_size": 4, "sparsity": "4:8", "permutation": "learned"}, ["block_size 4", "4:8", "multiple of 8"]),
        ({"keep_epoch": "first"}, ["keep_epoch", "'first'", "best, last"]),
        ({"rounds": 0}, ["rounds is 0", "at least 1"]),
        ({"damping": 0.0}, ["damping is 0.0", "positive"]),
        ({"search_block": -4}, ["search_block is -4", "negative"]),
        ({"row_weights": "all"}, ["row_weights", "'all'", "fisher, none"]),
        ({"objective": "mse"}, ["objective", "'mse'", "kl", "cosine"]),
    ],
)
def test_bad_values_say_what_and_what_to_do(given, words):
    with pytest.raises(ConfigError) as caught:
        CompileConfig.from_options(given)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("recipe", ["fancy", 3, ["default"]])
def test_unknown_recipe(tmp_path, recipe):
    with pytest.raises(ConfigError, match="default, published, best, fast, demo"):
        CompileConfig.from_options({}, recipe)


@pytest.mark.parametrize("name", [f.name for f in fields(LearnConfig)])
@pytest.mark.parametrize("permutation", ["none", "heuristic"])
def test_learning_options_without_learning_are_refused(name, permutation):
    config = CompileConfig.from_options({"permutation": permutation})
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} has no effect with --permutation {permutation}"):
        check_explicit_options({name: OTHER[name]}, config)


@pytest.mark.parametrize("option", [*options_of(SearchConfig), *options_of(UpdateConfig)], ids=lambda o: o.name)
def test_options_of_a_stage_that_does_not_run_are_refused(option):
    with pytest.raises(ConfigError, match=f"{option.flag} has no effect with --"):
        check_explicit_options({option.name: OTHER[option.name]}, CompileConfig(permutation="heuristic"))


@pytest.mark.parametrize(
    ("option", "given", "allowed"),
    [
        ("micro_batch_size", {"permutation": "heuristic"}, False),
        ("micro_batch_size", {"permutation": "searched"}, True),
        ("micro_batch_size", {"permutation": "none", "weight_update": "sparsegpt+distill"}, True),
        ("micro_batch_size", {"permutation": "none", "weight_update": "sparsegpt"}, False),
        ("window", {"weight_update": "sparsegpt+reconstruct"}, True),
        ("window", {"weight_update": "distill"}, False),
        ("update_epochs", {"weight_update": "distill"}, True),
        ("objective", {"permutation": "none"}, False),
        ("objective", {"permutation": "none", "weight_update": "distill"}, True),
        ("row_weights", {"permutation": "none"}, False),
        ("row_weights", {"permutation": "heuristic"}, True),
        ("damping", {"permutation": "searched"}, True),
    ],
)
def test_an_option_needs_one_of_several_values(option, given, allowed):
    """A part of a weight update counts, too; the refusal names every way to give the option an effect."""
    config = CompileConfig.from_options(given)
    if allowed:
        check_explicit_options({option: OTHER[option]}, config)
        return
    with pytest.raises(ConfigError) as caught:
        check_explicit_options({option: OTHER[option]}, config)
    for name, values in OPTIONS[option].needs.items():
        assert [v for v in values if f"{OPTIONS[name].flag} {v}" not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("update", "permutation"),
    [("none", "searched"), ("sparsegpt", "heuristic"), ("sparsegpt+distill", "heuristic"), ("distill", "searched")],
)
def test_an_order_is_searched_unless_sparsegpt_follows(update, permutation):
    config = CompileConfig(weight_update=update)
    assert config.permutation == permutation
    assert CompileConfig.from_options(config.to_dict()) == config


@pytest.mark.parametrize("recipe", ["best", "fast"])
def test_recipes_for_the_demo_model_have_its_sizes(recipe):
    """The recipe's own options win over those of the recipe demo."""
    config = build("demo", recipe=recipe)
    assert (config.calibration.samples, config.calibration.calibration) == (64, "demo")
    assert {name: config.to_dict()[name] for name in RECIPES[recipe]} == RECIPES[recipe]
    assert build(recipe=recipe).calibration.samples == CompileConfig().calibration.samples


def test_the_parts_of_an_update_run_in_their_order():
    assert CompileConfig().updates == ()
    assert CompileConfig(weight_update="distill").updates == ("distill",)
    assert CompileConfig(weight_update="sparsegpt+reconstruct").updates == ("sparsegpt", "reconstruct")


def test_update_mask_without_sparsegpt_is_refused():
    with pytest.raises(ConfigError, match=r"--update-mask has no effect .* choose --weight-update sparsegpt"):
        check_explicit_options({"update_mask": "keep"}, CompileConfig())
    check_explicit_options({"update_mask": "keep"}, CompileConfig(weight_update="sparsegpt"))


def test_block_size_is_free_where_nothing_learns():
    assert CompileConfig.from_options({"permutation": "none", "sparsity": "3:5"}).sparsity == NMPattern(3, 5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"epochs = ", ["not TOML"]),
        (b"\xff\xfe", ["not TOML"]),
        (b"[learn]\nepochs = 3\n", ["[learn]", "flat"]),
        (None, ["cannot be read", "No such file"]),
    ],
)
def test_bad_config_files(tmp_path, content, words):
    file = tmp_path / "options.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_config_file(file)
    message = str(caught.value)
    assert str(file) in message
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_configs_are_frozen():
    with pytest.raises(AttributeError):
        CompileConfig().seed = 1


@pytest.mark.parametrize(("text", "layers"), [("all", None), ("last:1", 1), ("last:12", 12)])
def test_last_layers(text, layers):
    assert LearnConfig(learn_layers=text).last_layers == layers
