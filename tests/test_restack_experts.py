"""The original modules of stacked experts come back, with what changed, after errors and interrupts too."""

import copy

import pytest
import torch
from torch import nn

from permtriton.model import expert_linears, experts
from permtriton.model.experts import (
    UnstackedExperts,
    restack_experts,
    unstack_experts,
    unstacked_experts,
)

from . import zoo
from .expert_stacks import NAMES, Holder, Stack, unstacked


def test_restacking_restores_the_original_modules():
    model = zoo.build("mixtral")
    modules = [model.get_submodule(owner) for owner in NAMES]
    parameters = dict(model.named_parameters())
    values = copy.deepcopy(model.state_dict())
    unstack_experts(model)
    restack_experts(model)
    assert all(model.get_submodule(owner) is module for owner, module in zip(NAMES, modules, strict=True))
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(values) == list(model.state_dict())
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())


def test_restacking_keeps_what_changed():
    """Learning gives weights a new storage, masks and folds write into the one they have."""
    model, _ = unstacked("mixtral")
    ids = zoo.token_ids(2)
    dense = zoo.outputs(model, ids)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("3.gate_up_proj.weight") or name.endswith("1.down_proj.weight"):
                parameter.data = parameter.data.t().contiguous().t()
                parameter.mul_(0.5)
    before = zoo.outputs(model, ids)
    assert zoo.difference(dense, before) > 1e-3
    restack_experts(model)
    assert all(p.is_contiguous() for p in model.parameters())
    assert zoo.difference(before, zoo.outputs(model, ids)) <= 1e-5


class _Interrupted:
    """Calls a function of `experts` or `expert_linears`, but raises in place of, or just after, one of the calls."""

    def __init__(self, monkeypatch, name, number, after=False):
        module = next(each for each in (experts, expert_linears) if hasattr(each, name))
        self._function, self._left, self._after = getattr(module, name), number, after
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args):
        self._left -= 1
        if self._left == 0 and not self._after:
            raise KeyboardInterrupt
        result = self._function(*args)
        if self._left == 0:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize(
    ("name", "number", "after"),
    [
        ("_mismatch", 2, False),
        ("_release", 2, True),
        ("_assign", 1, True),
    ],
)
@pytest.mark.slow
def test_an_interrupt_while_unstacking_leaves_the_model(monkeypatch, name, number, after):
    model, ids = zoo.build("mixtral"), zoo.token_ids(2)
    modules, parameters, before = list(model.modules()), dict(model.named_parameters()), zoo.outputs(model, ids)
    values = copy.deepcopy(model.state_dict())
    with monkeypatch.context() as patch:
        _Interrupted(patch, name, number, after)
        with pytest.raises(KeyboardInterrupt), unstacked_experts(model):
            pytest.fail("it was not interrupted")
    assert list(model.modules()) == modules
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())
    assert zoo.difference(before, zoo.outputs(model, ids)) == 0
    assert unstack_experts(model).names == NAMES, "and it may be tried again"


@pytest.mark.parametrize(("name", "number", "after"), [("_stack", 2, True), ("_assign", 1, False)])
@pytest.mark.slow
def test_an_interrupt_while_restacking_loses_nothing(monkeypatch, name, number, after):
    model, _ = unstacked("mixtral")
    ids = zoo.token_ids(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter * 1.01
    before = zoo.outputs(model, ids)
    with monkeypatch.context() as patch:
        _Interrupted(patch, name, number, after)
        with pytest.raises(KeyboardInterrupt):
            restack_experts(model)
    assert zoo.difference(before, zoo.outputs(model, ids)) <= 1e-5
    restack_experts(model)
    assert not any(isinstance(module, UnstackedExperts) for module in model.modules())
    assert zoo.difference(before, zoo.outputs(model, ids)) <= 1e-5


def test_an_error_inside_leaves_the_original_modules():
    model = zoo.build("mixtral")
    with pytest.raises(ZeroDivisionError), unstacked_experts(model):
        raise ZeroDivisionError
    assert not any(isinstance(module, UnstackedExperts) for module in model.modules())


def test_a_module_that_two_layers_share_stays_shared():
    stack = Stack()
    model = nn.ModuleList([Holder(stack), Holder(stack)])
    unstack_experts(model)
    assert model[0].experts is model[1].experts
    assert isinstance(model[0].experts, UnstackedExperts)
    restack_experts(model)
    assert model[0].experts is stack
    assert model[1].experts is stack
