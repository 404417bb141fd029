"""Where each permutation ends up, and that graph and modules move the same parameters with it."""

import pytest

from permtriton.checkpoint.plan_entries import permutation_report
from permtriton.passes.weight_folds import moves_of

from .graphs import compiled


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


@pytest.mark.slow
def test_a_space_that_stays_says_why():
    case = compiled("bert", "portable")
    reports = [permutation_report(case.plan, space) for space in case.plan.spaces]
    kept = [report for report in reports if report["placement"] == "none"]
    assert [report["reason"] for report in kept if report["reason"].startswith("it is an output of the model")]
