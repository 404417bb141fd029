"""Where a model selects by what it has computed: the rows of experts, and the scores that routers rank."""

import torch
from torch import fx, nn

from permtriton.passes.routed import ranked_products, routed_nodes

aten = torch.ops.aten


class Experts(nn.Module):
    """One expert, and what is done for the rows that are no padding."""

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(8, 1))
        self.expert = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("limit", torch.ones(8))

    def forward(self, states, padding):
        padding = aten.lt.Tensor(padding, self.limit)
        kept = aten.index.Tensor(states, [aten.nonzero_static.default(padding, size=4)])
        scores = aten.mm.default(kept, self.router)
        sent = aten.nonzero_static.default(scores, size=4)
        tokens = aten.index.Tensor(kept, [sent])
        products = aten.mm.default(tokens, self.expert)
        return aten.add.Tensor(kept, aten.index_add.default(kept, 0, sent, products))


def test_rows_that_weights_select():
    """Padding is the same whatever the weights are, and what experts return goes to the rows of all tokens."""
    graph = fx.symbolic_trace(Experts()).graph
    names = {node.name for node in routed_nodes(graph)}
    assert names == {"nonzero_static_default_1", "index_tensor_1", "mm_default_1"}


class Scores(nn.Module):
    """Products that are ranked after a softmax, with a bias and as they are, and products that are not."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, states):
        soft, biased, plain, largest, attention, gate = (aten.mm.default(states, self.weight) for _ in range(6))
        _, chosen = aten.topk.default(aten.softmax.int(soft, -1), 2)
        places = aten.argmax.default(aten.add.Tensor(biased, aten.unsqueeze.default(self.bias, 0)), -1)
        ranks = aten.sort.default(plain)[1]
        values = aten.max.dim(largest, -1)[0]
        pairs = aten.argmax.default(aten.mm.default(attention, states), -1)
        return chosen, places, ranks, values, pairs, aten.argmax.default(aten.add.Tensor(states, gate))


def test_products_that_are_ranked():
    """Neither the values of a maximum are ranks, nor is a sum of two activations or a product of them a router's."""
    graph = fx.symbolic_trace(Scores()).graph
    products = {node for node in graph.nodes if node.target is aten.mm.default and node.args[1].op == "get_attr"}
    assert {node.name for node in ranked_products(graph, products)} == {"mm_default", "mm_default_1", "mm_default_2"}
