"""Where a model selects by computed values: the rows that an expert reads, and the products that rank experts."""

import operator
from collections.abc import Collection

from torch import fx

from permtriton.passes.graph import aten

# The operator by which `permtriton.passes.recorded_branches` replaces a model's query for the true elements of a mask.
SELECTS = aten.nonzero_static
# Operators that write rows into their first argument; the result has the rows of this argument.
WRITES_INTO = {
    aten.index_add, aten.index_copy, aten.index_put, aten.masked_scatter, aten.scatter, aten.scatter_add,
    aten.scatter_reduce, aten.slice_scatter,
}  # fmt: skip

RANKS, WITH_RANKS = {aten.argmax, aten.argsort}, {aten.max, aten.sort, aten.topk}


def routed_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes whose rows are selected by a mask that depends on weights: other weights may select other rows.

    A mask that depends on inputs alone, such as a padding mask, does not count: it selects the same rows.
    """
    assert graph.owning_module is not None
    parameters = dict(graph.owning_module.named_parameters())
    computed: set[fx.Node] = set()  # nodes whose value depends on a parameter
    selected: set[fx.Node] = set()
    for node in graph.nodes:
        packet, inputs = getattr(node.target, "overloadpacket", None), node.all_input_nodes
        if (node.op == "get_attr" and node.target in parameters) or not computed.isdisjoint(inputs):
            computed.add(node)
        rows = inputs[:1] if packet in WRITES_INTO else inputs
        if not (computed if packet is SELECTS else selected).isdisjoint(rows):
            selected.add(node)
    return selected


def ranked_products(graph: fx.Graph, products: Collection[fx.Node]) -> set[fx.Node]:
    """Returns the ``products`` whose results the model ranks in order to use the ranks: the scores of a router.

    Between a product and its ranking, there may be operators on one activation, such as a softmax or adding a bias.
    """
    activations: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or not activations.isdisjoint(node.all_input_nodes):
            activations.add(node)
    waiting = [node for node in graph.nodes if _ranks(node)]
    ranking: set[fx.Node] = set()
    while waiting:
        inputs = activations.intersection(waiting.pop().all_input_nodes)
        if len(inputs) == 1:
            ranking |= inputs.intersection(products)
            waiting += inputs.difference(products)
    return ranking


def _ranks(node: fx.Node) -> bool:
    """Whether a node ranks values: it returns only their positions, or another node reads the positions it returns."""
    packet = getattr(node.target, "overloadpacket", None)
    places = any(user.target is operator.getitem and user.args[1] == 1 for user in node.users)
    return packet in RANKS or (packet in WITH_RANKS and places)
