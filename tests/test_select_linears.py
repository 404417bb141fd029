"""Linears that a user wants to prune, and those that stay dense."""

import pytest
import torch

from permtriton import NMPattern, config_from
from permtriton.driver.pipeline import compile_model
from permtriton.errors import ConfigError, ModelError
from permtriton.passes.plan import linear_module
from permtriton.recipe import compile_command

from . import zoo
from .zoo import find_plan

TWO_FOUR = NMPattern(2, 4)


@pytest.mark.parametrize(
    ("pattern", "dense"),
    [
        ("model.layers.0.mlp.up_proj", {"0.mlp.up_proj"}),
        ("model.layers.1.mlp", {"1.mlp.gate_proj", "1.mlp.up_proj", "1.mlp.down_proj"}),
        ("*.down_proj", {"0.mlp.down_proj", "1.mlp.down_proj"}),
        (r"re:.*layers\.0\.self_attn\.[qk]", {"0.self_attn.q_proj", "0.self_attn.k_proj"}),
        ("lm_head", set()),
    ],
)
@pytest.mark.slow
def test_patterns(pattern, dense):
    every = {name for _, name in find_plan(zoo.build("llama"), TWO_FOUR).linears()}
    plan = find_plan(zoo.build("llama"), TWO_FOUR, ignore=[pattern])
    expected = {f"model.layers.{name}" for name in dense}
    assert every - {name for _, name in plan.linears()} == expected
    for name in expected:
        assert plan.skipped[name] == f"named by ignore: {pattern}"
    if not dense:
        return
    plan = find_plan(zoo.build("llama"), TWO_FOUR, targets=[pattern])
    assert {name for _, name in plan.linears()} == expected
    for name in every - expected:
        assert plan.skipped[name] == "not named by targets"


def test_targets_among_which_some_stay_dense():
    targets, ignore = ["*.mlp.*", "*.v_proj", "lm_head"], ["*.0.mlp.down_proj", "model.layers.1.mlp"]
    plan = find_plan(zoo.build("llama"), TWO_FOUR, targets=targets, ignore=ignore)
    pruned = ["0.mlp.gate_proj", "0.mlp.up_proj", "0.self_attn.v_proj", "1.self_attn.v_proj"]
    assert sorted(name for _, name in plan.linears()) == [f"model.layers.{name}" for name in pruned]
    assert plan.skipped["model.layers.0.mlp.down_proj"] == "named by ignore: *.0.mlp.down_proj"
    assert plan.skipped["model.layers.0.self_attn.q_proj"] == "not named by targets"
    assert plan.skipped["lm_head"].startswith("does not feed the last hidden state")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("*", "no linear layer of this model can be pruned"),
        ("Linear", "no linear layer of this model can be pruned"),  # the name of a class
    ],
)
@pytest.mark.slow
def test_patterns_that_name_everything(pattern, words):
    with pytest.raises((ConfigError, ModelError), match=words):
        find_plan(zoo.build("llama"), TWO_FOUR, ignore=[pattern])


@pytest.mark.parametrize("option", ["targets", "ignore"])
@pytest.mark.slow
def test_targets_and_ignore_have_the_same_errors(option):
    with pytest.raises(ConfigError, match=f"^`{option}=layers.0.mlp.up` names no .* model.layers.0.mlp.up_proj"):
        find_plan(zoo.build("llama"), TWO_FOUR, **{option: ["*.down_proj", "layers.0.mlp.up"]})
    with pytest.raises(
        ConfigError, match=f"^`{option}=.*` .* as model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj"
    ):
        find_plan(zoo.build("llama"), TWO_FOUR, **{option: ["*.mlp"]})  # a module, which no linear's name ends with
    with pytest.raises(ConfigError, match=r"; repeat the option for several$"):
        find_plan(zoo.build("llama"), TWO_FOUR, **{option: ["q_proj,k_proj"]})
    with pytest.raises(ConfigError, match=f"^`{option}=re:\\(` is no regular expression"):
        find_plan(zoo.build("llama"), TWO_FOUR, **{option: ["re:("]})
    with pytest.raises(ConfigError, match=f"`{option}=` is"):
        config_from({option: [""]})


def test_targets_of_which_none_can_be_pruned():
    with pytest.raises((ConfigError, ModelError), match="names no linear"):
        find_plan(zoo.build("llama"), TWO_FOUR, targets=["*.mlp"])


@pytest.mark.parametrize("layout", ["portable", "fused"])
@pytest.mark.slow
def test_a_dense_linear_beside_pruned_ones_reads_the_new_order(layout):
    """The compilation itself checks that the outputs stay the same while channels move."""
    model = zoo.build("llama")
    ignore = ["*.q_proj", "*.0.mlp.up_proj", "*.1.mlp.down_proj"]
    targets = ["*.self_attn.*", "*.mlp.*"]
    config = config_from({"layout": layout, "targets": targets, "ignore": ignore}, "heuristic,mask")
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    compiled = compile_model(model, None, config, ids=zoo.token_ids())
    assert any(entry["moved"] for entry in compiled.report["permutations"])
    for name in ("0.self_attn.q_proj", "1.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.down_proj"):
        weight = linear_module(model, f"model.layers.{name}").get_parameter("weight")
        dense = before[f"model.layers.{name}.weight"]
        assert torch.equal(weight.flatten().sort().values, dense.flatten().sort().values), "only its order changed"
    assert (compiled.report["config"]["targets"], compiled.report["config"]["ignore"]) == (targets, ignore)
    assert compiled.report["skipped"]["model.layers.0.self_attn.q_proj"] == "named by ignore: *.q_proj"
    assert config_from(compiled.report["config"]) == config
    flags = "--targets '*.self_attn.*' --targets '*.mlp.*' "
    flags += "--ignore '*.q_proj' --ignore '*.0.mlp.up_proj' --ignore '*.1.mlp.down_proj'"
    assert flags in compile_command("model", config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"ignore": [r"re:.*experts\.0\."]},
            r"^`ignore=` leaves .*experts\.0\..* dense, but not all the other experts",
        ),
        (
            {"targets": [r"re:.*experts\.[1-9]\."]},
            r"^`targets=` leaves .*experts\.0\..* or none, for example with `ignore=.*ex",
        ),
    ],
)
@pytest.mark.slow
def test_experts_of_one_parameter_are_pruned_together(options, words):
    with pytest.raises(ConfigError, match=words):
        find_plan(zoo.build("mixtral"), TWO_FOUR, **options)
    assert find_plan(zoo.build("mixtral"), TWO_FOUR, ignore=["*.experts.*.down_proj"]).sites
