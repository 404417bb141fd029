"""Which ways of reading a space's channels a site may have, and the reason given where the space is frozen."""

import torch

from .networks import HALF, check, space_of


def test_readers_of_overlapping_sets_are_frozen():
    def forward(net, x):
        hidden = net.up(x)
        return net.down(hidden) + net.half_down(hidden[..., :HALF])

    assert "overlapping" in space_of(check(forward), "down").reason


def test_a_reader_of_every_other_channel():
    plan = check(lambda net, x: net.half_down(net.up(x)[..., ::2]))
    space = space_of(plan, "half_down")
    assert (space.segments, space.reason) == ((HALF,), "")
    rows = next(axis.units for axis in space.axes if axis.parameter == "up.weight")
    assert rows.tolist() == [unit for j in range(HALF) for unit in (j, -1)]


def test_a_reader_in_another_order_is_frozen():
    def forward(net, x):
        hidden = net.up(x)
        return net.down(hidden) + net.side(hidden.flip(-1))

    assert "interleaved" in space_of(check(forward), "down").reason


def test_a_reader_of_some_channels_twice_is_frozen():
    def forward(net, x):
        hidden = net.narrow(x)
        return net.down(torch.cat([hidden, hidden[..., :4], hidden[..., :4]], -1))

    assert "more often" in space_of(check(forward), "down").reason


def test_the_reason_names_the_run_that_does_not_fit():
    def forward(net, x):
        pairs = net.values(x).unflatten(-1, (-1, 2)).softmax(-1).flatten(-2)
        return net.inner(torch.cat([net.narrow(x), pairs], -1))

    frozen = space_of(check(forward), "inner").reason
    assert frozen == "channels may move only inside segments of 2, not a multiple of 4"


def test_the_reason_of_an_input_from_outside_says_so():
    plan = check(lambda net, x: net.down(net.up(x)))
    assert "from outside the model" in space_of(plan, "up").reason
