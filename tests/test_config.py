"""Options: round trips, precedence, and errors that say what to set."""

import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest

from permtriton import NMPattern, config_from
from permtriton.cli.compile import compile
from permtriton.config import CalibrationConfig
from permtriton.errors import ConfigError
from permtriton.methods.recipe_config import CompileConfig, no_effect_refusal
from permtriton.methods.steps import STEPS
from permtriton.methods.train.distill import Distill
from permtriton.recipe import RECIPES, all_options, check_effects, resolve, with_suggested
from permtriton.util.option import options_of

OPTIONS = all_options()
# A value of every option that is not its default.
OTHER = {
    "sparsity": "4:8",
    "importance": "ria",
    "layout": "fused",
    "o_proj": "free",
    "skip_indivisible": True,
    "pattern": ["*.up_proj=4:8"],
    "targets": ["*.up_proj", "re:.*q"],
    "ignore": ["*.down_proj", "re:.*q"],
    "dense_share": 0.25,
    "seed": 7,
    "micro_batch_size": 2,
    "activation_checkpointing": True,
    "mixed_precision": False,
    "calibration": "pile",
    "text_column": "body",
    "split": "validation",
    "samples": 3,
    "sequence_length": 77,
    "generated": 9,
    "heuristic_row_weights": "fisher",
    "learn_block_size": 32,
    "learn_sinkhorn_rounds": 0,
    "learn_tau_start": 0.9,
    "learn_tau_end": 0.2,
    "learn_epochs": 4,
    "learn_batch_size": 6,
    "learn_learning_rate": 0.02,
    "learn_weight_decay": 0.0,
    "learn_layers": "last:2",
    "learn_init": "random",
    "learn_clamp": 2.0,
    "learn_gradient": "published",
    "learn_tau_falls": "epoch",
    "learn_keep": "last",
    "learn_loss": "kl",
    "search_rounds": 3,
    "search_loss": "cosine",
    "sparsegpt_mask": "keep",
    "refit_dense_targets": 0.75,
    "refit_residual_targets": 0.5,
    "refit_iterations": 7,
    "refit_exchanges": 2,
    "calibrate_all_experts": True,
    "one_document": True,
    "special_tokens": "none",
    "refit_metric_tokens": 512,
    "refit_metric_rounds": 3,
    "round_sweeps": 1,
    "distill_epochs": 6,
    "distill_learning_rate": 0.04,
    "distill_batch_size": 3,
    "distill_optimizer": "adafactor",
    "distill_further": 1,
    "distill_steps": 5,
    "distill_loss": "cosine",
}
PARTS = (CompileConfig, CalibrationConfig, *STEPS)
# Recipes that have every step between them.
LEARN, UPDATE = "heuristic,learned,searched,mask,distill,round", "heuristic,sparsegpt"
REFIT = "heuristic,refit"


def recipe_with(name: str) -> str:
    """A recipe in which an option may differ from its default."""
    return next((each for each in (UPDATE, REFIT) if OPTIONS[name].step in each.split(",")), LEARN)


def build(model: str = "some/model", recipe: str | None = None, file: Path | None = None, **flags: object):
    return resolve(model, flags, recipe, file)[0]


def written(folder: Path, content: str) -> Path:
    file = folder / "options.toml"
    file.write_text(content, encoding="utf-8")
    return file


def toml(value: object) -> str:
    return str(value) if isinstance(value, float) else json.dumps(value)


def test_a_table_in_a_file_is_refused_with_what_to_write(tmp_path):
    with pytest.raises(ConfigError, match=r"has the table \[learned\]: write its options as learn_epochs = 5"):
        build(file=written(tmp_path, "[learned]\nepochs = 5\n"))


def test_the_table_of_other_values_is_complete():
    assert set(OTHER) == set(OPTIONS)
    assert [name for name, option in OPTIONS.items() if option.convert(OTHER[name]) == option.default] == []


@pytest.mark.parametrize("recipe", [*RECIPES, LEARN])
def test_to_dict_reads_back_to_an_equal_config(recipe):
    config = config_from({}, recipe)
    assert config_from(config.to_dict()) == config


@pytest.mark.parametrize("name", OTHER)
def test_each_option_lands_and_survives_a_round_trip(name):
    recipe = recipe_with(name)
    config = config_from({name.replace("_", "-"): OTHER[name]}, recipe)
    options = config.to_dict()
    assert options[name] == OTHER[name]
    assert {k: v for k, v in options.items() if k != name} == {
        k: v for k, v in config_from({}, recipe).to_dict().items() if k != name
    }
    assert config_from(options) == config


def test_steps_may_be_given_as_they_are():
    named = config_from({"distill_epochs": 3}, "sparsegpt,distill")
    steps = config_from({}, named.steps)
    assert steps == named
    assert config_from({"distill_epochs": 4}, named.steps).steps[1] == Distill(epochs=4)


def test_every_option_is_a_flag_of_compile():
    assert set(OPTIONS) <= set(inspect.signature(compile).parameters)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_limit_refuses(name):
    """`Option.expected` describes what `Option.check` accepts, from Python and from a file, in any recipe."""
    option = OPTIONS[name]
    part = next(part for part in PARTS if option in options_of(part))
    bad = {bool: 1, int: option.minimum - 1, float: float("nan"), NMPattern: "2:4"}.get(option.type, "last:0")
    bad = [3] if option.several else bad
    if name in ("calibration", "text_column", "split"):
        bad = 3
    with pytest.raises(ConfigError, match=f"^`{name}=` is .*expected "):
        part(**{option.field: bad})
    if option.type is not NMPattern:
        for recipe in (LEARN, UPDATE, REFIT):
            with pytest.raises(ConfigError, match=f"^`{name}=` is .*expected "):
                config_from({name: bad}, recipe)


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({}, 1e-3),
        ({"importance": "wanda"}, 1e-3),
        ({"importance": "ria"}, 5e-3),
        ({"importance": "ria", "learn_learning_rate": 2e-3}, 2e-3),
        ({"importance": "ria", "learn-learning-rate": 2e-3}, 2e-3),
    ],
)
def test_published_learning_rate(given, rate):
    assert config_from(given, "permllm").steps[0].learning_rate == rate


def test_the_papers_recipe_is_its_code_to_the_letter():
    config = config_from({}, "permllm")
    learn = config.steps[0]
    assert (config.named, config.layout, config.o_proj) == ("permllm", "fused", "free")
    assert (learn.gradient, learn.loss, learn.tau_falls) == ("published", "before_norm", "epoch")
    assert (config.importance, config.recipe) == ("wanda", "learned,mask")
    assert (learn.block_size, learn.sinkhorn_rounds, learn.epochs, learn.batch_size) == (64, 5, 50, 16)
    assert (learn.tau_start, learn.tau_end, learn.weight_decay) == (1.0, 0.1, 0.1)
    assert (learn.init, learn.clamp, learn.keep) == ("random", 1.0, "last")
    assert config.calibration == CalibrationConfig("c4", 128, 1024)


def test_flags_win_over_the_file_and_the_file_over_the_recipe(tmp_path):
    content = 'recipe = "permllm"\nlearn_epochs = 9\nsparsity = "4:8"\nlearn-learning-rate = 0.5\n'
    file = written(tmp_path, content)
    config = build(file=file, learn_epochs=3)
    (learn, _) = config.steps
    assert (learn.epochs, learn.learning_rate, config.sparsity) == (3, 0.5, NMPattern(4, 8))
    assert learn.init == "random", "from the recipe that the file names"
    assert build(recipe="learned,mask", file=file).steps[0].init == "identity", "the flag's recipe wins"


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.step])
def test_options_of_steps_are_reachable_by_file(tmp_path, name):
    config = build(recipe=recipe_with(name), file=written(tmp_path, f"{name} = {toml(OTHER[name])}\n"))
    assert config.to_dict()[name] == OTHER[name]


@pytest.mark.parametrize(("tokens", "sequences"), [(2048, 1), (1024, 1), (1000, 2), (512, 2), (256, 4), (16, 8)])
def test_a_step_of_the_default_reads_enough_tokens(tokens, sequences):
    config = build(sequence_length=tokens)
    assert config.steps[-1].batch_size == sequences
    assert build(sequence_length=tokens, distill_batch_size=3).steps[-1].batch_size == 3
    shorter = replace(config, calibration=replace(config.calibration, sequence_length=512))
    assert with_suggested(shorter, {"sequence_length"}).steps[-1].batch_size == 2
    assert with_suggested(shorter, {"distill_batch_size"}).steps[-1].batch_size == sequences


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fancy": 1}, ["'fancy'", "--help-all lists all options"]),
        ({"sample": 8}, ["'sample'", "did you mean samples"]),
        ({"learn": {}}, ["'learn'"]),
        ({"steps": ()}, ["unknown option 'steps'"]),
        ({"o_proj": "loose"}, ["o_proj", "'loose'", "tied, free"]),
        ({"learn_epochs": "x"}, ["learn_epochs", "'x'", "expected an integer"]),
        ({"device": "cpu"}, ["device is no option of a config", "`device=`"]),
        ({"sparsity": 24}, ["'24'", "N:M"]),
        ({"recipe": "searched,refit"}, ["searched before refit is refused"]),
        ({"recipe": "searched,sparsegpt"}, ["searched", "sparsegpt", "no better", "heuristic", "leave searched out"]),
        ({"learn_layers": "first:1"}, ["'first:1'", "last:K"]),
        ({"learn_block_size": 30, "recipe": "permllm"}, ["learn_block_size 30", "2:4", "multiple of 4"]),
        (
            {"learn_block_size": 4, "sparsity": "4:8", "recipe": "permllm"},
            ["learn_block_size 4", "4:8", "multiple of 8"],
        ),
    ],
)
def test_bad_values_say_what_and_what_to_do(given, words):
    with pytest.raises(ConfigError) as caught:
        config_from(given)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("recipe", ["heuristic,mask", "sparsegpt,distill"])
@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.step])
def test_options_of_steps_that_do_not_run_are_refused(name, recipe):
    option, config = OPTIONS[name], config_from({}, recipe)
    if config.has(option.step):
        check_effects([name], config)
        return
    message = f"`{option.name}=` has no effect with `recipe={recipe}`: .* step {option.step}; .* add {option.step} to"
    with pytest.raises(ConfigError, match=message):
        check_effects([name], config)


@pytest.mark.parametrize(
    ("option", "given", "wanted"),
    [
        ("micro_batch_size", {"recipe": "heuristic,mask", "heuristic_row_weights": "fisher"}, None),
        ("micro_batch_size", {"recipe": "searched,mask"}, None),
        ("micro_batch_size", {"recipe": "sparsegpt,distill"}, None),
        ("importance", {"recipe": "sparsegpt"}, "chooses its own mask"),
        ("importance", {"recipe": "sparsegpt", "sparsegpt_mask": "keep"}, None),
        ("importance", {"recipe": "heuristic,sparsegpt"}, None),
        ("importance", {"recipe": "mask,distill"}, None),
        ("o_proj", {}, "`layout=portable`: leave it out, or choose `layout=fused`"),
        ("o_proj", {"layout": "fused"}, None),
        ("seed", {"recipe": "mask"}, None),
        ("split", {"calibration": "c4", "split": "train"}, None),
    ],
)
def test_options_of_the_compilation_that_change_nothing_are_refused(option, given, wanted):
    config = config_from(given)
    assert bool(no_effect_refusal(OPTIONS[option], config)) == (wanted is not None)
    if wanted is None:
        check_effects([option], config)
        return
    with pytest.raises(ConfigError, match=f"^`{option}=` has no effect with .*{wanted}"):
        check_effects([option], config)
