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


def test_learned_positions_are_a_producer():
    plan = check(lambda net, x: net.down(net.up(x) + net.positions))
    assert "positions[1]" in axes_of(space_of(plan, "down"))
    assert not space_of(plan, "down").reason


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


def test_channels_of_different_parameters_do_not_mix():
    plan = check(lambda net, x: net.down(torch.cat([net.narrow(x), net.values(x)], -1)))
    assert space_of(plan, "down").segments == (HALF, HALF)


def test_interleaved_producers_are_frozen():
    def forward(net, x):
        return net.down(torch.stack([net.narrow(x), net.values(x)], -1).flatten(-2))

    plan = check(forward)
    assert "different parameters" in space_of(plan, "down").reason


@pytest.mark.parametrize("normalise", [rms, lambda x: functional.layer_norm(x, (4,)), lambda x: x.softmax(-1)])
def test_a_norm_of_each_head_keeps_channels_in_their_head(normalise):
    plan = check(lambda net, x: net.down(normalise(net.up(x).unflatten(-1, (4, 4))).flatten(-2)))
    space = space_of(plan, "down")
    assert (space.segments, space.reason) == ((4, 4, 4, 4), "")


@pytest.mark.parametrize("normalise", [rms, lambda x: functional.layer_norm(x, (WIDE,)), lambda x: x.softmax(-1)])
def test_a_norm_of_all_channels_leaves_them_free(normalise):
    space = space_of(check(lambda net, x: net.down(normalise(net.up(x)))), "down")
    assert (space.segments, space.reason) == ((WIDE,), "")


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


def test_a_rotation_by_constants_freezes():
    plan = check(lambda net, x: net.down(net.up(x) * net.constant.cos()))
    assert "value of its own" in space_of(plan, "down").reason


def test_a_scalar_does_not_freeze():
    plan = check(lambda net, x: net.down((net.up(x) * net.alpha + net.beta) / 3 - net.constant[0]))
    assert not space_of(plan, "down").reason


def test_a_value_for_each_token_does_not_freeze():
    plan = check(lambda net, x: net.down(net.up(x) * x.mean(-1, keepdim=True)))
    assert not space_of(plan, "down").reason


def test_a_value_for_each_head_keeps_channels_in_their_head():
    plan = check(lambda net, x: net.down((net.up(x).unflatten(-1, (4, 4)) * net.constant[:4, None]).flatten(-2)))
    space = space_of(plan, "down")
    assert (space.segments, space.reason) == ((4, 4, 4, 4), "")


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


def test_an_output_keeps_its_order():
    def forward(net, x):
        hidden = net.up(x)
        return net.down(hidden), hidden

    assert "output of the model" in space_of(check(forward), "down").reason


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_a_linear_over_tokens_is_sound():
    def forward(net, x):
        hidden = net.up(x)
        mixed = net.tokens(hidden.transpose(1, 2)).transpose(1, 2)
        return net.down(hidden + mixed)

    plan = check(forward)
    assert space_of(plan, "tokens").reason == "its input mixes tokens into channels"


def test_tokens_laid_out_as_channels_are_sound():
    plan = check(lambda net, x: net.down(net.up(x).transpose(1, 2).reshape(2, TOKENS, WIDE)))
    assert space_of(plan, "down").reason


def test_a_reduction_over_tokens_keeps_channels():
    for pool in (lambda h: h.mean(1), lambda h: h.amax(1), lambda h: h[:, 0]):
        plan = check(lambda net, x, pool=pool: net.down(pool(net.up(x))))
        assert not space_of(plan, "down").reason


def test_what_one_token_does_differently_does_not_matter():
    def forward(net, x):
        hidden = net.up(x)
        return net.down(torch.cat([hidden[:, :1].relu(), hidden[:, 1:]], 1))

    assert not space_of(check(forward), "down").reason


def test_a_shift_of_all_channels_by_a_token_does_not_matter():
    for shift in (lambda h: torch.cat([h[:, 1:], h[:, :1]], 1), lambda h: h.roll(1, 1), lambda h: h.flip(1)):
        plan = check(lambda net, x, shift=shift: net.down(shift(net.up(x))))
        assert not space_of(plan, "down").reason


def test_a_class_token_before_the_others_does_not_matter():
    def forward(net, x):
        tokens = torch.cat([net.vector.expand(2, 1, WIDE), net.up(x)], 1)
        return net.down(tokens[:, 1:]) + net.side(tokens[:, :1])

    assert not space_of(check(forward), "down").reason


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


def test_a_slice_that_is_written_carries_what_is_written():
    def forward(net, x):
        hidden = torch.zeros_like(net.up(x))
        hidden[..., :HALF] = net.narrow(x)
        hidden[..., HALF:] = net.values(x).relu()
        return net.down(hidden)

    assert space_of(check(forward), "down").segments == (HALF, HALF)


def test_a_slice_that_stays_constant_freezes():
    def forward(net, x):
        hidden = net.up(x).new_zeros(2, TOKENS, WIDE)
        hidden[..., :HALF] = net.narrow(x)
        return net.down(hidden)

    assert space_of(check(forward), "down").reason


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
    assert [call.parameter for call in found.linears] == ["up.weight", "down.weight", "score.weight"]
    assert len(set(found.contexts[found.axes["up.weight", 0]])) == 1
