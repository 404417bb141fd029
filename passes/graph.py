"""Helpers of the passes: finding weights, products and modules, inserting nodes, adding constants."""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from permtriton.kernels import nm_mask, norm_permute, permute, sparse_linear  # noqa: F401 (registers the operators)

aten = torch.ops.aten
PERMUTE = torch.ops.permtriton.permute.default
NM_MASK = torch.ops.permtriton.nm_mask.default
NORM_PERMUTE = torch.ops.permtriton.norm_permute.default
PACK = torch.ops.permtriton.pack.default
SPARSE_LINEAR = torch.ops.permtriton.sparse_linear.default

INSERTED = "permtriton_"  # prefix of the names of all buffers that passes add
INDEX = "permtriton_index"  # prefix of the names of index buffers
OURS = "permtriton"  # key in ``node.meta``: the node was inserted by a pass
SITE = "permtriton_site"  # key in a permute node's meta: name of the site whose linears read it

# Products with a weight -> the position of the activation among their arguments; the weight is the next argument.
WEIGHT_PRODUCTS: dict[Any, int] = {
    aten.linear.default: 0,
    aten.addmm.default: 1,
    aten.mm.default: 0,
    aten.matmul.default: 0,
    SPARSE_LINEAR: 0,
}
TRANSPOSED = {aten.t.default, aten.mT.default, aten.numpy_T.default, aten.transpose.int}
# The result is the first argument, unchanged or cast.
SAME = {
    aten.alias, aten.clone, aten.contiguous, aten.detach, aten.detach_, aten.dropout, aten.lift_fresh_copy, aten.to,
    aten.type_as, aten._to_copy,
}  # fmt: skip
# Operators after which the last dimension has the same channels, unless its size changes.
RESHAPING = {
    aten.view, aten._unsafe_view, aten.reshape, aten.contiguous, aten.clone, aten.alias, aten.to, aten._to_copy,
    aten.dropout, aten.flatten,
}  # fmt: skip


def copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph module with a copy of the graph, and the same parameters and ``meta``."""
    copy_of = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph), "Compiled")
    copy_of.meta = dict(graph_module.meta)
    return copy_of


def parameter_nodes(graph_module: fx.GraphModule) -> dict[str, fx.Node]:
    """Returns name -> the node that reads it, for each parameter and buffer that the graph uses."""
    return {str(n.target): n for n in graph_module.graph.nodes if n.op == "get_attr"}


def tail(node: fx.Node) -> fx.Node:
    """Returns the last node that passes inserted behind the parameter ``node``, or ``node`` itself if there is none."""
    while len(node.users) == 1:
        (user,) = node.users
        if OURS not in user.meta or user.target in WEIGHT_PRODUCTS or user.args[0] is not node:
            break
        node = user
    return node


def products(weight: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yields each product that reads a weight and the position of its activation among the arguments.

    Transpositions, casts and inserted nodes between the weight and the product are passed through.
    """
    for user in weight.users:
        if user.target in WEIGHT_PRODUCTS and user.args[WEIGHT_PRODUCTS[user.target]] is not weight:
            yield user, WEIGHT_PRODUCTS[user.target]
        elif user.args[0] is weight and (
            OURS in user.meta or transposes(user) or getattr(user.target, "overloadpacket", None) in SAME
        ):
            yield from products(user)


def transposes(node: fx.Node) -> bool:
    return node.target in TRANSPOSED or (node.target is aten.permute.default and list(node.args[1]) == [1, 0])  # type: ignore[arg-type]


def argument(node: fx.Node, position: int) -> fx.Node:
    value = node.args[position]
    assert isinstance(value, fx.Node), f"argument {position} of {node.name} is {value!r}"
    return value


def input_dim(weight: fx.Node) -> int:
    """Returns the dimension of a stored weight that its products contract: 1 in a Linear, 0 in a Conv1D."""
    dim, node = 0, weight
    while True:
        user = next(iter(node.users))
        if user.target in WEIGHT_PRODUCTS:
            return 1 - dim if user.target is aten.linear.default else dim
        if transposes(user):
            dim = 1 - dim
        node = user


def source_of(node: fx.Node) -> fx.Node:
    """Returns the node before all reshaping: walks back over operators that keep the channels of the last dimension."""
    while getattr(node.target, "overloadpacket", None) in RESHAPING:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source.meta["val"].shape[-1] != node.meta["val"].shape[-1]:
            break
        node = source
    return node


def wrap(node: fx.Node, target: Any, arguments: Sequence[Any], value: Any = None) -> fx.Node:
    """Inserts ``target(node, *arguments)`` between a node and all that read it, and returns the new node.

    The new node stands right before its first reader, so that a run of the graph holds one changed weight at a time.

    Args:
        value: Example of the result, for ``meta["val"]``; None takes the example of ``node``.
    """
    value = node.meta["val"] if value is None else value
    new = call_before(min(node.users), target, (node, *arguments), value)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new


def call_before(node: fx.Node, target: Any, arguments: Sequence[Any], value: Any) -> fx.Node:
    """Inserts ``target(*arguments)`` before a node, as part of the same module, and returns the new node.

    Args:
        value: Example of the result, for ``meta["val"]``.
    """
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, tuple(arguments))
    new.meta = {"nn_module_stack": node.meta.get("nn_module_stack", {}), "val": value, OURS: True}
    return new


class Constants:
    """Adds tensors to a graph module, as buffers; equal indices are added once."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._module = graph_module
        self._known: dict[bytes, fx.Node] = {}
        names = (name for name, _ in graph_module.named_buffers() if name.startswith(INSERTED))
        numbers = [int(name.rpartition("_")[2]) for name in names]
        self._number = max(numbers, default=-1)  # continue the numbering of earlier passes
        for node in graph_module.graph.nodes:
            if is_index(node):
                self._known[self._key(index_value(node))] = node
        placeholder = next(node for node in graph_module.graph.nodes if node.op == "placeholder")
        self._first = next(n for n in graph_module.graph.nodes if n.op not in ("placeholder", "get_attr"))
        self.device = placeholder.meta["val"].device

    def index(self, index: Tensor) -> fx.Node:
        """Returns the node that reads an index, int64 ``[C]``, added to the graph if it is new."""
        key = self._key(index)
        if key not in self._known:
            device = "cpu" if self.device.type == "meta" else self.device
            self._known[key] = self.tensor(index.to(device), INDEX)
        return self._known[key]

    def tensor(self, value: Tensor, prefix: str) -> fx.Node:
        """Adds a buffer and returns the node that reads it."""
        self._number += 1
        name, graph = f"{prefix}_{self._number}", self._module.graph
        self._module.register_buffer(name, value)
        with graph.inserting_before(self._first):
            node = graph.get_attr(name)
        node.meta = {"val": value, OURS: True}
        return node

    @staticmethod
    def _key(index: Tensor) -> bytes:
        return index.cpu().numpy().tobytes()


def is_index(node: Any) -> bool:
    """Whether a node reads an index buffer that a pass has added."""
    return isinstance(node, fx.Node) and node.op == "get_attr" and str(node.target).startswith(INDEX)


def index_value(node: fx.Node) -> Tensor:
    """Returns the index that an index node reads, int64 ``[C]`` on the CPU."""
    value: Tensor = getattr(node.graph.owning_module, str(node.target))
    return value.cpu().long()


def absorb_folds(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Removes the permutations behind parameters, in place; to be called once the parameters have been reordered."""
    for node in [n for n in graph_module.graph.nodes if n.op == "get_attr" and not is_index(n)]:
        end = tail(node)
        if end is not node:
            assert end.target is PERMUTE, f"{node.target} is not just permuted, but read by {end.name}"
            end.replace_all_uses_with(node)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def module_path(node: fx.Node) -> str:
    """Returns the name in the model of the innermost module that a node was traced in; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix("model.") if path != "model" else ""


def module_name(node: fx.Node) -> str:
    """Returns `module_path` without the suffix, such as ``@1``, of a repeated call of the same module."""
    return re.sub(r"@\d+", "", module_path(node))


def module_class(node: fx.Node) -> str:
    """Returns the class of the innermost module of a node, such as ``torch.nn.modules.linear.Linear``."""
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack.values())[-1][1] if stack else ""


def norm_input(source: fx.Node, module: str) -> fx.Node | None:
    """Returns the only activation that ``module``, whose output is ``source``, reads; None unless there is just one."""
    inside, waiting, inputs = {source}, [source], set()
    while waiting:
        for producer in waiting.pop().all_input_nodes:
            if producer.op != "get_attr" and producer not in inside:
                if module_path(producer) == module:
                    inside.add(producer)
                    waiting.append(producer)
                else:
                    inputs.add(producer)
    return inputs.pop() if len(inputs) == 1 else None


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside the context, torch uses one thread, because small operators are slower with several on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
