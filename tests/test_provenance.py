"""The rules of channel provenance, one small network each.

Every network goes through `networks.check`: whatever its plan allows to be permuted is permuted at random, and the
outputs must not change. Each test states what else the plan must find.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from permtriton.passes.provenance import propagate
from permtriton.passes.trace import export_program, unlifted

from .networks import HALF, OUT, TOKENS, WIDE, axes_of, check, describe, space_of


def rms(x: Tensor) -> Tensor:
    return x * x.square().mean(-1, keepdim=True).add(1e-3).rsqrt()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by hand over heads of four channels, ``[batch, tokens, channels]``."""
    q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
    return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(-2)


def attend_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


def class_token(net, x):
    tokens = torch.cat([net.vector.expand(2, 1, WIDE), net.up(x)], 1)
    return net.down(tokens[:, 1:]) + net.side(tokens[:, :1])


def written(net, x, *parts):
    hidden = net.up(x).new_zeros(2, TOKENS, WIDE)
    for place, part in zip((slice(0, HALF), slice(HALF, WIDE)), parts, strict=False):
        hidden[..., place] = part
    return net.down(hidden)


def by_head(h):
    return h.unflatten(-1, (4, 4))


FREE, HEADS, HALVES = (WIDE,), (4, 4, 4, 4), (HALF, HALF)
PER_HEAD = {
    "a norm": lambda net, h: rms(h), "LayerNorm": lambda net, h: functional.layer_norm(h, (4,)),
    "softmax": lambda net, h: h.softmax(-1), "a value": lambda net, h: h * net.constant[:4, None],
}  # fmt: skip
# What a network computes -> the segments of the space of "down", or why it is frozen.
SPACES = {
    **{
        f"{name} of each head": (lambda net, x, of=of: net.down(of(net, by_head(net.up(x))).flatten(-2)), HEADS)
        for name, of in PER_HEAD.items()
    },
    "learned positions": (lambda net, x: net.down(net.up(x) + net.positions), FREE),
    "a norm of all channels": (lambda net, x: net.down(rms(net.up(x))), FREE),
    "LayerNorm": (lambda net, x: net.down(functional.layer_norm(net.up(x), (WIDE,))), FREE),
    "softmax": (lambda net, x: net.down(net.up(x).softmax(-1)), FREE),
    "scalars": (lambda net, x: net.down((net.up(x) * net.alpha + net.beta) / 3 - net.constant[0]), FREE),
    "a value for each token": (lambda net, x: net.down(net.up(x) * x.mean(-1, keepdim=True)), FREE),
    "the mean of the tokens": (lambda net, x: net.down(net.up(x).mean(1)), FREE),
    "the largest of the tokens": (lambda net, x: net.down(net.up(x).amax(1)), FREE),
    "the first token": (lambda net, x: net.down(net.up(x)[:, 0]), FREE),
    "one token is another": (lambda net, x: net.down(torch.cat([(h := net.up(x))[:, :1].relu(), h[:, 1:]], 1)), FREE),
    "shifted tokens": (lambda net, x: net.down(torch.cat([(h := net.up(x))[:, 1:], h[:, :1]], 1)), FREE),
    "rolled tokens": (lambda net, x: net.down(net.up(x).roll(1, 1)), FREE),
    "flipped tokens": (lambda net, x: net.down(net.up(x).flip(1)), FREE),
    "a class token before the others": (class_token, FREE),
    "of two parameters": (lambda net, x: net.down(torch.cat([net.narrow(x), net.values(x)], -1)), HALVES),
    "written slices": (lambda net, x: written(net, x, net.narrow(x), net.values(x).relu()), HALVES),
    "a slice that stays constant": (lambda net, x: written(net, x, net.narrow(x)), ""),
    "interleaved": (
        lambda net, x: net.down(torch.stack([net.narrow(x), net.values(x)], -1).flatten(-2)), "different parameters",
    ),
    "rotated by constants": (lambda net, x: net.down(net.up(x) * net.constant.cos()), "value of its own"),
    "an output": (lambda net, x: (net.down(h := net.up(x)), h), "output of the model"),
    "tokens as channels": (lambda net, x: net.down(net.up(x).transpose(1, 2).reshape(2, TOKENS, WIDE)), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SPACES)
def test_what_may_change_places(name):
    forward, expected = SPACES[name]
    space = space_of(check(forward), "down")
    if isinstance(expected, tuple):
        assert (space.segments, space.reason) == (expected, "")
    else:
        assert space.reason
        assert expected in space.reason


def test_a_linear_over_tokens_is_sound():
    plan = check(lambda net, x: net.down(net.up(x) + net.tokens(net.up(x).transpose(1, 2)).transpose(1, 2)))
    assert space_of(plan, "tokens").reason == "its input mixes tokens into channels"


# -- what joins channels -----------------------------------------------------------------------------------------------


def test_a_residual_join_is_one_space():
    def forward(net, x):
        stream = net.up(x)
        stream = stream + net.inner(stream.relu())
        return net.down(stream)

    plan = check(forward)
    assert space_of(plan, "inner") is space_of(plan, "down")
    space = space_of(plan, "down")
    assert (space.name, space.segments, space.reason) == ("stream", (WIDE,), "")
    assert axes_of(space) == {
        "up.weight[0]", "up.bias[0]", "inner.weight[0]", "inner.weight[1]", "inner.bias[0]", "down.weight[1]",
    }  # fmt: skip


def test_a_product_of_two_linears_moves_both():
    plan = check(lambda net, x: net.down(functional.silu(net.gate(x)) * net.up(x)))
    space = space_of(plan, "down")
    assert (space.segments, space.reason) == ((WIDE,), "")
    assert axes_of(space) == {"gate.weight[0]", "up.weight[0]", "up.bias[0]", "down.weight[1]"}
    assert [axis.parameter for axis in space.axes if axis.is_input] == ["down.weight"]


def test_a_packed_gate_and_up_move_as_pairs():
    def forward(net, x):
        gate, up = net.up(x).chunk(2, -1)
        return net.half_down(functional.silu(gate) * up)

    plan = check(forward)
    space = space_of(plan, "half_down")
    assert (space.segments, space.reason) == ((HALF,), "")
    rows = next(axis.units.tolist() for axis in space.axes if axis.parameter == "up.weight")
    assert rows == [*range(HALF), *range(HALF)]


def test_siblings_share_a_site():
    def forward(net, x):
        hidden = net.up(x)
        return net.down(hidden) + net.side(hidden.view(-1, WIDE).clone()).view(-1, TOKENS, OUT)

    plan = check(forward)
    assert next(site for site in plan.sites if "down" in site.linears).linears == ("down", "side")


@pytest.mark.parametrize(
    "vector",
    [lambda net: net.vector, lambda net: 1 + net.vector, lambda net: net.vector.float().double().exp()],
    ids=["weight", "one_plus_weight", "computed_weight"],
)
def test_a_norm_weight_is_a_producer(vector):
    plan = check(lambda net, x: net.down(rms(net.up(x)) * vector(net)))
    space = space_of(plan, "down")
    assert (space.segments, space.reason) == ((WIDE,), "")
    assert "vector[0]" in axes_of(space)


def test_a_parameter_in_a_matmul_is_read_by_its_rows():
    plan = check(lambda net, x: (net.up(x) @ net.matrix) + net.down(net.up(x).relu()))
    space = space_of(plan, "down")
    assert "matrix[0]" in axes_of(space)
    assert not space.frozen
    assert plan.skipped["matrix"] == "weight of a Net, not of a linear layer"


# -- a weight used twice -----------------------------------------------------------------------------------------------


def test_a_linear_called_twice_is_one_reader():
    def forward(net, x):
        stream = net.up(x)
        stream = stream + net.inner(stream)
        stream = stream + net.inner(stream)
        return net.down(stream)

    plan = check(forward)
    space = space_of(plan, "inner")
    assert (space.segments, space.reason) == ((WIDE,), "")
    assert sorted(name for _, name in plan.linears()) == ["down", "inner", "up"]


def test_a_weight_used_in_both_directions():
    def forward(net, x):
        hidden = functional.linear(x, net.up.weight)
        back = hidden.relu() @ net.up.weight
        return net.half_down(net.narrow(back))

    plan = check(forward)
    assert not any(space.reason == "" and "up.weight[1]" in axes_of(space) for space in plan.spaces), describe(plan)


def test_a_tied_autoencoder_folds_its_weight_once():
    def forward(net, x):
        stream = net.up(x)
        hidden = functional.linear(stream, net.inner.weight).relu()
        return net.down(stream + hidden @ net.inner.weight) + net.side(hidden)

    plan = check(forward)
    assert not space_of(plan, "down").reason
    assert not space_of(plan, "side").reason
    assert space_of(plan, "down") is not space_of(plan, "side")


# -- what keeps channels apart -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", [attend, attend_fused])
def test_attention_keeps_values_in_their_head(attention):
    def forward(net, x):
        return net.down(attention(net.gate(x), net.inner(net.gate(x)), net.up(x)))

    plan = check(forward)
    space = space_of(plan, "down")
    assert (space.segments, space.reason) == ((4, 4, 4, 4), "")
    assert axes_of(space) == {"up.weight[0]", "up.bias[0]", "down.weight[1]"}


def test_grouped_query_attention_ties_query_heads():
    def forward(net, x):
        heads = lambda t: t.unflatten(-1, (-1, 4)).transpose(1, 2)  # noqa: E731
        q, k, v = heads(net.gate(x)), heads(net.narrow(x)), heads(net.values(x))
        return net.down(functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(-2))

    plan = check(forward)
    space = space_of(plan, "down")
    site = next(site for site in plan.sites if site.linears == ("down",))
    assert (space.segments, space.reason, site.copies) == ((4, 4), "", 2)
    assert axes_of(space) == {"values.weight[0]", "values.bias[0]", "down.weight[1]"}


def test_an_unknown_operator_is_a_barrier_by_name():
    plan = check(lambda net, x: net.down(net.inner(net.up(x)).cumsum(-1)))
    assert any("aten.cumsum" in barrier for barrier in plan.barriers)
    assert space_of(plan, "down").reason
    assert not space_of(plan, "inner").reason, "what is before the barrier's producer is free"


def test_only_the_channels_that_enter_an_unknown_operator_are_frozen():
    def forward(net, x):
        hidden = net.up(x)
        return net.half_down(hidden[..., :HALF].cumsum(-1)) + net.half_side(hidden[..., HALF:])

    plan = check(forward)
    assert space_of(plan, "half_down").reason
    assert not space_of(plan, "half_side").reason


# -- in place ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activate",
    [lambda h, net: h.relu_(), lambda h, net: h.add_(net.vector).clamp_(-1, 1), lambda h, net: h.mul_(net.alpha)],
    ids=["relu", "a_chain", "a_scalar"],
)
@pytest.mark.slow
def test_an_operator_in_place_on_memory_of_its_own_is_like_its_twin(activate):
    plan = check(lambda net, x: net.down(activate(net.up(x), net)))
    assert (space_of(plan, "down").segments, plan.barriers) == ((WIDE,), [])


@pytest.mark.slow
def test_an_operator_in_place_on_memory_that_others_read_is_followed():
    def forward(net, x):
        hidden = net.up(x)
        part = hidden[..., :HALF]
        hidden.relu_()
        return net.down(hidden) + net.half_down(part)

    plan = check(forward)
    assert plan.barriers == []
    assert space_of(plan, "down").reason == "linears read overlapping but different sets of its channels"


def test_a_linear_with_one_output_and_a_bias_is_traced():
    class Scorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.score = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 1)

        def forward(self, x):
            hidden = self.down(self.up(x).relu())
            return self.score(hidden), hidden

    model = Scorer()
    found = propagate(unlifted(export_program(model, torch.randn(3, 8)), model), [0], 1)
    assert [*found.linears] == ["up.weight", "down.weight", "score.weight"]
    assert len(set(found.contexts[found.axes["up.weight", 0]])) == 1
