"""Experts as linears: the same function, the plan that follows from it, what is refused, and the whole pipeline."""

import pytest
import torch
from torch import nn

from permtriton.model.experts import UnstackedExperts, input_dim, restack_experts, stacked_name, unstack_experts
from permtriton.model.routing import Routing

from . import zoo
from .expert_stacks import EXPERTS, NAMES, Holder, Stack, plain, unstacked
from .zoo import fold

# -- the same function -------------------------------------------------------------------------------------------------


@plain
@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [("eager", torch.float64, 1e-9), ("eager", torch.float32, 1e-5), ("grouped_mm", torch.float32, 1e-5)],
)
def test_outputs_stay(name, implementation, dtype, tolerance):
    ids = zoo.token_ids(3)
    model = zoo.build(name, experts_implementation=implementation).to(dtype)
    before = zoo.outputs(model, ids)
    assert unstack_experts(model) == {}
    assert sum(isinstance(module, UnstackedExperts) for module in model.modules()) == 2
    assert zoo.difference(before, zoo.outputs(model, ids)) <= tolerance


def test_weights_are_shared_and_nothing_is_copied():
    model = zoo.build("mixtral")
    stacked = {name: p.untyped_storage().data_ptr() for name, p in model.named_parameters() if p.ndim == 3}
    total = sum(p.numel() for p in model.parameters())
    original = model.get_submodule(NAMES[0])
    unstack_experts(model)
    assert sum(p.untyped_storage().size() for p in original.parameters()) == 0, "when the linears let go, it is free"
    assert sum(p.numel() for p in model.parameters()) == total
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            at = stacked[stacked_name(model, name.removesuffix(".weight"))]
            assert parameter.untyped_storage().data_ptr() == at
    restack_experts(model)
    assert stacked == {name: p.untyped_storage().data_ptr() for name, p in model.named_parameters() if p.ndim == 3}


class _Plain(Stack):
    """Experts without a gate, stored transposed, with biases."""

    is_transposed, has_gate, has_bias = True, False, True

    def __init__(self, experts=3, hidden=8, intermediate=12):
        super().__init__()
        del self.gate_up_proj
        self.up_proj = nn.Parameter(torch.randn(experts, hidden, intermediate))
        self.up_proj_bias = nn.Parameter(torch.randn(experts, intermediate))
        self.down_proj = nn.Parameter(torch.randn(experts, intermediate, hidden))
        self.down_proj_bias = nn.Parameter(torch.randn(experts, hidden))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        up = torch.einsum("th,tkhi->tki", hidden_states, self.up_proj[top_k_index]) + self.up_proj_bias[top_k_index]
        down = torch.einsum("tki,tkih->tkh", self.act_fn(up), self.down_proj[top_k_index])
        return (top_k_weights[..., None] * (down + self.down_proj_bias[top_k_index])).sum(1)


def test_experts_come_back_transposed_with_their_biases():
    holder = Holder(_Plain())
    before = {name: parameter.clone() for name, parameter in holder.named_parameters()}
    assert unstack_experts(holder) == {}
    assert tuple(holder.experts.linear(0, "up_proj").weight.shape) == (12, 8)
    holder.experts.linear(1, "up_proj").weight.data = holder.experts.linear(1, "up_proj").weight.data.clone() * 2
    holder.experts.linear(2, "down_proj").bias.data += 1
    restack_experts(holder)
    before["experts.up_proj"][1] *= 2
    before["experts.down_proj_bias"][2] += 1
    assert all(torch.equal(before[name], parameter) for name, parameter in holder.named_parameters())
    assert input_dim(holder, "experts.up_proj") == 1


# -- the plan ----------------------------------------------------------------------------------------------------------


@plain
def test_each_expert_has_its_own_permutation(name):
    _, plan = unstacked(name)
    for owner in NAMES:
        for number in range(EXPERTS):
            (site,) = (s for s in plan.sites if s.linears == (f"{owner}.{number}.down_proj",))
            assert site.space.segments == (site.channels,)
            assert not site.space.frozen
            assert plan.sites_of(site.space) == [site]
            assert {(axis.parameter, axis.dim) for axis in site.space.axes} == {
                (f"{owner}.{number}.gate_up_proj.weight", 0),
                (f"{owner}.{number}.down_proj.weight", 1),
            }


@plain
def test_the_experts_and_the_router_read_the_stream(name):
    _, plan = unstacked(name)
    (stream,) = (space for space in plan.spaces if space.name == "stream")
    readers = {axis.parameter for axis in stream.axes if axis.is_input}
    for owner in NAMES:
        first = {f"{owner}.{number}.gate_up_proj" for number in range(EXPERTS)}
        (site,) = (s for s in plan.sites if first & set(s.linears))
        assert first <= set(site.linears)
        assert site.space.name == "stream"
        router = owner.replace("experts", "gate") + ".weight"
        assert router in readers
        assert "not of a linear layer" in plan.skipped[router]
        assert {f"{linear}.weight" for linear in first} <= readers


@plain
def test_folding_leaves_the_outputs(name):
    model, plan = unstacked(name)
    ids, indices = zoo.token_ids(3), zoo.random_indices(plan)
    assert len(indices) > 2 * EXPERTS
    before = zoo.outputs(model, ids)
    fold(model, plan, indices)
    assert zoo.difference(before, zoo.outputs(model, ids)) <= 1e-4
    restack_experts(model)
    assert zoo.difference(before, zoo.outputs(model, ids)) <= 1e-4


def test_names():
    model = zoo.build("mixtral")
    linear = f"{NAMES[1]}.3.gate_up_proj"
    for _ in range(2):
        assert stacked_name(model, linear) == f"{NAMES[1]}.gate_up_proj"
        assert stacked_name(model, "model.layers.1.self_attn.q_proj") is None
        assert stacked_name(model, "model.layers.1.mlp.down_proj") is None
        unstack_experts(model)
    assert stacked_name(zoo.build("llama"), "model.layers.0.mlp.down_proj") is None


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_experts_that_norm_their_output_stay_and_are_reported():
    model = zoo.build("gpt_oss")
    for name in NAMES:
        model.get_submodule(name).has_post_expert_norm = True
    modules = list(model.modules())
    refused = unstack_experts(model)
    assert list(model.modules()) == modules
    reason = refused[f"{NAMES[0]}.gate_up_proj"]
    assert "GptOssExperts" in reason
    assert "norm after each expert" in reason
    assert len(refused) == 4


def _with(**changes):
    stack = Stack()
    for name, value in changes.items():
        setattr(stack, name, value)
    return stack


class _OtherCall(Stack):
    def forward(self, x, routing):
        return x


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Stack(scale=2.0), "other outputs"),
        (lambda: _with(down_proj=nn.Parameter(torch.randn(3, 12, 8))), "do not fit together"),
        (lambda: _with(down_proj=nn.Parameter(torch.randn(4, 8, 12))), "do not fit together"),
        (lambda: _with(down_proj_bias=nn.Parameter(torch.randn(3, 8))), "it holds"),
        (lambda: _with(act_fn=None), "act_fn"),
        (lambda: _with(is_transposed=True), "do not fit together"),
        (lambda: _OtherCall(), "its arguments are not"),
        (lambda: _with(gate_up_proj=nn.Parameter(torch.zeros(3, 24, 8, dtype=torch.int8), False)), "torch.int8"),
    ],
)
def test_what_does_not_match_is_refused(make, reason):
    holder = Holder(make())
    before = holder.experts
    refused = unstack_experts(holder)
    assert holder.experts is before
    assert reason in refused["experts.gate_up_proj"]
    assert unstack_experts(Holder(Stack())) == {}, "and the plain one is not"


# -- routing -----------------------------------------------------------------------------------------------------------


@plain
def test_replayed_routing_leaves_only_rounding(name):
    """In bfloat16 a token may reach another expert if the same sums are computed in another order."""
    model = zoo.build(name).bfloat16()
    ids, routing = zoo.token_ids(8), Routing(model)
    with routing.recorded():
        before = zoo.outputs(model, ids)
    unstack_experts(model)
    with routing.replayed():
        after = zoo.outputs(model, ids)
    assert zoo.difference(before, after) <= 0.1
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_replaying_sends_tokens_where_they_went():
    holder = Holder(Stack())
    routing, tokens = Routing(holder), torch.randn(8, 8)
    index, weights = torch.tensor([[0, 1]] * 8), torch.rand(8, 2)
    other = torch.cat([torch.tensor([[2, 1]]), index[1:]])
    with torch.no_grad():
        with routing.recorded():
            expected = holder.experts(tokens, index, weights)
        unstack_experts(holder)
        assert not torch.allclose(holder.experts(tokens, other, weights)[0], expected[0], rtol=1e-3)
        with routing.replayed():
            assert torch.allclose(holder.experts(tokens, other, weights), expected, rtol=1e-4, atol=1e-4)
