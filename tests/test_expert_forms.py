"""Experts that are stored, or called, in other ways than most: transposed, or with an input for each of them."""

import pytest
import torch
from torch import nn

from benchmarks.architectures import tiny
from benchmarks.architectures.trial import difference, outputs
from permtriton import config_from
from permtriton.checkpoint.export import export
from permtriton.data.samples import Samples
from permtriton.driver.pipeline import compile_model
from permtriton.methods.measure.statistics import channel_norms
from permtriton.model.experts import input_dim, restack_experts, unstack_experts, unstacked_experts
from permtriton.model.nm_checks import check_weight
from permtriton.running.layer_walk import LayerWalk
from permtriton.util.progress import NoProgress

from .expert_stacks import PATTERN, Holder
from .zoo import find_plan

STACKS = {
    "GptOssForCausalLM": ("experts.gate_up_proj", "experts.down_proj"),
    "Llama4ForCausalLM": ("experts.gate_up_proj", "experts.down_proj"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AfmoeForCausalLM", "SwitchTransformersForConditionalGeneration"])
def test_a_router_that_is_a_linear_stays_dense(name):
    plan = find_plan(tiny.build(name), PATTERN)
    routers = {linear for linear, reason in plan.skipped.items() if "a router" in reason}
    assert routers
    assert all(".router." in linear for linear in routers)


def test_a_module_with_a_mark_and_another_stack_is_no_experts():
    """Such as a convolution of a model's own code."""
    layer = nn.Conv1d(4, 8, 3)
    layer.has_bias = True
    assert input_dim(nn.ModuleDict({"conv": layer}), "conv.weight") == 2


@pytest.mark.soak
@pytest.mark.slow
def test_compiled_saved_and_packed(soak, tmp_path):
    for name in STACKS if soak else ["Llama4ForCausalLM"]:
        _compile_and_reload(name, "fused" if name == "Llama4ForCausalLM" else "portable", tmp_path / name)


def _compile_and_reload(name, layout, folder):
    folder.mkdir()
    model = tiny.build(name)
    config = config_from({"layout": layout}, "heuristic,mask")
    compiled = compile_model(model, None, config, ids=tiny.inputs(model))
    stacks = [key for key, parameter in model.named_parameters() if key.endswith(STACKS[name])]
    assert len(stacks) >= 4
    for key in stacks:
        weight = model.get_parameter(key).detach().movedim(input_dim(model, key), -1)
        check_weight(key, weight.flatten(0, 1), PATTERN)
        assert bool((weight != 0).any(-1).all())
    frozen = [space.name for space in compiled.plan.spaces if space.frozen]
    assert all(name.endswith("gate_up_proj") for name in frozen), "in fused, no norm gathers for experts that share one"
    assert bool(frozen) == (layout == "fused")
    compiled.save_pretrained(folder / "saved")
    export(folder / "saved", folder / "packed", "packed")
    reloaded = type(model).from_pretrained(folder / "packed").eval()
    inputs = tiny.inputs(model, samples=2, seed=2)
    assert difference(outputs(model, inputs), outputs(reloaded, inputs)) == 0


@pytest.mark.slow
def test_each_expert_of_its_own_part_has_its_own_statistics():
    model, seen = tiny.build("Llama4ForCausalLM"), []
    model.model.layers = model.model.layers[:1]
    name = "model.layers.0.feed_forward.experts"
    with unstacked_experts(model):
        plan = find_plan(model, PATTERN)
        experts = model.get_submodule(name)
        experts.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        samples = Samples.of(tiny.inputs(model))
        norms = channel_norms(LayerWalk(model, plan, samples, len(samples)), NoProgress())
    parts = seen[0].unflatten(0, (len(experts), -1))
    assert bool((parts == 0).all(-1).any()), "some tokens are not for some expert"
    for number, part in enumerate(parts):
        expected = (part.double().square().sum(0) / len(samples)).sqrt().float()
        assert torch.allclose(norms[f"{name}.{number}.gate_up_proj"], expected, rtol=1e-5)
    router = "model.layers.0.feed_forward.router.weight"
    assert plan.skipped[router] == "weight of a Llama4Router, not of a linear layer"


class _Batched(nn.Module):
    """Experts of which each reads its own part, transposed."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(3, *size)) for size in ((8, 24), (12, 8)))
        self.act_fn, self.scale = nn.SiLU(), scale

    def forward(self, hidden_states):
        gate, up = (hidden_states.view(3, -1, 8) @ self.gate_up_proj).chunk(2, -1)
        return self.scale * ((self.act_fn(gate) * up) @ self.down_proj).view(-1, 8)


def test_only_what_computes_the_same_is_unstacked():
    holder, other = Holder(_Batched()), Holder(_Batched(scale=2.0))
    assert input_dim(holder, "experts.down_proj") == 1
    before = holder.experts.down_proj.clone()
    assert unstack_experts(holder) == {}
    linear = holder.experts.linear(2, "down_proj")
    linear.weight.data = linear.weight.data * 2
    restack_experts(holder)
    assert torch.equal(holder.experts.down_proj[2], before[2] * 2)
    assert torch.equal(holder.experts.down_proj[:2], before[:2])
    assert "other outputs" in unstack_experts(other)["experts.down_proj"]
