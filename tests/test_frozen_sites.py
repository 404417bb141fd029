"""Which sites keep their order, which linears are skipped, and which models are refused."""

import pytest
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from permtriton import NMPattern
from permtriton.errors import ModelError
from permtriton.model.experts import unstacked_experts

from . import zoo
from .kernel_inputs import TWO_FOUR
from .zoo import find_plan


def test_heads_that_hold_no_whole_groups_are_frozen():
    plan = find_plan(zoo.build("llama", head_dim=12), NMPattern(4, 8))
    frozen = {space.name: space.reason for space in plan.spaces}
    for layer in range(zoo.LAYERS):
        reason = frozen.pop(f"model.layers.{layer}.self_attn.o_proj")
        assert reason == "channels may move only inside segments of 12, not a multiple of 8"
    assert set(frozen.values()) == {""}


def test_indivisible_channels_are_refused_or_skipped():
    model = zoo.build("gpt2", n_inner=106)
    reason = "its 106 input channels are not a multiple of 4 (2:4 sparsity)"
    with pytest.raises(ModelError) as refused:
        find_plan(model, TWO_FOUR)
    assert str(refused.value).startswith(f"transformer.h.0-1.mlp.c_proj: {reason}; ")
    assert "`skip_indivisible=True`" in str(refused.value)

    plan = find_plan(model, TWO_FOUR, skip_indivisible=True)
    assert {n for n, r in plan.skipped.items() if r == reason} == {
        f"transformer.h.{layer}.mlp.c_proj" for layer in (0, 1)
    }
    assert "transformer.h.0.mlp.c_proj" not in [linear for _, linear in plan.linears()]
    assert len(plan.sites) == 3 * zoo.LAYERS


def test_a_model_that_the_pattern_fits_nowhere_is_refused():
    with pytest.raises(ModelError, match="no linear layer"):
        find_plan(zoo.build("llama"), NMPattern(3, 24), skip_indivisible=True)


class _TorchConfig(PretrainedConfig):
    model_type = "layers_of_torch"


class _OfTorch(PreTrainedModel):
    """An encoder of ``nn.TransformerEncoderLayer``s, which read the weights of their parts where they run fast."""

    config_class = _TorchConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(zoo.VOCABULARY, zoo.HIDDEN)
        layer = nn.TransformerEncoderLayer(zoo.HIDDEN, zoo.HEADS, zoo.INTERMEDIATE, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, zoo.LAYERS, enable_nested_tensor=False)
        self.post_init()

    def forward(self, input_ids, use_cache=None):
        return BaseModelOutput(last_hidden_state=self.encoder(self.embed(input_ids)))


def test_layers_of_torch_get_no_gather_and_the_plan_says_so():
    plan = find_plan(_OfTorch(_TorchConfig()).eval(), TWO_FOUR, layout="fused")
    placements = {site.name: site.space.placement.value for site in plan.sites}
    assert placements == {
        f"encoder.layers.{layer}.{name}": placement
        for layer in range(zoo.LAYERS)
        for name, placement in (("linear1", "none"), ("linear2", "folded"))
    }
    assert "read by another module" in plan.skipped["encoder.layers.0.self_attn.out_proj"]


MLA = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
HYBRIDS = {
    "DeepseekV3": {**MLA, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 48, "first_k_dense_replace": 1},
    "Mamba": {"state_size": 8, "time_step_rank": 4},
    "Mamba2": {"state_size": 8, "head_dim": 16, "num_heads": 8, "n_groups": 2, "chunk_size": 8},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2, "block_auto_adjust_ff_dim": False},
}  # fmt: skip


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.slow(but=["Lfm2"])
def test_latent_attention_and_state_space_layers_are_free(family):
    config = getattr(transformers, f"{family}Config")(**{**zoo.SIZES, **HYBRIDS[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    zoo.randomize(model)
    before = zoo.outputs(model, zoo.token_ids(2, 12))
    with unstacked_experts(model):
        plan = find_plan(model, TWO_FOUR)
        zoo.fold(model, plan, zoo.random_indices(plan))
    assert [space.name for space in plan.spaces if space.frozen] == []
    assert zoo.difference(before, zoo.outputs(model, zoo.token_ids(2, 12))) < 1e-5
