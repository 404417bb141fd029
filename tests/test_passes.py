"""Every pass on every architecture: graphs that are valid, exact where they must be, and the expected counts."""

from dataclasses import dataclass

import pytest
import torch

from permtriton.kernels import norm_permute
from permtriton.model.checks import relative_difference
from permtriton.passes.graph import absorb_folds
from permtriton.passes.pipeline import permutation_passes, run_passes
from permtriton.passes.plan import linear_module, weight_in_out
from permtriton.passes.weight_folds import moves_of

from . import zoo
from .graphs import BATCH, built, compiled, counted, every_case, mask, planned, private, run
from .zoo import fold

# -- every pass on every architecture ----------------------------------------------------------------------------------


def test_every_graph_is_valid_runs_and_prints():
    case = compiled("gpt2", "fused")
    assert all(bool(output.isfinite().all()) for output in case.outputs)
    for name, text in zip(case.passes, case.printed, strict=True):
        assert "def forward(self, input_ids" in text, name
    words = {
        "insert_permutations": "permute",
        "fuse_permutations": "permute",
        "cancel_permutations": "permute",
        "insert_masks": "nm_mask",
        "lower": "sparse_linear",
    }
    assert case.passes == [*words]
    assert all(f"permtriton.{word}" in text for word, text in zip(words.values(), case.printed, strict=True))


@every_case
def test_exact_passes_leave_the_outputs(name, layout):
    case = compiled(name, layout)
    for number, passed in enumerate(case.passes):
        difference = relative_difference(case.outputs[number], case.outputs[number + 1])
        if passed == "insert_masks":
            assert difference > 1e-2, "the masks do something"
        else:
            assert difference < 1e-5, passed


@dataclass(frozen=True)
class Counts:
    """The permutations left in one layer, and outside all layers.

    Attributes:
        folded: parameters that are permuted, once each along rows or columns.
        outside: those of no layer.
        norms: that write a permuted order.
        gathers: inside ``sparse_linear``.
    """

    folded: int
    norms: int = 0
    gathers: int = 0
    outside: int = 0


# Linears of a layer, and the counts. Of llama, q, k, v, gate, up, o and down move by their columns, v, gate and up by
# their rows; in the stream o and down, too.
EXPECTED: dict[tuple[str, str], tuple[int, Counts]] = {
    ("llama", "fused"): (7, Counts(10, norms=2)),
    ("gpt2", "fused"): (4, Counts(8, norms=2)),
    ("bert", "portable"): (6, Counts(6)),  # the stream is an output
    ("gemma2", "fused"): (7, Counts(10, norms=2)),
    ("phi3", "portable"): (4, Counts(10, outside=3)),
    ("olmo2", "free"): (7, Counts(9, gathers=6)),
    # 4 + 2 per expert; the router's columns move with the norm
    ("mixtral", "portable"): (14, Counts(4 + 10 + 1 + 5 + 1 + 5 + 2 + 1, outside=3)),
}


@every_case
def test_expected_fold_counts(name, layout):
    case = compiled(name, layout)
    linears, counts = EXPECTED[name, layout]
    sparse = zoo.LAYERS * linears
    assert {**counted(case.graph_module), "folded": case.permuted["folded"]} == {
        "folded": zoo.LAYERS * counts.folded + counts.outside,
        "activations": 0,
        "norms": zoo.LAYERS * counts.norms,
        "gathers": zoo.LAYERS * counts.gathers,
        "sparse": sparse,
        "packs": sparse,
        "masks": sparse,
    }


# -- graph and modules -------------------------------------------------------------------------------------------------


@every_case
def test_the_lowered_graph_is_what_the_modules_compute(name, layout):
    """Folding and masking the modules gives the same model as folding and masking the graph."""
    case = compiled(name, layout)
    model = built(name)
    dense = zoo.outputs(model, BATCH)[0]
    fold(model, case.plan, case.indices)
    assert relative_difference(dense, zoo.outputs(model, BATCH)[0]) < 1e-4, "without masks it is the dense model"
    mask(model, case.plan, case.indices, case.importances)
    masked = zoo.outputs(model, BATCH)[0]
    assert relative_difference(dense, masked) > 1e-2
    assert relative_difference(run(case.graph_module), masked) < 1e-4
    for _, linear in case.plan.linears():
        kept = (weight_in_out(linear_module(model, linear)).t() != 0).unflatten(1, (-1, 4)).sum(-1)
        assert bool((kept == 2).all()), linear


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", "free"), ("bert", "free"), ("olmo2", "fused"), ("gpt2", "fused"), ("mixtral", "fused")],
)
def test_run_time_permutations_are_exact_in_float64(name, layout, monkeypatch):
    monkeypatch.setattr(norm_permute.norm_reference, "__defaults__", (None, torch.float64))
    model, plan = built(name).double(), planned(name, layout)[1]
    ids = zoo.token_ids(2, 8)
    with zoo.float32_means_float64():
        before = zoo.outputs(model, ids)
        fold(model, plan, zoo.random_indices(plan, 3))
        after = zoo.outputs(model, ids)
    assert before[0].dtype == torch.float64
    assert zoo.difference(before, after) < 1e-9


@pytest.mark.parametrize(
    ("name", "layout"), [("llama", "fused"), pytest.param("mixtral", "portable", marks=pytest.mark.slow)]
)
def test_two_rounds_compose(name, layout):
    """The base order, then a learned order on top: norms and gathers that permute already take the second one, too."""
    model, plan, graph_module = private(name, layout)
    expected = run(graph_module)
    counts = []
    for seed in (0, 50):
        indices = zoo.random_indices(plan, seed)
        graph_module = run_passes(graph_module, permutation_passes(moves_of(plan, indices)))
        fold(model, plan, indices)
        graph_module = absorb_folds(graph_module)
        counts.append(counted(graph_module))
        assert relative_difference(expected, run(graph_module)) < 1e-5
        assert relative_difference(expected, zoo.outputs(model, BATCH)[0]) < 1e-4
    assert counts[0] == counts[1]
    assert counts[0]["folded"] == 0
