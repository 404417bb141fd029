"""A graph for people: a listing with one line per node."""

from torch import Tensor, fx


def listing(graph_module: fx.GraphModule) -> list[str]:
    """Returns one line per node: name, operator, arguments, shape."""
    return [_line(node) for node in graph_module.graph.nodes]


def _line(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"{node.name} = {node.target} {_shape(node)}".rstrip()
    arguments = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
    return f"{node.name} = {_called(node)}({arguments}) {_shape(node)}".rstrip()


def _called(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default") if node.op == "call_function" else node.op


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    return str(list(value.shape)) if isinstance(value, Tensor) else ""
