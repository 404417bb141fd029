"""Removes permutations that change nothing and merges consecutive ones."""

from torch import fx

from permtriton.passes.graph import NORM_PERMUTE, PERMUTE, Constants, argument, index_value
from permtriton.util.permutation import compose, moved


def cancel_permutations(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrites ``permute(x, identity) -> x`` and ``permute(permute(x, i), j) -> permute(x, i[j])``.

    If all readers of a ``norm_permute`` node permute by the same index, they are merged into that node in the same way.
    """
    constants = Constants(graph_module)
    for node in list(graph_module.graph.nodes):
        if node.target is PERMUTE:
            _merge(node, constants)
            if moved(index_value(argument(node, 1))) == 0:
                node.replace_all_uses_with(node.args[0])
    return graph_module


def _merge(node: fx.Node, constants: Constants) -> None:
    """Merges a permute node with the permute node before it, or into the norm before it."""
    before = argument(node, 0)
    if before.target is PERMUTE and before.args[2:] == node.args[2:]:  # along the same dimension
        node.update_arg(1, _composed(argument(before, 1), argument(node, 1), constants))
        node.update_arg(0, before.args[0])
    elif before.target is NORM_PERMUTE and all(
        user.target is PERMUTE and user.args[1] is node.args[1] for user in before.users
    ):
        before.update_arg(3, _composed(argument(before, 3), argument(node, 1), constants))
        for user in list(before.users):
            user.replace_all_uses_with(before)


def _composed(first: fx.Node, second: fx.Node, constants: Constants) -> fx.Node:
    return constants.index(compose(index_value(first), index_value(second)))
