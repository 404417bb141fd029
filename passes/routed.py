"""Which activations hold rows that the model selects by what it has computed, such as the tokens of an expert."""

from torch import fx

from permtriton.passes.graph import aten

SELECTS = aten.nonzero_static  # what `permtriton.passes.branches` puts where a model asks which rows a mask leaves
# Operators that write rows into their first argument, whose rows the result has.
WRITES_INTO = {
    aten.index_add, aten.index_copy, aten.index_put, aten.masked_scatter, aten.scatter, aten.scatter_add,
    aten.scatter_reduce, aten.slice_scatter,
}  # fmt: skip


def routed_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes whose rows depend on weights, by a mask: two models with other weights may select other rows.

    Which rows a mask of the inputs leaves, such as that of padding, is the same in both, and does not count.
    """
    assert graph.owning_module is not None
    parameters = dict(graph.owning_module.named_parameters())
    computed: set[fx.Node] = set()  # by a weight
    selected: set[fx.Node] = set()
    for node in graph.nodes:
        packet, before = getattr(node.target, "overloadpacket", None), node.all_input_nodes
        if (node.op == "get_attr" and node.target in parameters) or not computed.isdisjoint(before):
            computed.add(node)
        rows = before[:1] if packet in WRITES_INTO else before
        if not (computed if packet is SELECTS else selected).isdisjoint(rows):
            selected.add(node)
    return selected
