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
