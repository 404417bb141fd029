"""The original modules of stacked experts come back, with what changed, after errors and interrupts too."""

import copy

import pytest
import torch
from torch import nn

from permtriton.model.experts import UnstackedExperts, restack_experts, unstack_experts, unstacked_experts

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
