"""Linears with a pattern of their own: planned, compiled by every recipe, saved, packed, trained and reported."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import permtriton
from permtriton import NMPattern, config_from
from permtriton.checkpoint.export import export
from permtriton.driver.pipeline import compile_model
from permtriton.errors import ConfigError, ModelError
from permtriton.evaluation.report import report
from permtriton.passes.plan import linear_module, weight_in_out
from permtriton.recipe import compile_command

from . import folders, zoo
from .zoo import find_plan

TWO_FOUR = NMPattern(2, 4)
OWN = ["*.down_proj=4:8", "re:.*layers\\.1\\.self_attn\\.[qk]=1:4"]
DOWN, Q, GATE = "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.gate_proj"
RECIPES = {
    "mask": {"recipe": "heuristic,mask"},
    "refit": {"recipe": "heuristic,refit"},
    "values": {"recipe": "values", "search_rounds": 1},
    "learned": {"recipe": "permllm", "learn_epochs": 1, "learn_block_size": 16},
}


def compiled(layout="portable", recipe="mask", **options):
    config = config_from({**RECIPES[recipe], "layout": layout, "pattern": OWN, "samples": 4, **options})
    return compile_model(zoo.build("llama"), None, config, ids=zoo.token_ids())


def counts(model, name: str, group: int) -> torch.Tensor:
    return (weight_in_out(linear_module(model, name)) != 0).unflatten(0, (-1, group)).sum(1)


def check_patterns(model) -> None:
    """Each linear fills the groups of its own pattern, and those of no other one."""
    assert (counts(model, DOWN, 8) == 4).float().mean() > 0.99
    assert int(counts(model, DOWN, 4).max()) > 2
    assert (counts(model, Q, 4) == 1).float().mean() > 0.99
    assert (counts(model, GATE, 4) == 2).float().mean() > 0.99


def test_the_first_that_names_a_linear_counts():
    plan = find_plan(zoo.build("llama"), TWO_FOUR, pattern=[f"{DOWN}=1:4", "*.mlp.*=4:8", "Linear=1:2"])
    found = {name: str(pattern) for name, pattern in plan.patterns.items()}
    assert (found[DOWN], found[GATE], found[Q]) == ("1:4", "4:8", "1:2")
    assert {space.name: space.group_units for space in plan.spaces}["stream"] == 8


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("4:8", "`pattern=` is '4:8': expected LINEARS=N:M, such as"),
        ("=4:8", "expected LINEARS=N:M"),
        ("*.down_proj=8:4", "8:4 is not possible"),
        ("*.down_proj=dense", "'dense' is not understood"),
        ("*.down=4:8", "`pattern=.*down` names no linear of this model, .*down_proj"),
        ("*.dwn_proj=4:8", "whose linears are such as model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj$"),
        (
            "lm_head=4:8",
            "names no linear that is pruned, but one that stays dense: does not feed the last hidden state",
        ),
    ],
)
@pytest.mark.slow
def test_what_is_refused(pattern, words):
    with pytest.raises(ConfigError, match=words):
        find_plan(zoo.build("llama"), TWO_FOUR, pattern=[pattern])


@pytest.mark.slow
def test_one_that_an_earlier_one_leaves_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"down_proj=1:4` names no linear that an earlier one does not"):
        find_plan(zoo.build("llama"), TWO_FOUR, pattern=["Linear=4:8", "*.down_proj=1:4"])
    assert find_plan(zoo.build("llama"), TWO_FOUR, pattern=["*.down_proj=4:8"], ignore=["*.down_proj"]).sites


@pytest.mark.slow
def test_with_a_dense_share():
    found = compiled(recipe="mask", dense_share=0.3)
    left = [name for name, pattern in found.plan.patterns.items() if str(pattern) == "4:8"]
    assert all((counts(found.model, name, 8) == 4).float().mean() > 0.99 for name in left)
    assert len(found.plan.patterns) < 14


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
@pytest.mark.slow
def test_transposed_weights_and_stacks_of_experts(name, tmp_path):
    linears = {"gpt2": "*.mlp.c_proj", "mixtral": "re:.*experts.*down_proj"}[name]
    config = config_from({"recipe": "heuristic,mask", "pattern": [f"{linears}=4:8"]})
    plain = compile_model(zoo.build(name), None, config, ids=zoo.token_ids()).save_pretrained(tmp_path / "plain")
    own = json.loads((plain / "permtriton.json").read_text())["patterns"]
    assert len(own) == 2
    assert set(own.values()) == {"4:8"}
    export(plain, tmp_path / "packed")
    assert not folders.differing(folders.state(folders.load(plain)), folders.state(folders.load(tmp_path / "packed")))


@pytest.mark.slow
def test_a_group_that_does_not_fit_its_linear():
    with pytest.raises(ModelError, match=r"down_proj.* not a multiple of 11 \(3:11 sparsity\)"):
        find_plan(zoo.build("llama"), TWO_FOUR, pattern=["*.down_proj=3:11"])


def test_blocks_of_learning_hold_whole_groups_of_all():
    with pytest.raises(ConfigError, match="learn_block_size 12 is not a multiple of the group size of 4:8"):
        config_from({"recipe": "permllm", "learn_block_size": 12, "pattern": OWN})


@pytest.mark.slow
def test_experts_of_one_parameter_have_one_pattern():
    with pytest.raises(ConfigError, match=r"`pattern=` prunes .*experts\.1\..*: give all of its experts one pattern"):
        find_plan(zoo.build("mixtral"), TWO_FOUR, pattern=["re:.*experts\\.0\\.=1:4"])
    plan = find_plan(zoo.build("mixtral"), TWO_FOUR, pattern=["re:.*experts=1:4"])
    assert {str(pattern) for name, pattern in plan.patterns.items() if "experts" in name} == {"1:4"}


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("mask", "fused"),
        *(pytest.param(recipe, "portable", marks=pytest.mark.slow) for recipe in ("refit", "values", "learned")),
    ],
)
def test_every_recipe_keeps_them(recipe, layout):
    found = compiled(layout, recipe)
    check_patterns(found.model)
    assert found.report["config"]["pattern"] == OWN
    assert config_from(found.report["config"]).pattern == tuple(OWN)
    assert "--pattern '*.down_proj=4:8' --pattern 're:" in compile_command("model", found.config)


@pytest.mark.slow
def test_from_the_compiled_folder_to_the_packed_one(tmp_path):
    plain = compiled("fused").save_pretrained(tmp_path / "plain")
    record = json.loads((plain / "permtriton.json").read_text())
    own = {name.removesuffix(".weight"): pattern for name, pattern in record["patterns"].items()}
    assert own == {
        "model.layers.0.mlp.down_proj": "4:8", "model.layers.1.mlp.down_proj": "4:8",
        "model.layers.1.self_attn.q_proj": "1:4", "model.layers.1.self_attn.k_proj": "1:4",
    }  # fmt: skip
    assert "pruned to 2:4, but 4:8 in 2 and 1:4 in 2 of 14 weights" in (plain / "README.md").read_text()
    result = export(plain, tmp_path / "packed")
    assert result["sparsity"] == "2:4, but 4:8 in 2 and 1:4 in 2 of 14 weights"
    entries = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["packed"]
    assert {entries[f"{name}.weight"].get("sparsity") for name in (DOWN, Q, GATE)} == {"4:8", "1:4", None}
    packed = folders.load(tmp_path / "packed")
    check_patterns(packed)
    assert not folders.differing(folders.state(folders.load(plain)), folders.state(packed))
    export(tmp_path / "packed", tmp_path / "dense", "dense")
    assert not folders.differing(folders.state(packed), folders.state(folders.load(tmp_path / "dense")))
    report([tmp_path / "packed"], tmp_path / "report.html")
    assert "2:4, but 4:8 in 2 and 1:4 in 2 of 14 weights" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_training_keeps_them(tmp_path):
    plain = compiled().save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(plain)
    kept = permtriton.keep_pattern(model)
    assert str(kept.patterns[f"{DOWN}.weight"]) == "4:8"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(input_ids=zoo.token_ids(), labels=zoo.token_ids()).loss.backward()
    optimizer.step()
    check_patterns(model)
    kept.save_pretrained(tmp_path / "trained")
    record = json.loads((tmp_path / "trained" / "permtriton.json").read_text())
    assert record["patterns"][f"{DOWN}.weight"] == "4:8"
    assert export(tmp_path / "trained", tmp_path / "packed")["weights"] == 14
