"""What the fusing pass decided, and why."""

import pytest
import torch

from permtriton.passes.fold import fold
from permtriton.passes.fuse_permutations import DECISIONS

from . import zoo
from .graphs import built, compiled


def decisions(name: str, layout: str) -> dict[str, str]:
    case = compiled(name, layout)
    found = case.graph_module.meta[DECISIONS]
    assert [decision.space for decision in found] == [space.name for space in case.plan.spaces]
    for decision in found:
        space = next(space for space in case.plan.spaces if space.name == decision.space)
        assert decision.sites == tuple(site.name for site in case.plan.sites_of(space))
    return {decision.space: decision.where for decision in found}


def test_decisions_of_llama():
    layer = "model.layers.1"
    fused = decisions("llama", "fused")
    assert len(fused) == 4 * zoo.LAYERS
    assert fused[f"{layer}.self_attn.q_proj+k_proj+v_proj"] == f"in the norm {layer}.input_layernorm"
    assert fused[f"{layer}.mlp.gate_proj+up_proj"] == f"in the norm {layer}.post_attention_layernorm"
    assert fused[f"{layer}.self_attn.o_proj"] == "folded into 1 parameters"
    assert fused[f"{layer}.mlp.down_proj"] == "folded into 2 parameters"
    assert decisions("llama", "portable")["stream"].startswith("folded into ")
    free = decisions("llama", "free")[f"{layer}.self_attn.o_proj"]
    assert free.startswith(f"a gather before {layer}.self_attn.o_proj: ")


@pytest.mark.parametrize(("name", "readers"), [("mixtral", 1), ("qwen3_moe", 1), ("qwen2_moe", 2)])
def test_a_router_that_reads_the_norm_is_permuted_with_it(name, readers):
    """The router, and the gate of a shared expert, get their columns permuted; the graph and the modules agree."""
    found = [where for where in decisions(name, "fused").values() if "post_attention_layernorm" in where]
    assert found == [
        f"in the norm model.layers.{layer}.post_attention_layernorm, with the columns of {readers} other readers"
        for layer in range(zoo.LAYERS)
    ]
    case, model = compiled(name, "fused"), built(name)
    router = "model.layers.1.mlp.gate.weight"
    before = model.get_parameter(router).detach().clone()
    fold(model, case.plan, case.indices)
    (index,) = [
        case.indices[s.name] for s in case.plan.sites if s.norm and s.norm.module.endswith("1.post_attention_layernorm")
    ]
    assert torch.equal(model.get_parameter(router), before[:, index])


@pytest.mark.parametrize("name", ["bert", "bert_mlm", "olmo2"])
def test_a_residual_that_reads_the_same_channels_leads_to_a_gather(name):
    found = [where for where in decisions(name, "fused").values() if not where.startswith("folded")]
    assert len(found) == 2 * zoo.LAYERS
    for where in found:
        assert where.startswith("a gather before ")
        assert where.endswith(": what else reads its channels keeps their order")


def test_a_space_that_stays_says_why():
    found = decisions("bert", "portable")
    assert [where for where in found.values() if where.startswith("no permutation: it is an output of the model")]
