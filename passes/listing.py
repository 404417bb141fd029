"""A graph for people: a listing with one line per node."""

from torch import Tensor, fx

from permtriton.passes.graph import OURS, module_path


def listing(graph_module: fx.GraphModule, module: str = "") -> list[str]:
    """Returns one line per node: name, operator, arguments, shape.

    Args:
        module: name of a module of the model: what was traced in it or its submodules, and the weights that they read;
            empty for all nodes.
    """
    nodes = list(graph_module.graph.nodes)
    if module:
        shown = {n for n in nodes if n.op == "call_function" and f"{module_path(n)}.".startswith(f"{module}.")}
        waiting = list(shown)
        while waiting:
            for before in waiting.pop().all_input_nodes:
                weight = before.op == "get_attr" or (OURS in before.meta and not module_path(before))
                if weight and before not in shown:
                    shown.add(before)
                    waiting.append(before)
        nodes = [node for node in nodes if node in shown]
    return [_line(node) for node in nodes]


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
