"""The published gradient is that of dense permutation matrices; no gradient depends on how the batch is divided."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from permtriton.methods.order.learned import Learned as Options
from permtriton.passes.plan import linear_module
from permtriton.util.permutation import moved

from .learning import PATTERN, QUICK, Problem, tiny


class GradientKeeper:
    """Replaces the optimizer: records the gradients of the first step and changes nothing."""

    def __init__(self, parameters: Iterator[Tensor], **_options: object) -> None:
        self.parameters, self.gradients = list(parameters), []
        self.param_groups = [{"lr": 0.0}]

    def state_dict(self) -> dict[str, dict]:
        return {"state": {}}

    def step(self) -> None:
        if not self.gradients:
            self.gradients = [parameter.grad.clone() for parameter in self.parameters]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def gradients(problem: Problem, options: Options, monkeypatch, seed: int = 0, **running) -> list[Tensor]:
    """The gradients of every logit and scale in the first step of `learn`, all sequences in one batch."""
    keepers = []
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: keepers.append(GradientKeeper(*a, **k)) or keepers[-1])
    problem.learn(replace(options, epochs=1, batch_size=len(problem.ids)), seed, **running)
    return keepers[0].gradients


def assert_close_gradients(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert float(other.abs().max()) > 0
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max())


@pytest.mark.parametrize("micro", [3])
def test_micro_batches_add_up(problem, monkeypatch, micro):
    whole = gradients(problem, QUICK, monkeypatch, micro_batch_size=8)
    parts = gradients(problem, QUICK, monkeypatch, micro_batch_size=micro)
    assert_close_gradients(parts, whole, 1e-4)


def test_micro_batches_learn_alike(problem):
    options = replace(QUICK, batch_size=8, epochs=1, init="random")
    runs = [problem.learn(options, micro_batch_size=micro).history for micro in (1, 8)]
    assert [epoch.loss for epoch in runs[0]] == pytest.approx([epoch.loss for epoch in runs[1]], rel=0.05)


def test_activation_checkpointing_changes_nothing(problem, monkeypatch):
    on = gradients(problem, QUICK, monkeypatch, activation_checkpointing=True, micro_batch_size=8)
    off = gradients(problem, QUICK, monkeypatch, activation_checkpointing=False, micro_batch_size=8)
    assert_close_gradients(on, off, 1e-5)


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """Has the value of ``value`` and the gradient of ``gradient_of``."""
    return value.detach() + gradient_of - gradient_of.detach()


def dense_permutation(units: int, blocks: list[tuple[int, Tensor]], copies: Tensor) -> Tensor:
    """The whole ``[channels, channels]`` matrix: blocks of units on the diagonal, once for each copy of the units.

    Args:
        units: of the space.
        blocks: (first unit, soft matrix).
        copies: ``[units, copies]``, the channels of each unit.
    """
    unit_matrix = blocks[0][1].new_zeros(units, units)
    for start, matrix in blocks:
        there = torch.arange(start, start + matrix.shape[0])
        unit_matrix = unit_matrix.index_put((there[:, None], there[None, :]), matrix)
    whole = unit_matrix.new_zeros(copies.numel(), copies.numel())
    for channels in copies.T:
        whole = whole.index_put((channels[:, None], channels[None, :]), unit_matrix)
    return whole


def dense_weight(weight: Tensor, importance, soft: Tensor, index: Tensor) -> Tensor:
    """The masked weight by dense products, with the rules that `permtriton.kernels.nm_mask` states.

    Args:
        weight: ``[out, channels]``.
        importance: of it.
        soft: the whole soft permutation, ``[channels, channels]``.
        index: the hard one.
    """
    hard = torch.zeros_like(soft)
    hard[index, torch.arange(index.numel())] = 1
    matrix = straight_through(hard, soft)
    scores = importance.scores(weight.t()).t().to(soft.dtype) @ matrix
    grouped = scores.unflatten(1, (-1, PATTERN.group))
    top = torch.zeros_like(grouped).scatter_(2, grouped.topk(PATTERN.kept, dim=2).indices, 1.0).flatten(1)
    mask_soft = grouped.softmax(2).flatten(1)
    return weight.detach() * straight_through(top @ hard.T, mask_soft @ matrix.T)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("wanda", {}),
        pytest.param("ria", {"init": "random", "clamp": 1.0}, marks=pytest.mark.slow),
        pytest.param("obs", {"sinkhorn_rounds": 0}, marks=pytest.mark.slow),
        pytest.param("wanda", {"block_size": 4096}, marks=pytest.mark.slow),
    ],
)
def test_gradient_is_that_of_dense_permutation_matrices(monkeypatch, method, changes):
    exact = Problem(tiny(dtype=torch.float64), method=method)
    options = replace(QUICK, gradient="published", **changes)
    found = gradients(exact, options, monkeypatch, seed=5, micro_batch_size=8)

    relaxation = options.relaxation(options.spaces(exact.plan), 5, torch.device("cpu"))
    soft = relaxation.soft(options.tau_start)
    indices = relaxation.by_space(relaxation.assign(soft))
    assert any(moved(index) for index in indices.values()) or options.init == "identity"
    weights = {}
    for site, name in exact.plan.linears():
        space = site.space
        blocks = []
        for start, _ in space.blocks(options.block_size):
            place, row = relaxation.position(space, start)
            blocks.append((start, soft[place][row].double()))
        copies = torch.stack([(site.units == unit).nonzero().flatten() for unit in range(space.units)])
        matrix = dense_permutation(space.units, blocks, copies)
        index = torch.empty(site.channels, dtype=torch.int64)
        for channels in copies.T:
            index[channels] = channels[indices[space.name]]
        weight = linear_module(exact.model, name).weight
        weights[name] = dense_weight(weight, exact.importances[name], matrix, index)
    exact.loss(weights).backward()
    assert_close_gradients(found, [parameter.grad for parameter in relaxation.parameters()], 1e-4)
