"""Which activations of a graph hold rows that the model selects by what it has computed."""

import torch
from torch import fx, nn

from permtriton.passes.routed import routed_nodes

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
