"""Which channels reach all that reads them through linear operators that do not tell them apart?

Only there may a rotation of the channels be folded into what writes and what reads them: the values of attention, on
their way from the projection that computes them to the one that reads all heads.
"""

from typing import Any

from torch import fx

from permtriton.model.plan import ChannelSpace
from permtriton.passes.graph import aten, parameter_nodes, products

# Operators that move or copy what their first argument holds.
MOVING = {
    aten.alias, aten.chunk, aten.clone, aten.contiguous, aten.detach, aten.dropout, aten.expand, aten.flatten,
    aten.permute, aten.repeat_interleave, aten.reshape, aten.slice, aten.split, aten.split_with_sizes, aten.squeeze,
    aten.to, aten._to_copy, aten.transpose, aten.unflatten, aten._unsafe_view, aten.unsqueeze, aten.view,
}  # fmt: skip
# Operators that sum the rows of an argument, weighted by the other ones -> its position.
SUMMING = {aten.scaled_dot_product_attention: 2, aten.matmul: 1, aten.bmm: 1}


def passes_linearly(graph_module: fx.GraphModule, space: ChannelSpace) -> bool:
    """Whether every reader of a space gets its channels from their writers by operators of this file alone."""
    weights = parameter_nodes(graph_module)
    writers = {call for axis in space.producers for call, _ in products(weights[axis.parameter])}
    reads = [read for axis in space.axes if axis.reads for read in products(weights[axis.parameter])]
    return bool(writers and reads) and all(_writer_of(call.args[position]) in writers for call, position in reads)


def _writer_of(node: Any) -> Any:
    """Returns the first node before ``node`` that is of another kind."""
    while isinstance(node, fx.Node):
        operator = getattr(node.target, "overloadpacket", node.target)
        if operator in MOVING or getattr(operator, "__name__", "") == "getitem":
            node = node.args[0]
        elif operator in SUMMING and len(node.args) > SUMMING[operator]:
            node = node.args[SUMMING[operator]]
        else:
            break
    return node
