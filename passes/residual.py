"""The residual stream that a linear writes into: what its output is added to, and which module reads that alone."""

import re
from collections import defaultdict
from collections.abc import Callable

from torch import fx

from permtriton.passes.graph import aten, module_name, source_of


def residual_readers(graph: fx.Graph) -> Callable[[fx.Node, str], str]:
    """Returns a function that finds the module whose only input is what a product is added to.

    It takes the product's node and the name of its layer. The module is a norm before the branch that the linear ends,
    or the first linear of that branch. The function returns "" where the product is scaled, normalised or summed with
    another branch before it is added, and where no module of the layer that ran before the linear has read the same
    rows, in the same order, and nothing else.
    """
    inside: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function":
            inside[module_name(node)].append(node)  # of all calls: whatever one of them reads counts
    holders = {path[: dot.start()] for path in inside for dot in re.finditer(r"\.", path)}
    readers: dict[fx.Node, list[tuple[fx.Node, str]]] = defaultdict(list)  # activation -> first node and name of each
    for path, nodes in inside.items():
        before = {each for node in nodes for each in node.all_input_nodes if module_name(each) != path}
        inputs = {source_of(each) for each in before if each.op != "get_attr"}
        if len(inputs) == 1 and path not in holders:  # what a module with submodules computes need not read its input
            readers[inputs.pop()].append((nodes[0], path))

    def reader(product: fx.Node, layer: str) -> str:
        residual = _added_to(product)
        candidates = readers[residual] if residual is not None else []
        return next((path for start, path in candidates if start < product and path.startswith(f"{layer}.")), "")

    return reader


def _added_to(product: fx.Node) -> fx.Node | None:
    """Returns what the output of a product is added to, row by row and before any reshaping; None if nothing is."""
    node = product
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.add.Tensor and not user.kwargs:
            first, second = user.args
            other = second if first is node else first
            if not isinstance(other, fx.Node) or other.meta["val"].shape != node.meta["val"].shape:
                return None
            summed_on = len(user.users) == 1 and next(iter(user.users)).target is aten.add.Tensor
            return None if summed_on else source_of(other)  # which is another branch, if the sum is added to a third
        if source_of(user) is not source_of(node):
            return None
        node = user
    return None
