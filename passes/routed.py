"""Where a model selects by what it has computed: the rows of an expert, and the products that rank the experts."""

import operator
from collections.abc import Collection

from torch import fx

from permtriton.passes.graph import aten

# What `permtriton.passes.recorded_branches` puts where a model asks which rows a mask leaves.
SELECTS = aten.nonzero_static
# Operators that write rows into their first argument, whose rows the result has.
WRITES_INTO = {
    aten.index_add, aten.index_copy, aten.index_put, aten.masked_scatter, aten.scatter, aten.scatter_add,
    aten.scatter_reduce, aten.slice_scatter,
}  # fmt: skip

RANKS, WITH_RANKS = {aten.argmax, aten.argsort}, {aten.max, aten.sort, aten.topk}


def routed_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes whose rows depend on weights, by a mask: two models with other weights may select other rows.

    Which rows a mask of the inputs leaves, such as that of padding, is the same in both, and does not count.
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
    """Returns the ``products`` whose results the model ranks, and goes on with the ranks: the scores of a router.

    Between the two are operators on one activation alone, such as a softmax, or the sum with a bias.
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
    """Whether a node returns the places of the largest values, and they are read."""
    packet = getattr(node.target, "overloadpacket", None)
    places = any(user.target is operator.getitem and user.args[1] == 1 for user in node.users)
    return packet in RANKS or (packet in WITH_RANKS and places)
