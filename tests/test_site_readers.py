"""Which ways of reading a space's channels a site may have, and the reason given where the space is frozen."""

import torch
from torch import nn

from permtriton import NMPattern
from permtriton.passes.provenance import propagate
from permtriton.passes.sites import find_sites
from permtriton.passes.trace import export_program, unlifted

from .networks import HALF, check, results_of, space_of


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
    graph_module = unlifted(export_program(model, torch.randn(3, 16)), model)
    plan = find_sites(propagate(graph_module, [], 0), model, results_of(graph_module)[0], NMPattern(2, 4))
    readers = [site for site in plan.sites if site.linears[0] in "abc"]
    assert len(readers) == 3
    assert all(site.space.frozen for site in readers)
