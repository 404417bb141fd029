"""The residual stream to which a linear's output is added, and the module that reads only this stream."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping

from torch import fx, nn

from permtriton.model.norms import match_norm
from permtriton.passes.graph import aten, module_name, source_of
from permtriton.passes.plan import Norm, Residual


def residual_finder(graph: fx.Graph, model: nn.Module) -> Callable[[fx.Node, str], Residual | None]:
    """Returns a function that finds the residual stream to which a product is added.

    The function takes the product's node and the name of its layer. The stream's reader is a norm before the branch
    that the product ends, or the branch's first linear. The function returns None if the product is first gated or
    added to another branch, or if no earlier module of the layer reads only the stream, with rows in the same order.
    """
    nodes_by_module: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function":
            nodes_by_module[module_name(node)].append(node)  # nodes of every call, because all inputs count
    readers = _readers(nodes_by_module)

    def through(node: fx.Node) -> tuple[fx.Node | None, str]:
        """Returns the output and the name of the only module that reads an activation; None if either is not unique."""
        while len(node.users) == 1 and source_of(next(iter(node.users))) is source_of(node):
            (node,) = node.users
        paths = {path for _, path in readers[source_of(node)]}
        if len(paths) != 1 or {module_name(user) for user in node.users} != paths:
            return None, ""
        (path,) = paths
        outputs = [value for value in nodes_by_module[path] if any(module_name(user) != path for user in value.users)]
        return (outputs[0] if len(outputs) == 1 else None), path

    def find(product: fx.Node, layer: str) -> Residual | None:
        residual, factor = _added_to(product)
        after, module = through(product) if residual is None else (None, "")
        if after is not None:
            residual, factor = _added_to(after)
        candidates = readers[residual] if residual is not None else []
        paths = [path for start, path in candidates if start < product and path.startswith(f"{layer}.")]
        if not paths or not module:
            return Residual(paths[0], None, factor) if paths else None
        variant = match_norm(model.get_submodule(module), product.meta["val"].shape[-1])
        return None if variant is None else Residual(paths[0], Norm(module, variant), factor)

    return find


def _readers(nodes_by_module: Mapping[str, list[fx.Node]]) -> dict[fx.Node, list[tuple[fx.Node, str]]]:
    """Returns activation -> (first node, name) of each module that reads only this activation."""
    holders = {path[: dot.start()] for path in nodes_by_module for dot in re.finditer(r"\.", path)}
    readers: dict[fx.Node, list[tuple[fx.Node, str]]] = defaultdict(list)
    for path, nodes in nodes_by_module.items():
        before = {before_it for node in nodes for before_it in node.all_input_nodes if module_name(before_it) != path}
        inputs = {source_of(value) for value in before if value.op != "get_attr"}
        if len(inputs) == 1 and path not in holders:  # nodes of a module with submodules may read something else
            readers[inputs.pop()].append((nodes[0], path))
    return readers


def _added_to(product: fx.Node) -> tuple[fx.Node | None, float]:
    """Returns the node of equal shape to which ``product`` is added, and the factor that ``product`` has there.

    Both may be reshaped on the way; the node is the one before that. It is None if there is no such node, if
    ``product`` has several readers or is changed otherwise, or if the sum is itself added to something.
    """
    node, factor = product, 1.0
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.mul.Tensor and isinstance(user.args[1], int | float):
            node, factor = user, factor * user.args[1]
            continue
        if user.target is aten.add.Tensor and not user.kwargs:
            first, second = user.args
            other = second if first is node else first
            if not isinstance(other, fx.Node) or other.meta["val"].shape != node.meta["val"].shape:
                return None, 1.0
            summed_on = len(user.users) == 1 and next(iter(user.users)).target is aten.add.Tensor
            # if the sum is added to another tensor, ``other`` is a second branch and not the stream
            return None if summed_on else source_of(other), factor
        if source_of(user) is not source_of(node):
            return None, 1.0
        node = user
    return None, 1.0
