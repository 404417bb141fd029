"""Experts that are stored, or called, in other ways than most: transposed, divided among them, sorted by expert."""

import pytest

import permtriton
from benchmarks.architectures import tiny
from benchmarks.architectures.trial import difference, outputs
from permtriton import CompileConfig
from permtriton.checkpoint.export import export
from permtriton.model.checks import check_weight
from permtriton.model.experts import input_dim

from .expert_stacks import PATTERN

STACKS = {
    "GptOssForCausalLM": ("experts.gate_up_proj", "experts.down_proj"),
    "Llama4ForCausalLM": ("experts.gate_up_proj", "experts.down_proj"),
    "JetMoeForCausalLM": ("input_linear.weight", "output_linear.weight"),
}


@pytest.mark.parametrize(("name", "layout"), zip(STACKS, ("portable", "fused", "portable"), strict=True))
def test_compiled_saved_and_packed(name, layout, tmp_path):
    model = tiny.build(name)
    config = CompileConfig.from_options({"permutation": "heuristic", "layout": layout})
    compiled = permtriton.compile(model, None, config, ids=tiny.inputs(model))
    stacks = [key for key, parameter in model.named_parameters() if key.endswith(STACKS[name])]
    assert len(stacks) >= 4
    for key in stacks:
        weight = model.get_parameter(key).detach().movedim(input_dim(model, key), -1)
        check_weight(key, weight.flatten(0, 1), PATTERN)
        assert bool((weight != 0).any(-1).all())
    compiled.save(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "packed", "packed")
    reloaded = type(model).from_pretrained(tmp_path / "packed").eval()
    inputs = tiny.inputs(model, samples=2, seed=2)
    assert difference(outputs(model, inputs), outputs(reloaded, inputs)) == 0
