"""Graphs for people: a listing with one line per node, or a drawing in Graphviz's DOT."""

from torch import Tensor, fx

from permtriton.passes.graph import OURS, module_path


def nodes_of(graph_module: fx.GraphModule, module: str = "") -> list[fx.Node]:
    """Returns the nodes that were traced in a module or its submodules, and the weights that they read, in order.

    Args:
        module: Name of a module of the model, or empty for all nodes.
    """
    nodes = list(graph_module.graph.nodes)
    if not module:
        return nodes
    shown = {n for n in nodes if n.op == "call_function" and f"{module_path(n)}.".startswith(f"{module}.")}
    waiting = list(shown)
    while waiting:
        for before in waiting.pop().all_input_nodes:
            weight = before.op == "get_attr" or (OURS in before.meta and not module_path(before))
            if weight and before not in shown:
                shown.add(before)
                waiting.append(before)
    return [node for node in nodes if node in shown]


def listing(graph_module: fx.GraphModule, module: str = "") -> list[str]:
    """Returns one line per node: name, operator, arguments, shape; arguments as in `nodes_of`."""
    return [_line(node) for node in nodes_of(graph_module, module)]


def dot(graph_module: fx.GraphModule, module: str = "") -> str:
    """Returns the graph in DOT; arguments as in `nodes_of`.

    Inserted nodes are filled, parameters and constants are boxes, and edges are labeled with shapes.
    """
    nodes = nodes_of(graph_module, module)
    shown = set(nodes)
    lines = ["digraph permtriton {", '  node [shape=ellipse, fontname="sans-serif", fontsize=11];']
    for node in nodes:
        style = ', style=filled, fillcolor="#ffe0a0"' if OURS in node.meta else ""
        box = ", shape=box" if node.op == "get_attr" else ""
        label = str(node.target) if node.op != "call_function" else f"{node.name}\\n{_called(node)}"
        lines.append(f'  "{node.name}" [label="{label}"{box}{style}];')
        for before in node.all_input_nodes:
            if before not in shown:
                lines.append(f'  "{before.name}" [label="{before.name}", style=dashed];')
                shown.add(before)
            lines.append(f'  "{before.name}" -> "{node.name}" [label="{_shape(before)}", fontsize=9];')
    return "\n".join([*lines, "}"]) + "\n"


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
