"""The residual stream that a linear writes into: what its output is added to, and which module reads that alone."""

from collections import defaultdict
from collections.abc import Callable

from torch import fx

from permtriton.passes.graph import aten, module_path, source_of


def residual_readers(graph: fx.Graph) -> Callable[[fx.Node], str]:
    """Returns a function of a product's node: the module whose only input is what the product is added to.

    That is a norm before the branch that the linear ends, or the first linear of that branch. The function returns ""
    where the product is scaled, normalised or summed with another branch before it is added, and where no module that
    ran before the linear has read the same rows, in the same order, and nothing else.
    """
    inside: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function":
            inside[module_path(node)].append(node)
    readers: dict[fx.Node, tuple[fx.Node, str]] = {}  # activation -> where the first module that reads it alone starts
    for path, nodes in inside.items():
        before = {each for node in nodes for each in node.all_input_nodes if module_path(each) != path}
        inputs = {source_of(each) for each in before if each.op != "get_attr"}
        if len(inputs) == 1:
            readers.setdefault(inputs.pop(), (nodes[0], path))

    def reader(product: fx.Node) -> str:
        residual = _added_to(product)
        start, path = readers.get(residual, (product, "")) if residual is not None else (product, "")
        return path if start < product else ""

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
            return source_of(other)
        if source_of(user) is not source_of(node):
            return None
        node = user
    return None
