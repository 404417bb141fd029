"""The graph with the relaxation in it learns as the learner does."""

import pytest
import torch
from torch import fx

from benchmarks.known_run import Known
from permtriton.data.samples import Samples
from permtriton.methods.compile_config import CompileConfig
from permtriton.methods.measure.objective import Objective
from permtriton.methods.order.learned import Learned as Options
from permtriton.methods.order.learned import OrderTrainer
from permtriton.methods.order.masked_model import masked_model
from permtriton.methods.order.relaxation import Relaxation
from permtriton.model.checks import relative_difference
from permtriton.model.forward import cosine_loss, last_hidden_state
from permtriton.passes.edits import moves_of
from permtriton.passes.graph import (
    NM_MASK,
    absorb_folds,
    copied,
    is_index,
)
from permtriton.passes.insert_masks import insert_masks
from permtriton.passes.pipeline import permutation_passes, run_passes
from permtriton.util.permutation import identity

from . import zoo
from .graphs import BATCH, PATTERN, planned, private, random_importances, run, traced
from .insert_relaxation import insert_relaxation
from .zoo import fold

OPTIONS = Options(block_size=16, batch_size=1, epochs=2, init_noise=3.0)
CONFIG = CompileConfig(sparsity=PATTERN, micro_batch_size=1)


def ancestors(node: fx.Node) -> set[object]:
    found, waiting = set(), [node]
    while waiting:
        for before in waiting.pop().all_input_nodes:
            if before not in found:
                found.add(before)
                waiting.append(before)
    return {node.target for node in found}


class Gradients:
    """An optimizer that only records gradients."""

    def __init__(self, relaxation: Relaxation) -> None:
        self.param_groups: list[dict[str, float]] = [{}]
        self.relaxation, self.found = relaxation, {}

    def step(self) -> None:
        self.found = {name: p.grad.clone() for name, p in self.relaxation.named_parameters()}

    def zero_grad(self, **_options: object) -> None:
        self.relaxation.zero_grad()


@pytest.mark.parametrize(
    ("name", "layout"), [("phi3", "fused"), pytest.param("gpt2", "portable", marks=pytest.mark.slow)]
)
def test_the_learning_graph_learns_as_the_trainer_does(name, layout, monkeypatch):
    model, plan, graph_module = private(name, layout)
    with torch.no_grad():
        target = last_hidden_state(model, Samples.of(BATCH))
    base = zoo.random_indices(plan)
    graph_module = run_passes(graph_module, permutation_passes(moves_of(plan, base)))
    fold(model, plan, base)
    if layout == "portable":
        with torch.no_grad():
            target = last_hidden_state(model, Samples.of(BATCH))
    importances = random_importances(plan, model)
    spaces = OPTIONS.spaces(plan)
    relaxation = OPTIONS.relaxation(spaces, 0, torch.device("cpu"))
    masked = insert_masks(absorb_folds(graph_module), plan=plan, importances=importances)
    learning = insert_relaxation(masked, plan=plan, spaces=spaces, relaxation=relaxation, tau=OPTIONS.tau_start)
    learning.graph.eliminate_dead_code()
    learning.graph.lint()
    learning.recompile()

    sinkhorn, assignment = torch.ops.permtriton.sinkhorn.default, torch.ops.permtriton.assignment.default
    masks = [node for node in learning.graph.nodes if node.target is NM_MASK]
    assert len(masks) == len(list(plan.linears()))
    for node in masks:
        assert {sinkhorn, assignment} <= ancestors(node.args[5])
        assert sinkhorn in ancestors(node.args[6])
        assert assignment not in ancestors(node.args[6])
    own = {id(buffer) for buffer in learning.buffers()}
    assert all(id(parameter) in own for parameter in relaxation.parameters()), "shared, not copied"

    loss = cosine_loss(learning(BATCH)[traced(name)[1].hidden], target)
    loss.backward()
    found = {parameter: p.grad.clone() for parameter, p in relaxation.named_parameters()}
    model.zero_grad()
    relaxation.zero_grad()
    optimizer = Gradients(relaxation)
    monkeypatch.setattr(torch.optim, "AdamW", lambda *_, **__: optimizer)
    run_of = {"importances": importances, "objective": Objective("cosine", target)}
    known = Known(model, plan, Samples.of(BATCH), CONFIG, **run_of)
    with masked_model(known, model, relaxation) as masks:
        trainer = OrderTrainer(known, OPTIONS, model, masks, relaxation)
        indices = trainer.indices(0)
        expected = trainer.step(torch.tensor([0]), 0)
    assert any(not torch.equal(index, identity(index.numel())) for index in indices.values()), "something moves"
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    for parameter, gradient in optimizer.found.items():
        assert float(gradient.abs().max()) > 0, parameter
        assert relative_difference(gradient, found[parameter]) < 1e-3, parameter


def test_only_the_spaces_that_learn_are_relaxed():
    model, plan, graph_module = planned("llama", "fused")
    options = Options(block_size=16, layers="last:1")
    spaces = options.spaces(plan)
    relaxation = options.relaxation(spaces, 0, torch.device("cpu"))
    masked = insert_masks(copied(graph_module), plan=plan, importances=random_importances(plan, model))
    learning = insert_relaxation(masked, plan=plan, spaces=spaces, relaxation=relaxation, tau=1.0)
    learning.graph.eliminate_dead_code()
    learning.recompile()
    constant = [is_index(node.args[5]) for node in learning.graph.nodes if node.target is NM_MASK]
    assert constant.count(True) == 7, "the first layer's order is constant"
    assert bool(run(learning).isfinite().all())
