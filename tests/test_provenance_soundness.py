"""Channels that a network does not treat alike never change places, whatever else its plan says."""

import pytest
import torch
from torch.nn import functional

from .networks import HALF, OUT, TOKENS, WIDE, check


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


def two_values_of_a_channel_scale_two_heads(net, x):
    """The heads at 0 and 1 are multiplied with the same channel, but not with the same value of it."""
    scale = net.narrow(x)[..., :2]
    scales = torch.stack([scale, 3 * scale], -1).flatten(-2)
    return net.down((net.up(x).unflatten(-1, (4, -1)) * scales[..., None]).flatten(-2))


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


TRICKY = [function for function in list(globals().values()) if getattr(function, "__module__", "") == __name__]


@pytest.mark.parametrize("forward", TRICKY, ids=lambda forward: forward.__name__)
@pytest.mark.slow
def test_what_may_be_permuted_leaves_the_outputs(forward):
    check(forward)
