"""Activation statistics of experts, taken from the tokens that reach each expert, and what happens if none does."""

import pytest
import torch

from permtriton import config_from
from permtriton.data.samples import Samples
from permtriton.driver.pipeline import compile_model
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.methods.measure.statistics import channel_norms, hessians
from permtriton.model.forward import last_hidden_state
from permtriton.passes.plan import linear_module
from permtriton.running.layer_walk import LayerWalk, from_model
from permtriton.util.progress import NoProgress

from . import zoo
from .expert_stacks import EXPERTS, NAMES, PATTERN, unstacked


class _Messages(NoProgress):
    def __init__(self):
        self.messages = []

    def say(self, text):
        self.messages.append(text)


def starve(model, number: int) -> None:
    """Keeps the router of the first layer from sending tokens to an expert."""
    gate = model.get_submodule("model.layers.0.mlp.gate")
    gate.register_forward_hook(
        lambda _m, _i, output: (*output[:2], torch.where(output[2] == number, (number + 1) % EXPERTS, output[2]))
    )


@pytest.mark.slow
def test_statistics_are_of_what_each_expert_reads():
    model, plan = unstacked("mixtral")
    ids = zoo.token_ids(4)
    seen = {}
    experts = model.get_submodule(NAMES[0])
    experts.register_forward_pre_hook(lambda _m, inputs: seen.update(all=inputs[0], index=inputs[1]))
    experts[0]["down_proj"].register_forward_pre_hook(lambda _m, inputs: seen.update(first=inputs[0]))
    norms = channel_norms(LayerWalk(model, plan, Samples.of(ids), 4), NoProgress())
    layer = plan.layers()[0]
    found = hessians(model, from_model(model, layer, Samples.of(ids), 4), lambda *_: None)
    last_hidden_state(model, Samples.of(ids))
    assert 0 < seen["first"].shape[0] < seen["all"].shape[0] == ids.numel()
    for site in layer:
        inputs = {f"{NAMES[0]}.0.gate_up_proj": "all", f"{NAMES[0]}.0.down_proj": "first"}.get(site.linears[0])
        if inputs:
            expected = seen[inputs].detach()
            assert torch.allclose(found[site.name], expected.T @ expected, rtol=1e-4, atol=1e-4)
            assert torch.allclose(norms[site.name], (expected.square().sum(0) / 4).sqrt(), rtol=1e-4)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.slow
def test_an_expert_that_no_token_reaches_is_scored_by_size(number):
    model, plan = unstacked("mixtral")
    starve(model, number)
    ids, progress = zoo.token_ids(4), _Messages()
    norms = channel_norms(LayerWalk(model, plan, Samples.of(ids), 4), progress)
    found = hessians(model, from_model(model, plan.layers()[0], Samples.of(ids), 4), lambda *_: None)
    name = f"{NAMES[0]}.{number}.down_proj"
    assert bool((norms[name] == 1).all())
    assert torch.equal(found[name], torch.eye(zoo.INTERMEDIATE))
    assert [text.split(":")[0] for text in progress.messages] == [name]
    others = [n for n in found if n != name]
    assert all(bool((norms[n] != 1).any()) and not torch.equal(found[n], torch.eye(len(found[n]))) for n in others)


@pytest.mark.slow
def test_an_expert_that_no_token_reaches_is_pruned_by_size_with_an_update():
    model, _ = unstacked("mixtral")
    starve(model, 2)
    name = f"{NAMES[0]}.2.down_proj"
    config = config_from({"importance": "wanda"}, "sparsegpt")
    dense = linear_module(model, name).weight.detach().clone()
    compile_model(model, config=config, ids=zoo.token_ids(4))
    expected = dense * top_n_mask(dense.abs().t(), PATTERN).t()
    assert torch.allclose(linear_module(model, name).weight, expected, atol=1e-6)
