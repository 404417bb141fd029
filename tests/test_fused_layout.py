"""Models compiled in the `fused` layout: their weights, modules and report, and how they run."""

import functools

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton import CompiledModel, config_from
from permtriton.driver.pipeline import compile_model
from permtriton.errors import ModelError
from permtriton.model.experts import stacked_name, unstacked_experts
from permtriton.model.modules import GatheredLinear, PermutedLayerNorm, PermutedRMSNorm
from permtriton.passes.plan import Destination, linear_module, weight_in_out

from . import zoo
from .kernel_inputs import TWO_FOUR
from .zoo import find_plan, fold

LEARN = {
    "recipe": "heuristic,learned,mask",
    "learn_epochs": 2,
    "learn_batch_size": 4,
    "learn_learning_rate": 0.1,
    "learn_block_size": 16,
    "learn_keep": "last",
}
HEURISTIC = {"recipe": "heuristic,mask"}
SPARSEGPT = {"recipe": "heuristic,sparsegpt", "importance": "wanda"}


# -- compiled ----------------------------------------------------------------------------------------------------------


def compiled(name: str, **options: object) -> CompiledModel:
    config = config_from({"layout": "fused", **options})
    return compile_model(zoo.build(name), None, config, ids=zoo.token_ids())


def in_order(name: str, result: CompiledModel) -> PreTrainedModel:
    """Returns the dense model in the channel order of a compiled one, before masks."""
    dense = zoo.build(name)
    moves = {space.name for space in result.plan.spaces if not space.frozen}
    with unstacked_experts(dense):
        fold(dense, result.plan, {space: index for space, index in result.indices.items() if space in moves})
    return dense


CASES = {
    "llama learned": ("llama", LEARN),
    "phi3 learned, free": ("phi3", {**LEARN, "o_proj": "free"}),
    "bert learned": ("bert", LEARN),
    "qwen2_moe": ("qwen2_moe", HEURISTIC),
    "gpt2 sparsegpt, obs": ("gpt2", {**SPARSEGPT, "importance": "obs"}),
}


@functools.cache
def case_of(case: str) -> tuple[str, CompiledModel]:
    name, options = CASES[case]
    return name, compiled(name, **options)


ALWAYS = ("phi3 learned, free", "bert learned")
every_case = pytest.mark.parametrize(
    "case", [*ALWAYS, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in ALWAYS)]
)


@every_case
def test_compiled_modules_run_what_the_plan_says(case):
    name, result = case_of(case)
    for site in result.plan.sites:
        order = result.indices[site.space.name]
        if site.space.norm is not None:
            norm = result.model.get_submodule(site.space.norm.module)
            kind = site.space.norm.variant.kind
            assert isinstance(norm, PermutedLayerNorm if kind == "layer" else PermutedRMSNorm)
            assert torch.equal(norm.index.long(), order)
        for linear in site.linears:
            if stacked_name(result.model, linear) is not None:
                continue
            module = result.model.get_submodule(linear)
            if site.space.placement is Destination.GATHER:
                assert isinstance(module, GatheredLinear)
                assert torch.equal(module.gather.index.long(), order)
            else:
                assert getattr(module, "gather", None) is None
                assert isinstance(module, nn.Linear | Conv1D)
    assert type(result.model) is type(zoo.build(name))
    assert set(dict(result.model.named_parameters())) == set(dict(zoo.build(name).named_parameters()))


@every_case
def test_without_masks_it_is_the_dense_model(case):
    name, result = case_of(case)
    ids = zoo.token_ids(seed=2)
    dense = zoo.outputs(zoo.build(name), ids)
    ordered = in_order(name, result)
    assert zoo.difference(dense, zoo.outputs(ordered, ids)) < 1e-4
    assert zoo.difference(dense, zoo.outputs(result.model, ids)) > 1e-2
    assert result.report["proof"]["fold_difference"] < 1e-4
    if "sparsegpt" not in case:
        with unstacked_experts(ordered), unstacked_experts(result.model):
            for _, linear in result.plan.linears():
                expected = weight_in_out(linear_module(ordered, linear))
                found = weight_in_out(linear_module(result.model, linear))
                assert torch.equal(found, torch.where(found != 0, expected, 0)), linear


@every_case
def test_the_hidden_state_keeps_its_order(case):
    name, result = case_of(case)
    assert result.plan.hidden_site is None
    assert result.plan.hidden_order(result.indices) is None
    ids = zoo.token_ids(2, 6)
    with torch.no_grad():
        dense, ordered = (model.base_model(ids)[0] for model in (zoo.build(name), in_order(name, result)))
    torch.testing.assert_close(ordered, dense, rtol=1e-3, atol=1e-3)


# -- running it --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_norm_that_runs_twice_is_not_fused():
    """ALBERT's layers share one set of weights and norms; whatever its plan is, its outputs stay."""
    from transformers import AlbertConfig, AlbertModel

    model = AlbertModel(AlbertConfig(**zoo.SIZES, embedding_size=32)).eval()
    zoo.randomize(model)
    plan = find_plan(model, TWO_FOUR, layout="fused")
    assert all(space.norm is None for space in plan.spaces)
    before = zoo.outputs(model, zoo.token_ids())
    fold(model, plan, zoo.random_indices(plan))
    assert zoo.difference(before, zoo.outputs(model, zoo.token_ids())) < 1e-4


@pytest.mark.slow
def test_a_fused_model_is_not_compiled_again():
    model = zoo.build("llama")
    config = config_from({**HEURISTIC, "layout": "fused"})
    compiled = compile_model(model, None, config, ids=zoo.token_ids())
    with pytest.raises(ModelError, match=r"compiled already.*input_layernorm.*original model"):
        compile_model(compiled.model, None, config, ids=zoo.token_ids())
