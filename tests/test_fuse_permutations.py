"""Where each permutation ends up, and that graph and modules move the same parameters with it."""

import pytest
import torch

from permtriton.checkpoint.plan_entries import permutation_report
from permtriton.passes.edits import PermuteNorm, moves_of
from permtriton.passes.plan import Placement

from . import zoo
from .graphs import built, compiled
from .zoo import fold


def placements(name: str, layout: str) -> dict[str, Placement]:
    case = compiled(name, layout)
    moves = moves_of(case.plan, case.indices)
    assert [move.space for move in moves] == [space.name for space in case.plan.spaces if not space.frozen]
    for move in moves:
        space = next(space for space in case.plan.spaces if space.name == move.space)
        assert [gather.site for gather in move.gathers] == [site.name for site in case.plan.sites_of(space)]
    return {move.space: move.placement for move in moves}


@pytest.mark.slow
def test_placements_of_llama():
    layer = "model.layers.1"
    fused = placements("llama", "fused")
    assert len(fused) == 4 * zoo.LAYERS
    norms = {
        move.space: move.norm for move in moves_of(compiled("llama", "fused").plan, compiled("llama", "fused").indices)
    }
    assert norms[f"{layer}.self_attn.q_proj+k_proj+v_proj"].module == f"{layer}.input_layernorm"
    assert norms[f"{layer}.mlp.gate_proj+up_proj"].module == f"{layer}.post_attention_layernorm"
    assert fused[f"{layer}.self_attn.o_proj"] is Placement.FOLDED
    assert fused[f"{layer}.mlp.down_proj"] is Placement.FOLDED
    assert placements("llama", "portable")["stream"] is Placement.FOLDED
    assert placements("llama", "free")[f"{layer}.self_attn.o_proj"] is Placement.GATHER


def test_a_fold_names_every_parameter_that_moves():
    case = compiled("llama", "fused")
    moves = {move.space: move for move in moves_of(case.plan, case.indices)}
    layer = "model.layers.1"
    assert [fold.parameter for fold in moves[f"{layer}.self_attn.o_proj"].upstream] == [
        f"{layer}.self_attn.v_proj.weight"
    ]
    down = moves[f"{layer}.mlp.down_proj"]
    assert {(fold.parameter, fold.dim) for fold in down.upstream} == {
        (f"{layer}.mlp.{name}_proj.weight", 0) for name in ("gate", "up")
    }
    assert [(fold.parameter, fold.dim) for fold in down.columns] == [(f"{layer}.mlp.down_proj.weight", 1)]
    assert down.edits == (*down.columns, *down.upstream)


@pytest.mark.parametrize(("name", "readers"), [("mixtral", 1), ("qwen3_moe", 1), ("qwen2_moe", 2)])
@pytest.mark.slow
def test_a_router_that_reads_the_norm_is_permuted_with_it(name, readers):
    """The router, and the gate of a shared expert, get their columns permuted; the graph and the modules agree."""
    case, model = compiled(name, "fused"), built(name)
    moves = [m for m in moves_of(case.plan, case.indices) if m.norm and "post_attention_layernorm" in m.norm.module]
    assert [move.norm.module for move in moves] == [
        f"model.layers.{layer}.post_attention_layernorm" for layer in range(zoo.LAYERS)
    ]
    assert [len(move.upstream) for move in moves] == [readers] * zoo.LAYERS
    assert all(isinstance(move.edits[-1], PermuteNorm) for move in moves)
    router = "model.layers.1.mlp.gate.weight"
    before = model.get_parameter(router).detach().clone()
    fold(model, case.plan, case.indices)
    assert torch.equal(model.get_parameter(router), before[:, moves[1].norm.index])


@pytest.mark.parametrize("name", ["bert", "bert_mlm", "olmo2"])
@pytest.mark.slow
def test_a_residual_that_reads_the_same_channels_leads_to_a_gather(name):
    case = compiled(name, "fused")
    found = [move for move in moves_of(case.plan, case.indices) if move.placement is not Placement.FOLDED]
    assert len(found) == 2 * zoo.LAYERS
    for move in found:
        assert move.placement is Placement.GATHER
        assert move.edits == (*move.columns, *move.gathers)
        assert not move.upstream, "what else reads the channels keeps their order"


def test_a_space_that_stays_says_why():
    case = compiled("bert", "portable")
    reports = [permutation_report(case.plan, space) for space in case.plan.spaces]
    kept = [report for report in reports if report["placement"] == "none"]
    assert [report["reason"] for report in kept if report["reason"].startswith("it is an output of the model")]
