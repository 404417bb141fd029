"""Linears that a user wants to stay dense."""

import pytest
import torch

from permtriton import NMPattern, config_from, find_plan
from permtriton.compiler import compile_model
from permtriton.errors import ConfigError
from permtriton.model.plan import linear_module
from permtriton.recipe import compile_command

from . import zoo

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
def test_patterns(pattern, dense):
    every = {name for _, name in find_plan(zoo.build("llama"), TWO_FOUR).linears()}
    plan = find_plan(zoo.build("llama"), TWO_FOUR, ignore=[pattern])
    expected = {f"model.layers.{name}" for name in dense}
    assert every - {name for _, name in plan.linears()} == expected
    for name in expected:
        assert plan.skipped[name] == f"named by --ignore {pattern}"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("layers.0.mlp.up", "'layers.0.mlp.up' names no linear .* model.layers.0.mlp.up_proj"),
        ("re:(", r"'re:\(' is no regular expression: missing \)"),
        ("*", "no linear layer of this model can be pruned"),
        ("Linear", "no linear layer of this model can be pruned"),  # the name of a class
    ],
)
def test_patterns_that_name_nothing_or_everything(pattern, words):
    with pytest.raises(Exception, match=words) as caught:
        find_plan(zoo.build("llama"), TWO_FOUR, ignore=[pattern])
    assert type(caught.value).__name__ in ("ConfigError", "ModelError")
    with pytest.raises(ConfigError, match="ignore is"):
        config_from({"ignore": [""]})


@pytest.mark.parametrize("layout", ["portable", "fused"])
def test_a_dense_linear_beside_pruned_ones_reads_the_new_order(layout):
    """The compilation itself checks that the outputs stay the same while channels move."""
    model = zoo.build("llama")
    ignore = ["*.q_proj", "*.0.mlp.up_proj", "*.1.mlp.down_proj"]
    config = config_from({"layout": layout, "ignore": ignore}, "heuristic,mask")
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    compiled = compile_model(model, None, config, ids=zoo.token_ids())
    assert any(entry["moved"] for entry in compiled.report["permutations"])
    for name in ("0.self_attn.q_proj", "1.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.down_proj"):
        weight = linear_module(model, f"model.layers.{name}").get_parameter("weight")
        dense = before[f"model.layers.{name}.weight"]
        assert torch.equal(weight.flatten().sort().values, dense.flatten().sort().values), "only its order changed"
    assert compiled.report["config"]["ignore"] == ignore
    assert config_from(compiled.report["config"]) == config
    flags = "--ignore '*.q_proj' --ignore '*.0.mlp.up_proj' --ignore '*.1.mlp.down_proj'"
    assert flags in compile_command("model", config)
