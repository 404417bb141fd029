"""Mixtures with their experts as linears, and a small stack of experts to take apart."""

import copy
import functools

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from permtriton import NMPattern
from permtriton.model.experts import unstack_experts
from permtriton.passes.plan import Plan

from . import zoo
from .zoo import find_plan

PATTERN = NMPattern(2, 4)
EXPERTS = 5
NAMES = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
plain = pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen2_moe", marks=pytest.mark.slow)])


@functools.cache
def _plan(name: str) -> Plan:
    model = zoo.build(name)
    unstack_experts(model)
    return find_plan(model, PATTERN)


def unstacked(name: str):
    """A model with its experts as linears, and its plan; the trace is made once for all tests."""
    model = zoo.build(name)
    unstack_experts(model)
    return model, copy.deepcopy(_plan(name))


class Stack(nn.Module):
    """Experts stored as in transformers, in a class that no library defines."""

    def __init__(self, experts=3, hidden=8, intermediate=12, scale=1.0):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, intermediate))
        self.act_fn, self.scale = ACT2FN["silu"], scale

    def forward(self, hidden_states, top_k_index, top_k_weights):
        rows = []
        for token, index, weights in zip(hidden_states, top_k_index, top_k_weights, strict=True):
            gate, up = (self.gate_up_proj[index] @ token).chunk(2, -1)
            states = self.act_fn(gate) * up
            rows.append(self.scale * weights @ torch.einsum("ehi,ei->eh", self.down_proj[index], states))
        return torch.stack(rows)


class Holder(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts
