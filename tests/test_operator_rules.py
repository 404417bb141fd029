"""Operators beside linears and attention: convolutions, padding, sums over tokens, outer products; small networks.

Every network goes through `networks.check`: whatever its plan allows to be permuted is permuted at random, and the
outputs must not change.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from permtriton.passes.pipeline import permutation_passes, run_passes
from permtriton.passes.provenance import propagate
from permtriton.passes.trace import export_program, unlifted
from permtriton.passes.weight_folds import moves_of

from . import zoo
from .networks import HALF, IN, TOKENS, WIDE, Net, axes_of, check, space_of

HEADS = WIDE // 4


def depthwise(net, x, pad=3):
    return functional.conv1d(x.mT, net.depthwise, net.vector, padding=pad, groups=WIDE)[..., :TOKENS].mT


def heads(x):
    return x.unflatten(-1, (HEADS, 4))


def chosen(x):
    """Positions of tokens that depend on data, int64 ``[TOKENS, 2]``."""
    return x[0].topk(2, dim=-1).indices % TOKENS


def positions(x):
    """Positions of tokens that are read off channels, int64 ``[channels]``."""
    return (8 * x[0, 0]).clamp(0, TOKENS - 1).to(torch.int64)


def scan(net, x):
    """A state-space layer by hand: one state per channel and per row of ``narrow``."""
    hidden, state = net.up(x), torch.zeros(2, WIDE, HALF, dtype=x.dtype)
    write, read, found = net.narrow(x), net.values(x), []
    decay = (-net.decay.exp())[None, None] * net.gate(x).sigmoid()[..., None]
    inputs = hidden[..., None] * write[:, :, None]
    for token in range(3):
        state = decay[:, token].exp() * state + inputs[:, token]
        found.append((state @ read[:, token, :, None])[..., 0])
    return net.down(torch.stack(found, 1))


def delta_rule(net, x):
    """Linear attention in chunks that corrects its state, which starts as zeros."""
    state, found = torch.zeros(2, HALF, WIDE, dtype=x.dtype), []
    for q, k, v in zip(*(part.split(HALF, 1) for part in (net.narrow(x), net.values(x), net.up(x))), strict=True):
        new = v - k @ state
        found.append(q @ state + (q @ k.mT).tril() @ new)
        state = state * net.alpha + k.mT @ new
    return net.down(torch.cat(found, 1))


def gated_heads(net, x, order=None):
    """Heads that share the weight of their norm, each with channels of the gate of its own, in some order."""
    normed = heads(net.up(x)) / heads(net.up(x)).norm(dim=-1, keepdim=True) * net.slope
    gate = net.gate(x) if order is None else net.gate(x)[..., torch.tensor(order)]
    return net.down((normed * heads(gate)).flatten(-2))


def written(hidden, mask, row):
    hidden = hidden.clone()
    hidden[mask] = row
    return hidden


def blocks(net, x):
    """A product with a weight for every head, as the gates of RecurrentGemma."""
    return (heads(x).flatten(0, 1).transpose(0, 1) @ net.blocks).transpose(0, 1).reshape(x.shape)


def under_a_mask(x):
    """Rows whose number depends on data, and zeros for the others."""
    mask, result = x[:, 0].sum(-1) > 0, torch.zeros_like(x)
    result[mask] = x[mask].relu()
    return result


def rows_of_time(x):
    """Every value of a token and all before it, weighted by how far back each is."""
    return torch.cumsum(x, 1) / functional.pad(x, (0, 0, 2, -2)).abs().amax(-1, keepdim=True).add(1)


FREE = {
    "depthwise": lambda net, x: net.down(depthwise(net, net.up(x)).relu()),
    "conv": lambda net, x: net.down(functional.conv1d(net.up(x).mT, net.conv, net.vector, padding=1).mT),
    "padded tokens": lambda net, x: net.down(functional.pad(net.up(x), (0, 0, 1, -1))),
    "sums over tokens": lambda net, x: net.down(rows_of_time(net.up(x))),
    "a constant token": lambda net, x: net.down(torch.cat([torch.zeros_like(net.up(x)[:, :1]), net.up(x)], 1)),
    "no token, and a constant one": lambda net, x: net.down(
        torch.cat([x.new_zeros(0), x.new_zeros(2, 0, WIDE), torch.zeros_like(net.up(x)[:, :1]), net.up(x)], 1)
    ),
    "a constant": lambda net, x: net.down(net.up(x) * torch.full_like(net.up(x), 2.0)),
    "outer product": lambda net, x: net.down((net.up(x)[..., None] * net.narrow(x)[:, :, None]).sum(-1)),
    "a table by rows": lambda net, x: net.down((net.decay * net.up(x)[..., None]).sum(-1)),
    "linear attention": lambda net, x: net.down(net.narrow(x) @ (net.values(x).mT @ net.up(x))),
    "einsum": lambda net, x: net.down(torch.einsum("bti,bsi,bso->bto", net.gate(x), net.inner(net.up(x)), net.up(x))),
    "scan": scan,
    "delta rule": delta_rule,
    "a row by a mask": lambda net, x: net.down(written(net.up(x), x[..., 0] > 0, net.vector)),
    "glu": lambda net, x: net.half_down(functional.glu(net.up(x), -1)),
    "prelu": lambda net, x: net.down(functional.prelu(net.up(x).mT, net.vector).mT),
    "norm": lambda net, x: net.down(net.up(x) / torch.linalg.vector_norm(net.up(x), dim=-1, keepdim=True)),
    "min": lambda net, x: net.down(torch.min(net.up(x), net.gate(x)) + net.up(x).max(1, keepdim=True).values),
    "functions": lambda net, x: net.down(functional.logsigmoid(net.up(x)) + torch.expm1(net.gate(x)).log1p()),
    "baddbmm": lambda net, x: net.down(torch.baddbmm(net.up(x), x[..., :TOKENS], net.gate(x))),
    "group_norm": lambda net, x: net.down(functional.group_norm(net.up(x).mT, 1, net.vector).mT),
    "tokens by data": lambda net, x: net.down(net.up(x)[:, chosen(x)].relu().sum(2)),
    "tokens added by data": lambda net, x: net.down(
        torch.zeros(2, TOKENS, WIDE, dtype=x.dtype).index_add(1, chosen(x)[:, 0], net.up(x)) + net.gate(x)
    ),
    "a weight for every head": lambda net, x: net.down(net.up(x) * blocks(net, net.up(x)).sigmoid()),
    "joined weights": lambda net, x: (
        net.down(net.up(x)) + (net.up(x) @ torch.cat([net.inner.weight, net.side.weight]).mT)[..., WIDE:]
    ),
    "one position for two": lambda net, x: net.down(torch.cat([net.up(x)[:, :4], net.gate(x)[:, 4:]], 1) + net.vector),
    "rows under a mask": lambda net, x: net.down(under_a_mask(net.up(x))),
    "another row for each token": lambda net, x: net.down(
        written(net.up(x)[0], torch.ones(TOKENS, dtype=torch.bool), net.tokens.weight[:, :WIDE])
    ),
    "looked up by rows": lambda net, x: net.down(
        net.up(x).index_put((x[..., 0] > 0,), net.positions[(x[..., 0] > 0).nonzero()[:, 1]])
    ),
    "rows put by data": lambda net, x: net.down(net.gate(x)[0].index_put((chosen(x)[:, 0],), net.up(x)[0])),
    "a vector for all heads": lambda net, x: net.down(
        (heads(net.up(x)) * net.blocks[0, 0] + heads(net.gate(x))).flatten(-2)
    ),
    "results of linears added up": lambda net, x: net.down(
        torch.cat([net.up(x).relu(), net.gate(x)]).unflatten(0, (2, -1)).sum(0)
    ),
}


@pytest.fixture(autouse=True)
def _more_parameters(monkeypatch):
    """Gives `networks.Net` a depthwise kernel, a kernel, and a table with a row per channel."""
    from . import networks

    before = networks.Net.__init__

    def more(self, forward):
        before(self, forward)
        self.depthwise = nn.Parameter(torch.empty(WIDE, 1, 4))
        self.blocks = nn.Parameter(torch.empty(HEADS, 4, 4))
        self.grouped = nn.Parameter(torch.empty(WIDE, 4, 3))
        self.conv = nn.Parameter(torch.empty(WIDE, WIDE, 3))
        self.decay = nn.Parameter(torch.empty(WIDE, HALF))
        self.slope = nn.Parameter(torch.empty(4))
        self.by_head = nn.Parameter(torch.empty(HEADS, 1, 3, 1))
        self.register_buffer("halves", torch.tensor([1.0, 2.0]).repeat_interleave(HALF))

    monkeypatch.setattr(networks.Net, "__init__", more)


@pytest.mark.parametrize("name", FREE)
@pytest.mark.slow
def test_channels_that_are_alike_are_free(name):
    plan = check(FREE[name])
    space = space_of(plan, "half_down" if name == "glu" else "down")
    assert (len(space.segments), space.reason, plan.barriers) == (1, "", [])


def test_a_depthwise_kernel_moves_by_rows():
    space = space_of(check(FREE["depthwise"]), "down")
    assert {"depthwise[0]", "vector[0]", "up.weight[0]"} <= axes_of(space)
    assert "depthwise[2]" not in axes_of(space)


@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x: net.down((heads(net.up(x)) * net.gate(x)[..., :HEADS, None].exp()).flatten(-2)),
        lambda net, x: net.down((heads(net.up(x)) * net.vector[:HEADS, None]).flatten(-2)),
        lambda net, x: net.down(functional.group_norm(net.up(x).mT, HEADS, net.vector).mT),
        lambda net, x: net.down(
            functional.conv2d(heads(net.up(x)).transpose(1, 2), net.by_head, padding=(1, 0), groups=HEADS)
            .transpose(1, 2)
            .flatten(-2)
        ),
    ],
    ids=["a value per head", "a parameter per head", "group_norm", "a kernel per head"],
)
def test_what_differs_between_heads_keeps_channels_in_their_head(forward):
    plan = check(forward)
    space = space_of(plan, "down")
    assert (space.segments, space.reason) == ((4,) * HEADS, "")
    graph_module = unlifted(export_program(net := Net(forward), torch.randn(2, TOKENS, IN)), net)
    moves = moves_of(plan, zoo.random_indices(plan))
    run_passes(graph_module, permutation_passes(moves))  # the same channels move together in any order


def test_heads_that_share_a_norm_move_alike_in_the_gate():
    assert (space_of(plan := check(gated_heads), "down").segments, plan.barriers) == ((4,), [])


def test_a_gate_whose_order_is_another_one_in_one_place_stays_there():
    """The first channels of two heads trade places in the gate: a permutation that moves heads alike would undo it."""
    space = space_of(check(lambda net, x: gated_heads(net, x, [4, 1, 2, 3, 0, *range(5, WIDE)]), "1:2"), "down")
    assert space.segments == (1, 3)
    assert space.reason


def test_equal_numbers_of_a_constant_vector_are_one_value():
    assert space_of(check(lambda net, x: net.down(net.up(x) * net.halves)), "down").segments == (HALF, HALF)


FROZEN = {
    "no longer zeros": lambda net, x: net.down(
        net.up(x) + net.gate(x) @ (torch.zeros(WIDE, WIDE, dtype=x.dtype) + net.constant)
    ),
    "a mask of channels": lambda net, x: net.down(
        written(net.up(x), net.gate(x).flip(-1) > 0, net.alpha) * net.gate(x)
    ),
    "a kernel across the channels of a head": lambda net, x: net.down(
        functional.conv2d(heads(net.up(x)).transpose(1, 2), net.by_head.mT, padding=(0, 1), groups=HEADS)
        .transpose(1, 2)
        .flatten(-2)
    ),
    "a part that is empty": lambda net, x: net.down(torch.cat([net.up(x)[:, :1], net.gate(x)[:, TOKENS:]], 1)),
    "sums over channels": lambda net, x: net.down(torch.ones_like(net.up(x)).cumsum(-1) * net.up(x)),
    "padded values": lambda net, x: net.down(functional.pad(net.alpha.expand(1), (0, WIDE - 1)) * net.up(x)),
    "the largest position": lambda net, x: net.down(net.up(x) * net.up(x).max(-1, keepdim=True).indices),
    "triangle": lambda net, x: net.down(net.up(x)[:, :WIDE].tril()),
    "a diagonal product": lambda net, x: net.down(net.up(x) * net.up(x).flip(-1)),
    "outer product of both": lambda net, x: net.down((net.up(x)[..., None] * net.constant).sum(1)),
    "norm of a constant": lambda net, x: net.down(
        net.up(x) * functional.layer_norm(torch.cat([net.constant[:HALF], net.constant[:HALF]])[None], (WIDE,))
    ),
    "grouped conv": lambda net, x: net.down(net.up(x)) + net.side(
        functional.conv1d(net.up(x).mT, net.grouped, groups=HEADS, padding=1).mT
    ),
    "reflected": lambda net, x: net.down(functional.pad(net.up(x), (2, 2), mode="reflect")[..., 2:-2].cumsum(-1)),
    "heads by data": lambda net, x: net.down(heads(net.up(x))[:, :, chosen(x)[:HEADS, 0] % HEADS].flatten(-2)),
    "rows by channels": lambda net, x: net.down(net.up(x)[:, positions(net.up(x))]),
    "heads added by data": lambda net, x: net.down(
        heads(torch.zeros(2, TOKENS, WIDE, dtype=x.dtype))
        .index_add(2, chosen(x)[:HEADS, 0] % HEADS, heads(net.up(x)))
        .flatten(-2)
    ),
    "added by channels": lambda net, x: net.down(net.up(x).index_add(1, positions(net.up(x)), net.gate(x)[:, :WIDE])),
    "heads put by data": lambda net, x: net.down(
        heads(torch.zeros(2, TOKENS, WIDE, dtype=x.dtype))
        .movedim(2, 0)
        .index_put((chosen(x)[:HEADS, 0] % HEADS,), heads(net.up(x)).movedim(2, 0))
        .movedim(0, 2)
        .flatten(-2)
    ),
    "looked up by channels": lambda net, x: net.down(
        net.up(x) + (net.decay[(net.up(x) > 0).to(torch.int64)] * net.vector[:, None]).sum()
    ),
    "gathered by channels": lambda net, x: net.side(net.up(x)) + net.down(
        net.constant.expand(2, TOKENS, WIDE).gather(-1, (net.up(x) > 0).to(torch.int64))
    ),
    "gathered by what is largest": lambda net, x: net.side(net.up(x)) + net.down(
        net.gate(x).gather(1, net.up(x).max(1, keepdim=True).indices)
    ),
    "put by channels": lambda net, x: net.down(
        net.up(x)[0].index_put((positions(net.up(x)),), net.gate(x)[0, :WIDE])[None]
    ),
    "halves added up": lambda net, x: net.down(net.up(x) * net.up(x).unflatten(-1, (2, -1)).sum(-2).repeat(1, 1, 2)),
    "a computed kernel": lambda net, x: net.down(
        functional.conv1d(net.up(x).mT, net.depthwise * net.alpha, groups=WIDE, padding=2)[..., :TOKENS].mT
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.slow
def test_channels_that_are_not_alike_keep_their_order(name):
    linear = "side" if name.startswith("gathered") else "down"
    assert space_of(check(FROZEN[name]), linear).reason


def test_channels_beside_padding_do_not_mix_with_others():
    space = space_of(check(lambda net, x: net.down(functional.pad(net.narrow(x), (HALF, 0)) + net.up(x))), "down")
    assert (space.segments, space.reason) == ((HALF, HALF), "")


def test_an_outer_product_of_halves_keeps_them_apart():
    def forward(net, x):
        first, second = net.up(x).chunk(2, -1)
        outer = first[..., None] * net.narrow(x)[:, :, None]
        return net.down(torch.cat([outer.sum(-1), second], -1))

    assert space_of(check(forward), "down").segments == (HALF, HALF)


def half(net, x):
    return net.half_down(net.narrow(x))


def outer(net, x):
    return net.up(x)[..., None] * net.narrow(x)[:, :, None]


ROWS = torch.arange(TOKENS) % WIDE
VARYING = {
    "table": lambda net, x: net.down((outer(net, x) * net.decay).sum(-1)) + half(net, x),
    "table before": lambda net, x: (
        net.down((net.decay * net.up(x)[..., None] * net.narrow(x)[:, :, None]).sum(-1)) + half(net, x)
    ),
    "slice of a table": lambda net, x: net.down((net.up(x)[..., None] * net.decay[:, :2]).sum(-1)),
    "softmax of a table": lambda net, x: net.down((net.up(x)[..., None] * net.decay.softmax(0)).sum(-1)),
    "constant": lambda net, x: (
        net.down((net.up(x)[..., None] * net.constant[:HALF] * net.narrow(x)[:, :, None]).sum(-1)) + half(net, x)
    ),
    "constant in each head": lambda net, x: net.down(
        (heads(net.up(x)) * (net.gate(x)[..., :HEADS, None] * net.constant[:4])).flatten(-2)
    ),
    "tokens": lambda net, x: (
        net.down(net.up(x)[:, 0]) + net.side((net.up(x)[:, 0, :, None] * net.gate(x)[:, :WIDE]).sum(1))
    ),
    "rolled over all": lambda net, x: net.down(net.up(x).roll(1)),
    "a table in place of zeros": lambda net, x: net.down(
        (net.up(x)[..., None] * torch.zeros_like(net.decay).add(net.decay.sigmoid())).sum(-1)
    ),
    "looked up": lambda net, x: net.down(net.inner(net.up(x))) + net.side(functional.embedding(ROWS, net.inner.weight)),
    "looked up by data": lambda net, x: (
        net.down(net.inner(net.up(x))) + net.side(net.inner.weight[(x[..., 0] > 0).long()])
    ),
}


@pytest.mark.parametrize("name", VARYING)
@pytest.mark.slow
def test_channels_that_meet_values_which_stay_in_place_stay_too(name):
    check(VARYING[name])


def test_sizes_that_depend_on_data_are_a_barrier():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            hidden = self.up(x)
            sizes = (hidden[:, 0] > 0).sum().item()
            torch._check(sizes >= 0)
            torch._check(sizes <= 3)
            first, second = hidden.split([sizes, 3 - sizes])
            return self.down(torch.cat([first.relu(), second])[:3])

    model = Routed()
    found = propagate(unlifted(export_program(model, torch.randn(3, 8)), model), [0], 0)
    assert any("split_with_sizes" in barrier for barrier in found.barriers)
    assert len(set(found.contexts[found.axes["up.weight", 0]])) == 16
