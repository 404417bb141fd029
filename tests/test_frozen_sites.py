"""Which sites keep their order, which linears are skipped, and which models are refused."""

import pytest

from permtriton import NMPattern, find_plan
from permtriton.errors import ModelError

from . import zoo
from .kernel_inputs import TWO_FOUR


def test_a_stream_that_is_an_output_keeps_its_order_and_the_rest_moves():
    plan = zoo.planned("bert")[1]
    assert {space.name: bool(space.frozen) for space in plan.spaces} == {
        "stream": True,
        "encoder.layer.0.attention.output.dense": False,
        "encoder.layer.0.output.dense": False,
        "encoder.layer.1.attention.output.dense": False,
        "encoder.layer.1.output.dense": False,
    }


def test_heads_that_hold_no_whole_groups_are_frozen():
    plan = find_plan(zoo.build("llama", head_dim=12), NMPattern(4, 8))
    frozen = {space.name: space.reason for space in plan.spaces}
    for layer in range(zoo.LAYERS):
        reason = frozen.pop(f"model.layers.{layer}.self_attn.o_proj")
        assert reason == "channels may move only inside segments of 12, not a multiple of 8"
    assert set(frozen.values()) == {""}


@pytest.mark.parametrize(
    ("name", "changes", "layer", "channels"),
    [
        ("llama", {"intermediate_size": 110}, "model.layers.0.mlp.down_proj", 110),
        ("gpt2", {"n_inner": 106}, "transformer.h.0.mlp.c_proj", 106),
    ],
)
def test_indivisible_channels_are_refused_or_skipped(name, changes, layer, channels):
    model = zoo.build(name, **changes)
    reason = f"its {channels} input channels are not a multiple of 4 (2:4 sparsity)"
    with pytest.raises(ModelError) as refused:
        find_plan(model, TWO_FOUR)
    assert str(refused.value).startswith(f"{layer}: {reason}; ")
    assert "--skip-indivisible" in str(refused.value)

    plan = find_plan(model, TWO_FOUR, skip_indivisible=True)
    assert {n for n, r in plan.skipped.items() if r == reason} == {layer, layer.replace(".0.", ".1.")}
    assert layer not in [linear for _, linear in plan.linears()]
    assert len(plan.sites) == 3 * zoo.LAYERS


def test_a_model_that_the_pattern_fits_nowhere_is_refused():
    with pytest.raises(ModelError, match="no linear layer"):
        find_plan(zoo.build("llama"), NMPattern(3, 24), skip_indivisible=True)


def test_a_model_that_needs_more_than_token_ids_is_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=zoo.VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="T5ForConditionalGeneration cannot be traced"):
        find_plan(T5ForConditionalGeneration(config).eval(), TWO_FOUR)


def test_a_linear_that_writes_its_product_as_a_matmul_is_found():
    """Falcon's linears compute ``x @ weight.T``."""
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(**zoo.SIZES, new_decoder_architecture=False, parallel_attn=False, bias=False)
    plan = find_plan(FalconForCausalLM(config).eval(), TWO_FOUR)
    assert "transformer.h.0.mlp.dense_4h_to_h" in [linear for _, linear in plan.linears()]


def test_a_linear_that_runs_is_not_called_unused():
    """Mamba's dt_proj computes ``weight @ x``: it runs, so the reason must not say that it does not."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=zoo.VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    plan = find_plan(MambaForCausalLM(config).eval(), TWO_FOUR)
    assert "not used" not in plan.skipped["backbone.layers.0.mixer.dt_proj"]
