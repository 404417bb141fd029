"""Folding permutations into parameters leaves what a model computes as it was, and can be undone."""

import copy

import pytest
import torch
from torch import Tensor, nn

from permtriton.data.samples import Samples
from permtriton.model.forward import last_hidden_state
from permtriton.passes.plan import Destination
from permtriton.util.permutation import compose

from . import zoo
from .zoo import fold

QUICK = ("llama", "phi3", "gpt2", "bert_mlm")
ARCHITECTURES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in zoo.TELLING]


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_stay_in_float64(name):
    model, plan = zoo.planned(name)
    model.double()
    with zoo.float32_means_float64():
        before = zoo.outputs(model, zoo.token_ids())
        fold(model, plan, zoo.random_indices(plan, 0))
        after = zoo.outputs(model, zoo.token_ids())
    assert before[0].dtype == torch.float64
    assert zoo.difference(before, after) < 1e-9


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_space_matters_alone(name):
    """Each space is folded alone, so that two errors cannot cancel."""
    model, plan = zoo.planned(name)
    model.double()
    with zoo.float32_means_float64():
        before = zoo.outputs(model, zoo.token_ids(2, 8))
        for space_name, index in zoo.random_indices(plan).items():
            folded = copy.deepcopy(model)
            fold(folded, plan, {space_name: index})
            assert zoo.difference(before, zoo.outputs(folded, zoo.token_ids(2, 8))) < 1e-9, space_name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_exactly_the_planned_parameters_change(name):
    model, plan = zoo.planned(name)
    indices, before = zoo.random_indices(plan), parameters_of(model)
    fold(model, plan, indices)
    planned_to_change = {axis.parameter for space in plan.spaces if not space.frozen for axis in space.axes}
    changed = {n for n, parameter in model.named_parameters() if not torch.equal(parameter, before[n])}
    assert changed == planned_to_change
    assert {f"{linear}.weight" for site, linear in plan.linears() if not site.space.reason} <= changed


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_two_folds_are_the_fold_of_their_composition(name):
    model, plan = zoo.planned(name)
    once = copy.deepcopy(model)
    first, second = zoo.random_indices(plan, 0), zoo.random_indices(plan, 100)
    fold(model, plan, first)
    fold(model, plan, second)
    fold(once, plan, {space: compose(first[space], second[space]) for space in first})
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(parameter, once.get_parameter(parameter_name)), parameter_name


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert_mlm"])
@torch.no_grad()
def test_the_hidden_state_comes_out_in_the_order_of_its_index(name):
    model, plan = zoo.planned(name)
    index = zoo.random_index(plan.hidden_site.space)
    before = last_hidden_state(model, Samples.of(zoo.token_ids()))
    fold(model, plan, {"stream": index})
    after = last_hidden_state(model, Samples.of(zoo.token_ids()))
    assert not torch.allclose(after, before, atol=1e-2)
    torch.testing.assert_close(after, before[..., index], rtol=1e-4, atol=1e-4)


def test_rows_follow_the_convention():
    """``rows_new[j] = rows_old[index[j]]`` and ``W_new[:, j] = W[:, index[j]]``."""
    model, plan = zoo.planned("llama")
    name = "model.layers.1.mlp.down_proj"
    space = next(space for space in plan.spaces if space.name == name)
    before, index = parameters_of(model), zoo.random_index(space)
    fold(model, plan, {name: index})
    for producer in ("gate_proj", "up_proj"):
        parameter = f"model.layers.1.mlp.{producer}.weight"
        assert torch.equal(model.get_parameter(parameter), before[parameter][index])
    assert torch.equal(model.get_parameter(f"{name}.weight"), before[f"{name}.weight"][:, index])


# -- what must not be folded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "bert"])
def test_a_move_across_heads_changes_outputs(name):
    """Channels must stay in their segments, and these tests see a fold that ignores that."""
    model, plan = zoo.planned(name)
    space = next(space for space in plan.spaces if len(space.segments) > 1 and not space.frozen)
    index, head = torch.arange(space.units), space.segments[0]
    index[[0, head]] = index[[head, 0]]
    before = zoo.outputs(model, zoo.token_ids())
    fold(model, plan, {space.name: index})
    assert zoo.difference(before, zoo.outputs(model, zoo.token_ids())) > 1e-3


def test_a_frozen_space_is_refused_and_would_change_outputs():
    model, plan = zoo.planned("bert")
    space = plan.hidden_site.space
    index = {"stream": torch.arange(space.units).flip(0)}
    before, parameters = zoo.outputs(model, zoo.token_ids()), parameters_of(model)
    with pytest.raises(AssertionError, match="it is an output of the model"):
        fold(model, plan, index)
    assert all(torch.equal(parameter, parameters[n]) for n, parameter in model.named_parameters())
    space.placement = Destination.FOLDED
    fold(model, plan, index)
    assert zoo.difference(before, zoo.outputs(model, zoo.token_ids())) > 1e-3


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.slow
def test_every_axis_is_needed(name):
    """Leaving any one axis out of a fold changes the outputs, so the plan lists none without need."""
    model, plan = zoo.planned(name)
    ids = zoo.token_ids(2, 8)
    before = zoo.outputs(model, ids)
    for space in [space for space in plan.spaces if not space.frozen][:3]:
        index, axes = zoo.random_index(space), space.axes
        for left_out in axes:
            space.axes = tuple(axis for axis in axes if axis is not left_out)
            folded = copy.deepcopy(model)
            fold(folded, plan, {space.name: index})
            changed = zoo.difference(before, zoo.outputs(folded, ids)) > 1e-4
            assert changed, f"{left_out.parameter}[{left_out.dim}]"
        space.axes = axes
