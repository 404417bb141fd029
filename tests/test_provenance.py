"""The rules of channel provenance, one small network each.

Every network goes through the generic check: whatever its plan says may be permuted is permuted at random, and the
outputs must stay. What a plan must find besides is said by each test.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from permtriton import NMPattern
from permtriton.passes.fold import fold_parameters
from permtriton.passes.provenance import propagate
from permtriton.passes.sites import find_sites
from permtriton.plan import ChannelSpace, Plan
from permtriton.trace import unlifted

from . import zoo

TOKENS, IN, WIDE, OUT = 20, 24, 16, 4
HALF = WIDE // 2
Forward = Callable[["Net", Tensor], Tensor | tuple[Tensor, ...]]


class Net(nn.Module):
    """A few parameters of distinct roles, and whatever forward pass a test writes over them."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.up = nn.Linear(IN, WIDE)
        self.gate = nn.Linear(IN, WIDE, bias=False)
        self.narrow = nn.Linear(IN, HALF)
        self.values = nn.Linear(IN, HALF)
        self.inner = nn.Linear(WIDE, WIDE)
        self.down = nn.Linear(WIDE, OUT)
        self.side = nn.Linear(WIDE, OUT, bias=False)
        self.half_down = nn.Linear(HALF, OUT)
        self.half_side = nn.Linear(HALF, OUT)
        self.tokens = nn.Linear(TOKENS, TOKENS, bias=False)
        self.vector = nn.Parameter(torch.empty(WIDE))
        self.alpha = nn.Parameter(torch.empty(()))
        self.beta = nn.Parameter(torch.empty(1))
        self.matrix = nn.Parameter(torch.empty(WIDE, OUT))
        self.positions = nn.Parameter(torch.empty(TOKENS, WIDE))
        self.register_buffer("constant", torch.rand(WIDE) + 1)
        self.register_buffer("ring", torch.rand(TOKENS) + 1)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self._forward(self, x)


def check(forward: Forward, pattern: str = "2:4") -> Plan:
    """Returns the plan of a network after permuting all that it allows, several times, in float64."""
    torch.manual_seed(0)
    net = Net(forward)
    zoo.randomize(net)
    net.double().eval()
    inputs = torch.randn(2, TOKENS, IN, dtype=torch.float64)
    before = zoo.outputs(net, inputs)
    plan = plan_of(net, inputs, NMPattern.parse(pattern))
    for seed in range(5):
        folded = copy.deepcopy(net)
        fold_parameters(folded, plan, zoo.random_indices(plan, seed))
        difference = zoo.difference(before, zoo.outputs(folded, inputs))
        assert difference < 1e-12, describe(plan)
    return plan


def plan_of(net: nn.Module, inputs: Tensor, pattern: NMPattern) -> Plan:
    with torch.no_grad():
        graph_module = unlifted(torch.export.export(net, (inputs,), strict=False), net)
    results = results_of(graph_module)
    provenance = propagate(graph_module, range(len(results)), hidden=0)
    drop_unused(net, {parameter for parameter, _ in provenance.axes})
    return find_sites(provenance, net, results[0], pattern)


def drop_unused(net: nn.Module, used: set[str]) -> None:
    """Leaves a network only the parameters that its forward pass uses: others might carry its channels, too."""
    for name, parameter in list(net.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        if name not in used and parameter.numel() > 1:
            net.get_submodule(owner).register_parameter(attribute, None)


def results_of(graph_module: fx.GraphModule) -> tuple[fx.Node, ...]:
    return next(node for node in graph_module.graph.nodes if node.op == "output").args[0]


def describe(plan: Plan) -> str:
    return "; ".join(f"{s.name}: {s.segments} {s.frozen or 'free'}" for s in plan.spaces)


def space_of(plan: Plan, linear: str) -> ChannelSpace:
    return next(site.space for site, name in plan.linears() if name == linear)


def axes_of(space: ChannelSpace) -> set[str]:
    return {f"{axis.parameter}[{axis.dim}]" for axis in space.axes}


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
    assert (space.name, space.segments, space.frozen) == ("stream", (WIDE,), "")
    assert axes_of(space) == {
        "up.weight[0]", "up.bias[0]", "inner.weight[0]", "inner.weight[1]", "inner.bias[0]", "down.weight[1]",
    }  # fmt: skip


def test_a_product_of_two_linears_moves_both():
    plan = check(lambda net, x: net.down(functional.silu(net.gate(x)) * net.up(x)))
    space = space_of(plan, "down")
    assert (space.segments, space.frozen) == ((WIDE,), "")
    assert axes_of(space) == {"gate.weight[0]", "up.weight[0]", "up.bias[0]", "down.weight[1]"}
    assert [axis.parameter for axis in space.axes if axis.reads] == ["down.weight"]


def test_a_packed_gate_and_up_move_as_pairs():
    def forward(net, x):
        gate, up = net.up(x).chunk(2, -1)
        return net.half_down(functional.silu(gate) * up)

    plan = check(forward)
    space = space_of(plan, "half_down")
    assert (space.segments, space.frozen) == ((HALF,), "")
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
    assert (space.segments, space.frozen) == ((WIDE,), "")
    assert "vector[0]" in axes_of(space)


def test_learned_positions_are_a_producer():
    plan = check(lambda net, x: net.down(net.up(x) + net.positions))
    assert "positions[1]" in axes_of(space_of(plan, "down"))
    assert not space_of(plan, "down").frozen


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
    assert (space.segments, space.frozen) == ((WIDE,), "")
    assert sorted(name for _, name in plan.linears()) == ["down", "inner", "up"]


def test_a_weight_used_in_both_directions():
    def forward(net, x):
        hidden = functional.linear(x, net.up.weight)
        back = hidden.relu() @ net.up.weight
        return net.half_down(net.narrow(back))

    plan = check(forward)
    assert not any(space.frozen == "" and "up.weight[1]" in axes_of(space) for space in plan.spaces), describe(plan)


def test_a_tied_autoencoder_folds_its_weight_once():
    def forward(net, x):
        stream = net.up(x)
        hidden = functional.linear(stream, net.inner.weight).relu()
        return net.down(stream + hidden @ net.inner.weight) + net.side(hidden)

    plan = check(forward)
    assert not space_of(plan, "down").frozen
    assert not space_of(plan, "side").frozen
    assert space_of(plan, "down") is not space_of(plan, "side")


# -- what keeps channels apart -----------------------------------------------------------------------------------------


def test_channels_of_different_parameters_do_not_mix():
    plan = check(lambda net, x: net.down(torch.cat([net.narrow(x), net.values(x)], -1)))
    assert space_of(plan, "down").segments == (HALF, HALF)


def test_interleaved_producers_are_frozen():
    def forward(net, x):
        return net.down(torch.stack([net.narrow(x), net.values(x)], -1).flatten(-2))

    plan = check(forward)
    assert "different parameters" in space_of(plan, "down").frozen


@pytest.mark.parametrize("normalise", [rms, lambda x: functional.layer_norm(x, (4,)), lambda x: x.softmax(-1)])
def test_a_norm_of_each_head_keeps_channels_in_their_head(normalise):
    plan = check(lambda net, x: net.down(normalise(net.up(x).unflatten(-1, (4, 4))).flatten(-2)))
    space = space_of(plan, "down")
    assert (space.segments, space.frozen) == ((4, 4, 4, 4), "")


@pytest.mark.parametrize("normalise", [rms, lambda x: functional.layer_norm(x, (WIDE,)), lambda x: x.softmax(-1)])
def test_a_norm_of_all_channels_leaves_them_free(normalise):
    space = space_of(check(lambda net, x: net.down(normalise(net.up(x)))), "down")
    assert (space.segments, space.frozen) == ((WIDE,), "")


def test_a_head_that_is_no_whole_group_is_frozen():
    plan = check(lambda net, x: net.down(rms(net.up(x).unflatten(-1, (4, 4))).flatten(-2)), "2:8")
    assert space_of(plan, "down").frozen == "channels may only move inside runs of 4, not a multiple of 8"


@pytest.mark.parametrize("attention", [attend, attend_fused])
def test_attention_keeps_values_in_their_head(attention):
    def forward(net, x):
        return net.down(attention(net.gate(x), net.inner(net.gate(x)), net.up(x)))

    plan = check(forward)
    space = space_of(plan, "down")
    assert (space.segments, space.frozen) == ((4, 4, 4, 4), "")
    assert axes_of(space) == {"up.weight[0]", "up.bias[0]", "down.weight[1]"}


def test_grouped_query_attention_ties_query_heads():
    def forward(net, x):
        heads = lambda t: t.unflatten(-1, (-1, 4)).transpose(1, 2)  # noqa: E731
        q, k, v = heads(net.gate(x)), heads(net.narrow(x)), heads(net.values(x))
        return net.down(functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(-2))

    plan = check(forward)
    space = space_of(plan, "down")
    site = next(site for site in plan.sites if site.linears == ("down",))
    assert (space.segments, space.frozen, site.copies) == ((4, 4), "", 2)
    assert axes_of(space) == {"values.weight[0]", "values.bias[0]", "down.weight[1]"}


def test_a_rotation_by_constants_freezes():
    plan = check(lambda net, x: net.down(net.up(x) * net.constant.cos()))
    assert "value of its own" in space_of(plan, "down").frozen


def test_a_scalar_does_not_freeze():
    plan = check(lambda net, x: net.down((net.up(x) * net.alpha + net.beta) / 3 - net.constant[0]))
    assert not space_of(plan, "down").frozen


def test_a_value_for_each_token_does_not_freeze():
    plan = check(lambda net, x: net.down(net.up(x) * x.mean(-1, keepdim=True)))
    assert not space_of(plan, "down").frozen


def test_a_value_for_each_head_keeps_channels_in_their_head():
    plan = check(lambda net, x: net.down((net.up(x).unflatten(-1, (4, 4)) * net.constant[:4, None]).flatten(-2)))
    space = space_of(plan, "down")
    assert (space.segments, space.frozen) == ((4, 4, 4, 4), "")


def test_an_unknown_operator_is_a_barrier_by_name():
    plan = check(lambda net, x: net.down(net.inner(net.up(x)).cumsum(-1)))
    assert any("aten.cumsum" in barrier for barrier in plan.barriers)
    assert space_of(plan, "down").frozen
    assert not space_of(plan, "inner").frozen, "what is before the barrier's producer is free"


def test_only_the_channels_that_enter_an_unknown_operator_are_frozen():
    def forward(net, x):
        hidden = net.up(x)
        return net.half_down(hidden[..., :HALF].cumsum(-1)) + net.half_side(hidden[..., HALF:])

    plan = check(forward)
    assert space_of(plan, "half_down").frozen
    assert not space_of(plan, "half_side").frozen


def test_an_output_keeps_its_order():
    def forward(net, x):
        hidden = net.up(x)
        return net.down(hidden), hidden

    assert "output of the model" in space_of(check(forward), "down").frozen


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_a_linear_over_tokens_is_sound():
    def forward(net, x):
        hidden = net.up(x)
        mixed = net.tokens(hidden.transpose(1, 2)).transpose(1, 2)
        return net.down(hidden + mixed)

    plan = check(forward)
    assert space_of(plan, "tokens").frozen == "its input mixes tokens into channels"


def test_tokens_laid_out_as_channels_are_sound():
    plan = check(lambda net, x: net.down(net.up(x).transpose(1, 2).reshape(2, TOKENS, WIDE)))
    assert space_of(plan, "down").frozen


def test_a_reduction_over_tokens_keeps_channels():
    for pool in (lambda h: h.mean(1), lambda h: h.amax(1), lambda h: h[:, 0]):
        plan = check(lambda net, x, pool=pool: net.down(pool(net.up(x))))
        assert not space_of(plan, "down").frozen


def test_what_one_token_does_differently_does_not_matter():
    def forward(net, x):
        hidden = net.up(x)
        return net.down(torch.cat([hidden[:, :1].relu(), hidden[:, 1:]], 1))

    assert not space_of(check(forward), "down").frozen


def test_a_shift_of_all_channels_by_a_token_does_not_matter():
    for shift in (lambda h: torch.cat([h[:, 1:], h[:, :1]], 1), lambda h: h.roll(1, 1), lambda h: h.flip(1)):
        plan = check(lambda net, x, shift=shift: net.down(shift(net.up(x))))
        assert not space_of(plan, "down").frozen


def test_a_class_token_before_the_others_does_not_matter():
    def forward(net, x):
        tokens = torch.cat([net.vector.expand(2, 1, WIDE), net.up(x)], 1)
        return net.down(tokens[:, 1:]) + net.side(tokens[:, :1])

    assert not space_of(check(forward), "down").frozen


# -- in place ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activate",
    [lambda h, net: h.relu_(), lambda h, net: h.add_(net.vector).clamp_(-1, 1), lambda h, net: h.mul_(net.alpha)],
    ids=["relu", "a_chain", "a_scalar"],
)
def test_an_operator_in_place_on_memory_of_its_own_is_like_its_twin(activate):
    plan = check(lambda net, x: net.down(activate(net.up(x), net)))
    assert (space_of(plan, "down").segments, plan.barriers) == ((WIDE,), [])


def test_an_operator_in_place_on_memory_that_others_read_is_a_barrier():
    def forward(net, x):
        hidden = net.up(x)
        part = hidden[..., :HALF]
        hidden.relu_()
        return net.down(hidden) + net.half_down(part)

    assert any("relu_" in barrier for barrier in check(forward).barriers)


# -- how sites read a space --------------------------------------------------------------------------------------------


def test_readers_of_overlapping_sets_are_frozen():
    def forward(net, x):
        hidden = net.up(x)
        return net.down(hidden) + net.half_down(hidden[..., :HALF])

    assert "overlapping" in space_of(check(forward), "down").frozen


def test_a_reader_of_every_other_channel():
    plan = check(lambda net, x: net.half_down(net.up(x)[..., ::2]))
    space = space_of(plan, "half_down")
    assert (space.segments, space.frozen) == ((HALF,), "")
    rows = next(axis.units for axis in space.axes if axis.parameter == "up.weight")
    assert rows.tolist() == [unit for j in range(HALF) for unit in (j, -1)]


def test_a_reader_in_another_order_is_frozen():
    def forward(net, x):
        hidden = net.up(x)
        return net.down(hidden) + net.side(hidden.flip(-1))

    assert "interleaved" in space_of(check(forward), "down").frozen


def test_a_reader_of_some_channels_twice_is_frozen():
    def forward(net, x):
        hidden = net.narrow(x)
        return net.down(torch.cat([hidden, hidden[..., :4], hidden[..., :4]], -1))

    assert "more often" in space_of(check(forward), "down").frozen


def test_the_reason_names_the_run_that_does_not_fit():
    def forward(net, x):
        pairs = net.values(x).unflatten(-1, (-1, 2)).softmax(-1).flatten(-2)
        return net.inner(torch.cat([net.narrow(x), pairs], -1))

    frozen = space_of(check(forward), "inner").frozen
    assert frozen == "channels may only move inside runs of 2, not a multiple of 4"


def test_the_reason_of_an_input_from_outside_says_so():
    plan = check(lambda net, x: net.down(net.up(x)))
    assert "from outside the model" in space_of(plan, "up").frozen


# -- sound, whatever the plan: channels that are not treated alike may not change places -------------------------------


def one_half_activated(net, x):
    hidden = net.up(x)
    return net.down(torch.cat([hidden[..., :HALF].relu(), hidden[..., HALF:]], -1))


def halves_with_different_activations(net, x):
    hidden = net.up(x)
    return net.down(torch.cat([hidden[..., :HALF].sigmoid(), hidden[..., HALF:].exp()], -1))


def one_half_scaled_by_a_number(net, x):
    hidden = net.up(x)
    return net.down(torch.cat([hidden[..., :HALF] * 2, hidden[..., HALF:]], -1))


def one_half_scaled_by_a_parameter(net, x):
    hidden = net.up(x)
    return net.down(torch.cat([hidden[..., :HALF] * net.alpha, hidden[..., HALF:]], -1))


def each_half_scaled_by_a_parameter(net, x):
    scales = torch.cat([net.alpha[None], net.beta])
    return net.down((net.up(x).unflatten(-1, (2, HALF)) * scales[:, None]).flatten(-2))


def one_half_multiplied_the_other_added(net, x):
    hidden, value = net.up(x), x.mean(-1, keepdim=True)
    return net.down(torch.cat([hidden[..., :HALF] * value, hidden[..., HALF:] + value], -1))


def clamped_by_a_vector(net, x):
    return net.down(torch.clamp(net.up(x), min=net.vector))


def clamped_by_a_constant_vector(net, x):
    return net.down(net.up(x).clamp_max(net.constant))


def gate_and_up_trade_places(net, x):
    """Unit j's gate is row 2j and its up row 2(n-1-j)+1, so the gate is first in some units and last in others."""
    hidden = net.up(x)
    return net.half_down(hidden[..., ::2].sigmoid() * hidden[..., 1::2].flip(-1))


def values_in_another_order_for_each_channel(net, x):
    """Every channel meets the same values over the tokens, each in an order of its own."""
    table = torch.stack([net.ring.roll(channel) for channel in range(WIDE)], -1)
    return net.down(net.up(x) * table)


def sum_of_a_weights_rows(net, x):
    return net.down(net.up(x).relu()), net.up.weight.sum(1)


def one_channel_is_singled_out(net, x):
    hidden = net.up(x)
    return net.down(hidden.relu()) * hidden[..., :1]


def channels_as_an_attention_mask(net, x):
    hidden, query = net.up(x), x.unsqueeze(1)
    keys = query[:, :, :WIDE]
    attended = functional.scaled_dot_product_attention(query, keys, keys, attn_mask=hidden.unsqueeze(1))
    return net.down(hidden.relu()) + attended[:, 0, :, :OUT]


def values_written_in_place(net, x):
    hidden = net.up(x)
    hidden[..., :HALF] = 0.5
    return net.down(hidden)


def activated_in_place(net, x):
    hidden = net.up(x).clone()
    hidden[..., :HALF].relu_()
    return net.down(hidden)


def gathered(net, x):
    return net.down(net.up(x)[..., torch.arange(WIDE).flip(0)])


def sorted_channels(net, x):
    return net.down(net.up(x).sort(-1).values * net.vector)


def the_largest_channel_gates(net, x):
    hidden = net.up(x)
    return net.down(hidden * hidden.argmax(-1, keepdim=True))


def pairs_are_compared(net, x):
    hidden = net.up(x)
    return net.down(torch.where(hidden > hidden.roll(1, -1), hidden, net.vector))


def a_channel_twice_in_a_product(net, x):
    hidden = net.up(x)
    return net.down(hidden * hidden.flip(-1))


def differences_of_neighbours(net, x):
    hidden = net.up(x)
    return net.down(hidden - hidden.roll(1, -1))


def channels_against_channels(net, x):
    hidden = net.up(x)
    return net.down(hidden @ (hidden.transpose(1, 2) @ hidden).softmax(-1))


def a_computed_weight(net, x):
    return net.down(functional.linear(net.up(x), net.inner.weight * net.vector))


def a_bilinear_form(net, x):
    return net.down(net.up(x) * (net.up(x) @ net.inner.weight))


def a_normalised_weight(net, x):
    weight = net.inner.weight / net.inner.weight.square().sum(1, keepdim=True).sqrt()
    return net.down(functional.linear(net.up(x), weight).relu()) + net.side(net.inner(net.up(x)))


def halves_one_token_apart(net, x):
    hidden = net.up(x)
    return net.down(torch.cat([hidden[:, 1:, :HALF], hidden[:, :-1, HALF:]], -1))


def one_half_rolled_along_tokens(net, x):
    hidden = net.up(x)
    return net.down(torch.cat([hidden[..., :HALF].roll(1, 1), hidden[..., HALF:]], -1))


def halves_of_two_runs(net, x):
    return net.down(torch.cat([net.up(x)[..., :HALF], net.up(x.flip(1))[..., HALF:]], -1))


def two_runs_in_another_order_for_each_half(net, x):
    a, b = net.up(x), net.up(x.relu())
    first = torch.cat([a[..., :HALF], b[..., HALF:]], -1)
    return net.down(torch.cat([first, torch.cat([b[..., :HALF], a[..., HALF:]], -1)], 1))


def cut_between_two_tokens(net, x):
    return net.down(net.up(x).flatten(1)[:, HALF:-HALF].view(2, TOKENS - 1, WIDE))


def rolled_across_tokens(net, x):
    return net.down(net.up(x).flatten(1).roll(HALF, 1).view(2, TOKENS, WIDE))


def moved_across_tokens_by_padding(net, x):
    flat, pad = net.up(x).flatten(1), net.narrow(x)[:, 0]
    return net.down(torch.cat([pad, flat, pad], 1).view(2, TOKENS + 1, WIDE)[:, 1:-1])


def activated_in_place_while_a_view_is_read(net, x):
    hidden = net.up(x) * 2
    part = hidden[..., :HALF]
    hidden.relu_()
    return net.down(hidden) + net.half_down(part)


def scaled_in_place_after_it_was_read(net, x):
    hidden = net.up(x)
    kept = hidden.view(2, TOKENS, 4, 4)[:, :, :2].flatten(-2)
    hidden.mul_(net.constant)
    return net.half_down(kept), net.down(hidden)


TRICKY = [
    halves_one_token_apart,
    one_half_rolled_along_tokens,
    halves_of_two_runs,
    two_runs_in_another_order_for_each_half,
    cut_between_two_tokens,
    rolled_across_tokens,
    moved_across_tokens_by_padding,
    activated_in_place_while_a_view_is_read,
    scaled_in_place_after_it_was_read,
    one_half_activated,
    halves_with_different_activations,
    one_half_scaled_by_a_number,
    one_half_scaled_by_a_parameter,
    each_half_scaled_by_a_parameter,
    one_half_multiplied_the_other_added,
    clamped_by_a_vector,
    clamped_by_a_constant_vector,
    gate_and_up_trade_places,
    values_in_another_order_for_each_channel,
    sum_of_a_weights_rows,
    one_channel_is_singled_out,
    channels_as_an_attention_mask,
    values_written_in_place,
    activated_in_place,
    gathered,
    sorted_channels,
    the_largest_channel_gates,
    pairs_are_compared,
    a_channel_twice_in_a_product,
    differences_of_neighbours,
    channels_against_channels,
    a_computed_weight,
    a_bilinear_form,
    a_normalised_weight,
]


@pytest.mark.parametrize("forward", TRICKY, ids=lambda forward: forward.__name__)
def test_what_may_be_permuted_leaves_the_outputs(forward):
    check(forward)


def test_a_linear_with_one_output_and_a_bias_is_traced():
    class Scorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.score = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 1)

        def forward(self, x):
            hidden = self.down(self.up(x).relu())
            return self.score(hidden), hidden

    model = Scorer()
    found = propagate(unlifted(torch.export.export(model, (torch.randn(3, 8),), strict=False), model), [0], 1)
    assert [call.parameter for call in found.linears] == ["up.weight", "down.weight", "score.weight"]
    assert len(set(found.contexts[found.axes["up.weight", 0]])) == 1


def test_overlapping_readers_are_all_frozen():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.source = nn.Linear(16, 24)
            self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(8, 16)

        def forward(self, x):
            h = self.source(x)
            return self.a(h[..., :16]) + self.b(h[..., 8:24]) + self.c(h[..., 16:24])

    model = Parts()
    graph_module = unlifted(torch.export.export(model, (torch.randn(3, 16),), strict=False), model)
    plan = find_sites(propagate(graph_module, [], 0), model, results_of(graph_module)[0], NMPattern(2, 4))
    readers = [site for site in plan.sites if site.linears[0] in "abc"]
    assert len(readers) == 3
    assert all(site.space.frozen for site in readers)
