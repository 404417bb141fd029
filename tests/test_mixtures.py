"""Mixture-of-experts models from end to end: compiled, saved, reloaded, packed, in both layouts."""

import pytest
import torch
from torch import nn

from permtriton.checkpoint.export import export
from permtriton.driver.pipeline import compile_model
from permtriton.recipe import config_from

from . import zoo


@pytest.fixture(scope="module", params=[("qwen2_moe", "fused")], ids=str)
def case(request, tmp_path_factory):
    name, layout = request.param
    folder = tmp_path_factory.mktemp(f"{name}-{layout}")
    zoo.build(name).save_pretrained(folder / "dense")
    model_class = type(zoo.build(name))
    model = model_class.from_pretrained(folder / "dense", dtype=torch.bfloat16).eval()
    config = config_from({"recipe": "heuristic,mask", "layout": layout})
    compiled = compile_model(model, None, config, ids=zoo.token_ids())
    compiled.save_pretrained(folder / "compiled")
    return model_class, compiled, folder


def stacks(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name}


@pytest.mark.slow
def test_the_original_experts_are_back_and_pruned(case):
    _, compiled, _ = case
    found = stacks(compiled.model)
    assert len(found) == 2 * zoo.LAYERS
    for name, weight in found.items():
        nonzero = (weight != 0).unflatten(-1, (-1, 4)).sum(-1)
        assert set(nonzero.unique().tolist()) == {2}, f"{name} [experts, out, in] is 2:4 along its inputs"


@pytest.mark.slow
def test_every_expert_has_its_own_order_and_nothing_is_frozen(case):
    _, compiled, _ = case
    assert [space.frozen for space in compiled.plan.spaces if space.frozen] == []
    down = [site for site in compiled.plan.sites if ".experts." in site.name and site.name.endswith("down_proj")]
    assert len(down) == 5 * zoo.LAYERS
    assert len({site.space.name for site in down}) == len(down)
    orders = {tuple(compiled.indices[site.space.name].tolist()) for site in down}
    assert len(orders) > len(down) // 2, "experts are not sorted alike"


@pytest.mark.slow
def test_the_router_is_dense_and_listed(case):
    _, compiled, _ = case
    routers = [n for n, p in compiled.model.named_parameters() if n.endswith("mlp.gate.weight")]
    assert len(routers) == zoo.LAYERS
    for name in routers:
        assert name in compiled.plan.skipped or name.removesuffix(".weight") in compiled.plan.skipped
        assert bool((compiled.model.get_parameter(name) != 0).all())


@pytest.mark.slow
def test_reloaded_and_packed_compute_the_same_bit_for_bit(case):
    model_class, compiled, folder = case
    ids = zoo.token_ids(sequences=2, seed=4)
    expected = zoo.outputs(compiled.model, ids)
    result = export(folder / "compiled", folder / "packed", "packed")
    assert result["ratio"] <= 0.5626
    for saved in ("compiled", "packed"):
        reloaded = model_class.from_pretrained(folder / saved, dtype=torch.bfloat16).eval()
        assert all(torch.equal(a, b) for a, b in zip(expected, zoo.outputs(reloaded, ids), strict=True))
        assert stacks(reloaded).keys() == stacks(compiled.model).keys()


@pytest.mark.slow
def test_experts_of_another_kind_are_left_dense_with_the_reason():
    model = zoo.build("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.experts.has_post_expert_norm = True
        layer.mlp.experts.post_expert_norm = torch.nn.Identity()
    config = config_from(recipe="heuristic,mask")
    compiled = compile_model(model, None, config, ids=zoo.token_ids())
    refused = {name: reason for name, reason in compiled.plan.skipped.items() if ".experts." in name}
    assert len(refused) >= 2 * zoo.LAYERS
    assert all(reason for reason in refused.values())
    assert all(bool((weight != 0).all()) for weight in stacks(model).values())
