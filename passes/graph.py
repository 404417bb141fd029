"""What the passes share: finding weights and what reads them, wrapping a weight, constants."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from permtriton.kernels import nm_mask, norm_permute, permute, sparse_linear  # noqa: F401 (registers the operators)

aten = torch.ops.aten
PERMUTE = torch.ops.permtriton.permute.default
NM_MASK = torch.ops.permtriton.nm_mask.default
NORM_PERMUTE = torch.ops.permtriton.norm_permute.default
PACK = torch.ops.permtriton.pack.default
SPARSE_LINEAR = torch.ops.permtriton.sparse_linear.default

INSERTED = "permtriton_"  # how the names of all constants and parameters begin that passes add
INDEX = "permtriton_index"  # how the names of index buffers begin
OURS = "permtriton"  # key in ``node.meta``: the node was inserted by a pass
RUNS = "permtriton_runs"  # key in an index node's meta: sizes of the runs of channels that it may not mix
SITE = "permtriton_site"  # key in a permute node's meta: the site whose linears read it

# Products with a weight -> the position of the activation among their arguments.
PRODUCTS: dict[Any, int] = {
    aten.linear.default: 0,
    aten.addmm.default: 1,
    aten.mm.default: 0,
    aten.matmul.default: 0,
    SPARSE_LINEAR: 0,
}
TRANSPOSED = {aten.t.default, aten.numpy_T.default, aten.transpose.int}
CASTS = {aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.alias, aten.detach, aten.type_as}
# Operators that keep the last dimension's channels as they are, so that siblings behind them share a source.
RESHAPING = {aten.view, aten.reshape, aten.contiguous, aten.clone, aten.alias, aten.to, aten.dropout, aten.flatten}


def copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph module with its own nodes and the same parameters."""
    return fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph), "Compiled")


def parameter_nodes(graph_module: fx.GraphModule) -> dict[str, fx.Node]:
    """Returns the node that reads each parameter or buffer that the graph uses, by name."""
    return {str(n.target): n for n in graph_module.graph.nodes if n.op == "get_attr"}


def tail(node: fx.Node) -> fx.Node:
    """Returns the end of the chain of inserted nodes that turn a parameter into what the model's own nodes read."""
    while len(node.users) == 1:
        (user,) = node.users
        if OURS not in user.meta or user.target in PRODUCTS or user.args[0] is not node:
            break
        node = user
    return node


def products(weight: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yields the products that read a weight, through transpositions and inserted nodes, and where their input is."""
    for user in weight.users:
        if user.target in PRODUCTS and user.args[PRODUCTS[user.target]] is not weight:
            yield user, PRODUCTS[user.target]
        elif user.args[0] is weight and (
            OURS in user.meta or user.target in TRANSPOSED or getattr(user.target, "overloadpacket", None) in CASTS
        ):
            yield from products(user)


def argument(node: fx.Node, position: int) -> fx.Node:
    """Returns an argument that is a node."""
    found = node.args[position]
    assert isinstance(found, fx.Node), f"argument {position} of {node.name} is {found!r}"
    return found


def input_dim(weight: fx.Node) -> int:
    """Returns which dimension of a weight, as it is stored, its products contract: 1 in a Linear, 0 in a Conv1D."""
    dim, node = 0, weight
    while True:
        user = next(iter(node.users))
        if user.target in PRODUCTS:
            return 1 - dim if user.target is aten.linear.default else dim
        if user.target in TRANSPOSED:
            dim = 1 - dim
        node = user


def source_of(node: fx.Node) -> fx.Node:
    """Walks back over operators that keep the channels of the last dimension."""
    while getattr(node.target, "overloadpacket", None) in RESHAPING:
        before = node.args[0]
        assert isinstance(before, fx.Node)
        if before.meta["val"].shape[-1] != node.meta["val"].shape[-1]:
            break
        node = before
    return node


def wrap(node: fx.Node, target: Any, arguments: Sequence[Any], value: Any = None) -> fx.Node:
    """Puts ``target(node, *arguments)`` between a node and all that read it, and returns the new node.

    Args:
        node: whose value is changed.
        target: the operator.
        arguments: its further arguments.
        value: what the result looks like; as ``node`` where None.
    """
    graph = node.graph
    with graph.inserting_after(_last([node, *[a for a in arguments if isinstance(a, fx.Node)]])):
        new = graph.call_function(target, (node, *arguments))
    new.meta = {**_place(node), "val": node.meta["val"] if value is None else value, OURS: True}
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new


def call_before(node: fx.Node, target: Any, arguments: Sequence[Any], value: Any) -> fx.Node:
    """Inserts ``target(*arguments)`` before a node, as part of the module that the node belongs to."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, tuple(arguments))
    new.meta = {**_place(node), "val": value, OURS: True}
    return new


def _place(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("nn_module_stack",) if key in node.meta}


def _last(nodes: Sequence[fx.Node]) -> fx.Node:
    last = nodes[0]
    for node in nodes[1:]:
        last = node if last < node else last
    return last


class Constants:
    """Tensors that a pass adds to a graph module; equal indices are kept once."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._module = graph_module
        self._known: dict[bytes, fx.Node] = {}
        taken = [*dict(graph_module.named_buffers()), *dict(graph_module.named_parameters())]
        ours = [int(name.rpartition("_")[2]) for name in taken if name.startswith("permtriton_")]
        self._number = max(ours, default=-1)
        for node in graph_module.graph.nodes:
            if is_index(node):
                self._known[self._key(index_value(node), node.meta.get(RUNS))] = node
        placeholder = next(node for node in graph_module.graph.nodes if node.op == "placeholder")
        self._first = next(n for n in graph_module.graph.nodes if n.op not in ("placeholder", "get_attr"))
        self.device = placeholder.meta["val"].device

    def index(self, index: Tensor, runs: Sequence[int] | None = None) -> fx.Node:
        """Returns the node of an int64 index ``[C]``; ``runs`` are sizes of runs of channels that it does not mix."""
        key = self._key(index, runs)
        if key not in self._known:
            device = "cpu" if self.device.type == "meta" else self.device
            self._known[key] = self.tensor(index.to(device), INDEX)
            self._known[key].meta[RUNS] = None if runs is None else tuple(runs)
        return self._known[key]

    def tensor(self, value: Tensor, prefix: str) -> fx.Node:
        """Adds a buffer and returns the node that reads it."""
        name = self._name(prefix)
        self._module.register_buffer(name, value)
        return self._read(name, value)

    def parameter(self, value: nn.Parameter, prefix: str) -> fx.Node:
        """Adds a parameter, shared, and returns the node that reads it."""
        name = self._name(prefix)
        self._module.register_parameter(name, value)
        return self._read(name, value)

    def _name(self, prefix: str) -> str:
        self._number += 1
        return f"{prefix}_{self._number}"

    def _read(self, name: str, value: Tensor) -> fx.Node:
        graph = self._module.graph
        with graph.inserting_before(self._first):
            node = graph.get_attr(name)
        node.meta = {"val": value, OURS: True}
        return node

    @staticmethod
    def _key(index: Tensor, runs: Sequence[int] | None) -> bytes:
        return index.cpu().numpy().tobytes() + repr(runs and tuple(runs)).encode()


def is_index(node: Any) -> bool:
    """Whether a node is an index that a pass put there as a constant."""
    return isinstance(node, fx.Node) and node.op == "get_attr" and str(node.target).startswith(INDEX)


def index_value(node: fx.Node) -> Tensor:
    """Returns the int64 index ``[C]`` on the CPU that an index node holds."""
    value: Tensor = getattr(node.graph.owning_module, str(node.target))
    return value.cpu().long()


def absorb(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Removes the constant permutations of parameters, in place, once the parameters themselves have been reordered."""
    for node in [n for n in graph_module.graph.nodes if n.op == "get_attr" and not is_index(n)]:
        end = tail(node)
        if end is not node:
            assert end.target is PERMUTE, f"{node.target} is not only permuted: {end.name}"
            end.replace_all_uses_with(node)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def module_path(node: fx.Node) -> str:
    """Returns the path of the innermost module that a node was traced in, as the model names it."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix("model.") if path != "model" else ""


def norm_input(source: fx.Node, module: str) -> fx.Node | None:
    """Returns the one activation that enters a module's nodes, up to ``source``; None where there are several."""
    inside, waiting, found = {source}, [source], set()
    while waiting:
        for before in waiting.pop().all_input_nodes:
            if before.op != "get_attr" and before not in inside:
                if module_path(before) == module:
                    inside.add(before)
                    waiting.append(before)
                else:
                    found.add(before)
    return found.pop() if len(found) == 1 else None
