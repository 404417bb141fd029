"""Channels that a network does not treat alike never change places, whatever else its plan says."""

import pytest
import torch
from torch import cat
from torch.nn import functional

from .networks import HALF, OUT, TOKENS, WIDE, check


def gate_and_up_trade_places(net, h, x):
    """Unit j's gate is row 2j and its up row 2(n-1-j)+1, so the gate is first in some units and last in others."""
    return net.half_down(h[..., ::2].sigmoid() * h[..., 1::2].flip(-1))


def values_in_another_order_for_each_channel(net, h, x):
    """Every channel meets the same values over the tokens, each in an order of its own."""
    return net.down(h * torch.stack([net.ring.roll(channel) for channel in range(WIDE)], -1))


def channels_as_an_attention_mask(net, h, x):
    query, keys = x.unsqueeze(1), x.unsqueeze(1)[:, :, :WIDE]
    attended = functional.scaled_dot_product_attention(query, keys, keys, attn_mask=h.unsqueeze(1))
    return net.down(h.relu()) + attended[:, 0, :, :OUT]


def values_written_in_place(net, h, x):
    h[..., :HALF] = 0.5
    return net.down(h)


def activated_in_place(net, h, x):
    h = h.clone()
    h[..., :HALF].relu_()
    return net.down(h)


def two_values_of_a_channel_scale_two_heads(net, h, x):
    """The heads at 0 and 1 are multiplied with the same channel, but not with the same value of it."""
    scale = net.narrow(x)[..., :2]
    scales = torch.stack([scale, 3 * scale], -1).flatten(-2)
    return net.down((h.unflatten(-1, (4, -1)) * scales[..., None]).flatten(-2))


def a_normalised_weight(net, h, x):
    weight = net.inner.weight / net.inner.weight.square().sum(1, keepdim=True).sqrt()
    return net.down(functional.linear(h, weight).relu()) + net.side(net.inner(h))


def two_runs_in_another_order_for_each_half(net, h, x):
    b = net.up(x.relu())
    first, second = cat([h[..., :HALF], b[..., HALF:]], -1), cat([b[..., :HALF], h[..., HALF:]], -1)
    return net.down(cat([first, second], 1))


def moved_across_tokens_by_padding(net, h, x):
    pad = net.narrow(x)[:, 0]
    return net.down(cat([pad, h.flatten(1), pad], 1).view(2, TOKENS + 1, WIDE)[:, 1:-1])


def activated_in_place_while_a_view_is_read(net, h, x):
    h = h * 2
    part = h[..., :HALF]
    h.relu_()
    return net.down(h) + net.half_down(part)


def scaled_in_place_after_it_was_read(net, h, x):
    kept = h.view(2, TOKENS, 4, 4)[:, :, :2].flatten(-2)
    h.mul_(net.constant)
    return net.half_down(kept), net.down(h)


# Each gets the network, ``net.up(x)``, and x.
TRICKY = {f.__name__: f for f in list(globals().values()) if getattr(f, "__module__", "") == __name__} | {
    "one half activated": lambda net, h, x: net.down(cat([h[..., :HALF].relu(), h[..., HALF:]], -1)),
    "other activations": lambda net, h, x: net.down(cat([h[..., :HALF].sigmoid(), h[..., HALF:].exp()], -1)),
    "one half scaled by a number": lambda net, h, x: net.down(cat([h[..., :HALF] * 2, h[..., HALF:]], -1)),
    "one half scaled by a parameter": lambda net, h, x: net.down(cat([h[..., :HALF] * net.alpha, h[..., HALF:]], -1)),
    "each half scaled by a parameter": lambda net, h, x: net.down(
        (h.unflatten(-1, (2, HALF)) * cat([net.alpha[None], net.beta])[:, None]).flatten(-2)
    ),
    "one half multiplied, the other added": lambda net, h, x: net.down(
        cat([h[..., :HALF] * (value := x.mean(-1, keepdim=True)), h[..., HALF:] + value], -1)
    ),
    "clamped by a vector": lambda net, h, x: net.down(torch.clamp(h, min=net.vector)),
    "clamped by a constant vector": lambda net, h, x: net.down(h.clamp_max(net.constant)),
    "the sum of a weight's rows": lambda net, h, x: (net.down(h.relu()), net.up.weight.sum(1)),
    "one channel is singled out": lambda net, h, x: net.down(h.relu()) * h[..., :1],
    "gathered": lambda net, h, x: net.down(h[..., torch.arange(WIDE).flip(0)]),
    "sorted": lambda net, h, x: net.down(h.sort(-1).values * net.vector),
    "the largest channel gates": lambda net, h, x: net.down(h * h.argmax(-1, keepdim=True)),
    "pairs are compared": lambda net, h, x: net.down(torch.where(h > h.roll(1, -1), h, net.vector)),
    "a channel twice in a product": lambda net, h, x: net.down(h * h.flip(-1)),
    "differences of neighbours": lambda net, h, x: net.down(h - h.roll(1, -1)),
    "channels against channels": lambda net, h, x: net.down(h @ (h.transpose(1, 2) @ h).softmax(-1)),
    "a computed weight": lambda net, h, x: net.down(functional.linear(h, net.inner.weight * net.vector)),
    "a bilinear form": lambda net, h, x: net.down(h * (h @ net.inner.weight)),
    "halves one token apart": lambda net, h, x: net.down(cat([h[:, 1:, :HALF], h[:, :-1, HALF:]], -1)),
    "one half rolled along tokens": lambda net, h, x: net.down(cat([h[..., :HALF].roll(1, 1), h[..., HALF:]], -1)),
    "halves of two runs": lambda net, h, x: net.down(cat([h[..., :HALF], net.up(x.flip(1))[..., HALF:]], -1)),
    "cut between two tokens": lambda net, h, x: net.down(h.flatten(1)[:, HALF:-HALF].view(2, TOKENS - 1, WIDE)),
    "rolled across tokens": lambda net, h, x: net.down(h.flatten(1).roll(HALF, 1).view(2, TOKENS, WIDE)),
}


@pytest.mark.parametrize("name", TRICKY)
@pytest.mark.slow
def test_what_may_be_permuted_leaves_the_outputs(name):
    check(lambda net, x: TRICKY[name](net, net.up(x), x))
