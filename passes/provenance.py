"""Channel provenance: run an exported graph on channel ids instead of data.

Every tensor of the graph is replaced by an int64 tensor of the same shape that says what each element carries:

* ``id > 0``: the channel with that id. Every position of every parameter dimension that could be reordered has one.
* ``id < 0``: something that is no channel (a mask, a rotary cosine, a variance), different for each element.

Data movement acts on the ids as it would on data. Elementwise operators join channels: joined channels must be permuted
together. Every operator that touches a channel, and whatever it meets there that is no channel, adds to the channel's
*context*; two channels may change places exactly when they have the same context. A normalisation over the whole stream
gives every channel the same context; rotary cosines give each its own; attention gives one to each head. An operator
without a rule is a barrier: every channel that enters gets a context of its own, with the reason kept.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, fx
from torch.export import ExportedProgram

aten = torch.ops.aten

# Data movement: the operator itself runs on the ids.
MOVEMENT = {
    aten.alias, aten.cat, aten.chunk, aten.clone, aten.contiguous, aten.detach, aten.expand, aten.expand_as,
    aten.flatten, aten.flip, aten.movedim, aten.narrow, aten.numpy_T, aten.permute, aten.repeat, aten.repeat_interleave,
    aten.reshape, aten.roll, aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.squeeze, aten.stack,
    aten.t, aten.transpose, aten.unbind, aten.unflatten, aten.unsqueeze, aten.view, aten.view_as,
}  # fmt: skip
# The same values in another type.
CASTS = {aten.to, aten.type_as, aten._to_copy, aten.dropout}
# Tensors, broadcast and combined element by element, by the same function everywhere.
ELEMENTWISE = {
    aten.abs, aten.clamp, aten.clamp_max, aten.clamp_min, aten.cos, aten.elu, aten.erf, aten.exp,
    aten.gelu, aten.hardswish, aten.hardtanh, aten.leaky_relu, aten.log, aten.mish, aten.neg, aten.reciprocal,
    aten.relu, aten.relu6, aten.rsqrt, aten.sigmoid, aten.silu, aten.sin, aten.softplus, aten.sqrt, aten.square,
    aten.tanh, aten.add, aten.bitwise_and, aten.div, aten.eq, aten.ge, aten.gt, aten.le, aten.lt, aten.masked_fill,
    aten.maximum, aten.minimum, aten.mul, aten.ne, aten.pow, aten.rsub, aten.sub, aten.where, aten.addcmul, aten.lerp,
}  # fmt: skip
# A reduction over ``dim``, blind to the order of what it reduces.
REDUCTION = {aten.amax, aten.amin, aten.mean, aten.sum, aten.var, aten.std, aten.logsumexp}


@dataclass(frozen=True)
class ParameterValue:
    """A parameter on its way to an operator, with its dimensions as transposed so far."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]


@dataclass(frozen=True)
class LinearCall:
    """One matrix product of an activation with a parameter.

    Attributes:
        parameter: the weight's name.
        in_dim: the dimension of the weight that is contracted.
        node: the graph node of the call.
        source: the node of the activation, before any reshaping.
        problem: why the input's channels are not understood; empty where they are.
    """

    parameter: str
    in_dim: int
    node: fx.Node
    source: fx.Node
    problem: str


@dataclass(frozen=True)
class _Event:
    ids: np.ndarray  # unique channel ids
    context: np.ndarray  # uint64, one a channel
    reason: str


@dataclass
class Provenance:
    """The result: channels that must move together share a label, and contexts say which labels may change places.

    Attributes:
        linears: every product with a weight, in execution order.
        axes: (parameter, dimension) -> labels of its positions, int64.
        roles: (parameter, dimension) -> uint64 context that each position picked up before it was joined with other
            activations: it tells a gate row from the up row that it is multiplied with.
        tables: the axes that are columns of an embedding.
        hidden: labels of the last hidden state's channels; empty where it is not made of channels.
        contexts: uint64 ``[labels]``.
        barriers: reasons of operators without a rule that channels entered, each once.
    """

    linears: list[LinearCall]
    axes: dict[tuple[str, int], np.ndarray]
    roles: dict[tuple[str, int], np.ndarray]
    tables: set[tuple[str, int]]
    hidden: np.ndarray
    contexts: np.ndarray
    barriers: list[str]
    _events: list[_Event] = field(repr=False)
    _labels: np.ndarray = field(repr=False)

    def reason(self, labels: np.ndarray) -> str:
        """Returns what first told ``labels`` apart: why their channels may not change places."""
        order = np.argsort(labels)
        for event in self._events:
            sums = np.zeros(labels.size, np.uint64)
            event_labels = self._labels[event.ids]
            inside = np.isin(event_labels, labels)
            np.add.at(sums, order[np.searchsorted(labels, event_labels[inside], sorter=order)], event.context[inside])
            if np.unique(sums).size > 1:
                return event.reason
        return "its channels differ in what reads them"


def propagate(
    exported: ExportedProgram, parameters: Mapping[str, str], outputs: Sequence[int], hidden: int
) -> Provenance:
    """Runs channel ids through an exported program.

    Args:
        exported: the program; none of its values is read.
        parameters: placeholder -> name of the parameter, the same name for tied parameters.
        outputs: positions in the graph's output tuple that a caller sees, whose channel order must therefore stay.
        hidden: position of the last hidden state in it.
    """
    interpreter = _ChannelInterpreter(exported, parameters, outputs, hidden)
    interpreter.run_graph()
    return interpreter.finish()


def _mix(values: np.ndarray) -> np.ndarray:
    """A 64-bit hash (splitmix64's finaliser)."""
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class _ChannelInterpreter(fx.Interpreter):
    def __init__(
        self, exported: ExportedProgram, parameters: Mapping[str, str], outputs: Sequence[int], hidden: int
    ) -> None:
        super().__init__(exported.graph_module)
        self._graph = exported.graph
        self._outputs, self._hidden = outputs, hidden
        self._hidden_ids = np.zeros(0, np.int64)
        self._parameters = parameters
        self._next_id = 1
        self._next_opaque = -1
        self._axis_start: dict[tuple[str, int], tuple[int, int]] = {}
        self._edges: list[np.ndarray] = []
        self._attachments: list[np.ndarray] = []
        self._events: list[_Event] = []
        self._linears: list[LinearCall] = []
        self._tables: set[tuple[str, int]] = set()
        self._scalars: dict[str, int] = {}
        self._barriers: dict[str, None] = {}
        self._rules = self._rule_table()

    # -- running ---------------------------------------------------------------------------------------------------

    def run_graph(self) -> None:
        with np.errstate(over="ignore"):
            self.run(*[None] * sum(node.op == "placeholder" for node in self._graph.nodes))

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = self._node.meta.get("val")
        if target in self._parameters:
            shape = tuple(self._node.meta["val"].shape)
            return ParameterValue(self._parameters[target], shape, tuple(range(len(shape))))
        return self._opaque_like(value) if isinstance(value, Tensor) else value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._opaque_like(value) if isinstance(value, Tensor) else value

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        results = args[0]
        for position in self._outputs:
            if isinstance(results[position], Tensor):
                self._separate(results[position], "it is an output of the model, whose order must stay")
        hidden = results[self._hidden].reshape(-1, results[self._hidden].shape[-1])
        if bool((hidden == hidden[:1]).all()) and bool((hidden > 0).all()):
            self._hidden_ids = hidden[0].numpy()
        return None

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        packet = getattr(target, "overloadpacket", target)
        rule = self._rules.get(packet)
        if rule is not None:
            return rule(target, args, kwargs)
        return self._unknown(str(target), (args, kwargs))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._unknown(f"module {target}", (args, kwargs))

    # -- the rules -------------------------------------------------------------------------------------------------

    def _rule_table(self) -> dict[Any, Callable[[Any, Any, Any], Any]]:
        table: dict[Any, Callable[[Any, Any, Any], Any]] = {}
        table.update(dict.fromkeys(MOVEMENT, self._movement))
        table.update(dict.fromkeys(CASTS, self._cast))
        table.update(dict.fromkeys(ELEMENTWISE, self._elementwise))
        table.update(dict.fromkeys(REDUCTION, self._reduction))
        table[aten.linear] = lambda _, args, kw: self._linear(*args, **kw)
        table[aten.addmm] = lambda _, args, kw: self._linear(args[1], _transposed(args[2]), args[0])
        table.update(dict.fromkeys((aten.matmul, aten.mm, aten.bmm), lambda _, args, kw: self._matmul(*args)))
        table[aten.embedding] = lambda _, args, kw: self._embedding(*args[:2])
        table[aten.layer_norm] = lambda _, args, kw: self._norm(args[0], len(args[1]), args[2:4])
        table[aten.rms_norm] = lambda _, args, kw: self._norm(args[0], len(args[1]), args[2:3])
        table.update(dict.fromkeys((aten.softmax, aten._softmax), self._softmax))
        table[aten.scaled_dot_product_attention] = lambda _, args, kw: self._attention(*args[:4], **kw)
        table[aten._assert_tensor_metadata] = lambda _, args, kw: None
        table[operator.getitem] = lambda _, args, kw: args[0][args[1]]
        return table

    def _movement(self, target: Any, args: Any, kwargs: Any) -> Any:
        packet = target.overloadpacket
        if target in (aten.view.dtype, aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor):
            return self._unknown(str(target), (args, kwargs))
        if isinstance(args[0], ParameterValue) and len(args[0].shape) > 1:
            if packet in (aten.alias, aten.detach, aten.contiguous, aten.clone):
                return args[0]
            if packet in (aten.t, aten.numpy_T) or (packet is aten.transpose and len(args[0].shape) == 2):
                return _transposed(args[0])
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
        args, kwargs = fx.node.map_aggregate((args, kwargs), self._ids_of)
        return target(*args, **kwargs)

    def _cast(self, target: Any, args: Any, kwargs: Any) -> Any:
        return args[0]

    def _elementwise(self, target: Any, args: Any, kwargs: Any) -> Any:
        operands = [a for a in _leaves((args, kwargs)) if isinstance(a, (Tensor, ParameterValue))]
        tensors = [self._ids_of(a) for a in operands]
        if not any(bool((ids > 0).any()) for ids in tensors):
            return self._opaque_like(self._node.meta["val"])
        self._touch(tensors[0])
        joined = tensors[0]
        for operand, other in zip(operands[1:], tensors[1:], strict=True):
            self._touch(other)
            attached = any(isinstance(o, ParameterValue) for o in (operands[0], operand))
            joined = self._join(joined, other, attached)
        return torch.where(joined > 0, joined, self._opaque_like(joined))

    def _reduction(self, target: Any, args: Any, kwargs: Any) -> Any:
        ids = self._ids_of(args[0])
        dims = args[1] if len(args) > 1 else kwargs.get("dim")
        if isinstance(dims, bool) or dims is None or dims == []:
            dims = list(range(ids.ndim))
        elif isinstance(dims, int):
            dims = [dims]
        keep = self._node.meta["val"].ndim == ids.ndim
        return self._reduce(ids, dims, keep)

    def _linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        x = self._ids_of(x)
        if not isinstance(weight, ParameterValue) or len(weight.shape) != 2:
            return self._unknown("a product with a computed weight", (x, weight, bias))
        out_dim, in_dim = weight.dims
        columns = self._axis(weight.name, in_dim, weight.shape[1])
        rows = self._axis(weight.name, out_dim, weight.shape[0])
        flat = x.reshape(-1, x.shape[-1])
        problem = ""
        if not bool((flat > 0).all()):
            problem = "its input channels come from an operator that is not understood, or from outside the model"
        elif not bool((flat == flat[:1]).all()):
            problem = "its input mixes tokens into channels"
        if problem:
            self._separate(torch.cat([flat.reshape(-1), columns]), problem)
        else:
            self._unite(columns, flat[0], attached=True)
        if bias is not None:
            bias = self._ids_of(bias)
            if bias.shape == rows.shape and bool((bias > 0).all()):
                self._unite(bias, rows, attached=True)
            elif rows.numel() > 1:
                self._separate(
                    torch.cat([rows, bias.reshape(-1)]), "what is added to them is no parameter of their own"
                )
        self._linears.append(LinearCall(weight.name, in_dim, self._node, _source(self._node, weight), problem))
        return rows.expand(*x.shape[:-1], -1)

    def _matmul(self, a: Any, b: Any) -> Any:
        if isinstance(b, ParameterValue) and len(b.shape) == 2:
            return self._linear(a, _transposed(b))
        a, b = self._ids_of(a), self._ids_of(b)
        if a.ndim < 2 or b.ndim < 2:
            return self._unknown("a product with a vector", (a, b))
        if not bool((a > 0).any()) and not bool((b > 0).any()):
            return self._opaque_like(self._node.meta["val"])
        return self._reduce(self._join(a.unsqueeze(-1), b.unsqueeze(-3)), [-2], keep=False)

    def _embedding(self, weight: Any, indices: Any) -> Any:
        if not isinstance(weight, ParameterValue):
            return self._unknown("an embedding of a computed table", (weight, indices))
        self._tables.add((weight.name, weight.dims[1]))
        return self._axis(weight.name, weight.dims[1], weight.shape[1]).expand(*indices.shape, -1)

    def _norm(self, x: Any, dims: int, vectors: Sequence[Any]) -> Any:
        x = self._ids_of(x)
        self._touch(x)
        self._reduce(x, list(range(-dims, 0)), keep=True)
        for vector in vectors:
            if vector is not None:
                x = self._join(x, self._ids_of(vector), isinstance(vector, ParameterValue))
        return x

    def _softmax(self, target: Any, args: Any, kwargs: Any) -> Any:
        ids = self._ids_of(args[0])
        if bool((ids > 0).any()):
            self._reduce(ids, [args[1]], keep=True)
            return ids
        return self._opaque_like(ids)

    def _attention(self, q: Any, k: Any, v: Any, mask: Any = None, **_: Any) -> Any:
        if mask is not None and bool((self._ids_of(mask) > 0).any()):
            self._separate(self._ids_of(mask), "they are an attention mask")
        q, k, v = self._ids_of(q), self._ids_of(k), self._ids_of(v)
        if q.ndim > 2 and k.shape[-3] != q.shape[-3]:
            repeats = q.shape[-3] // k.shape[-3]
            k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
        scores = self._reduce(self._join(q.unsqueeze(-2), k.unsqueeze(-3)), [-1], keep=False)
        return self._reduce(self._join(scores.unsqueeze(-1), v.unsqueeze(-3)), [-2], keep=False)

    def _unknown(self, operator: str, arguments: Any) -> Any:
        entering = [v for v in _leaves(arguments) if isinstance(v, (Tensor, ParameterValue))]
        ids = [self._ids_of(v) for v in entering]
        for value in entering:
            if isinstance(value, ParameterValue):
                ids += [self._axis(value.name, d, s) for d, s in zip(value.dims, value.shape, strict=True)]
        if any(bool((i > 0).any()) for i in ids):
            reason = f"{operator} has no channel rule"
            self._barriers[f"{reason} (node {self._node.name})"] = None
            self._separate(torch.cat([i.reshape(-1) for i in ids]), reason)
        result = self._node.meta.get("val")
        if isinstance(result, (tuple, list)):
            return [self._opaque_like(v) if isinstance(v, Tensor) else v for v in result]
        return self._opaque_like(result) if isinstance(result, Tensor) else result

    # -- ids -------------------------------------------------------------------------------------------------------

    def _ids_of(self, value: Any) -> Any:
        """A parameter used as data carries the channels of its last dimension; its others must then stay in order."""
        if not isinstance(value, ParameterValue):
            return value
        if np.prod(value.shape) == 1:
            return torch.full(value.shape, self._scalars.setdefault(value.name, int(self._opaque(()))))
        for dim, size in zip(value.dims[:-1], value.shape[:-1], strict=True):
            self._separate(self._axis(value.name, dim, size), "their parameter is also used as data")
        return self._axis(value.name, value.dims[-1], value.shape[-1]).expand(value.shape)

    def _axis(self, name: str, dim: int, size: int) -> Tensor:
        if (name, dim) not in self._axis_start:
            self._axis_start[name, dim] = (self._next_id, size)
            self._next_id += size
        start, size = self._axis_start[name, dim]
        return torch.arange(start, start + size)

    def _opaque_like(self, value: Tensor) -> Tensor:
        return self._opaque(tuple(value.shape))

    def _opaque(self, shape: tuple[int, ...]) -> Tensor:
        start = self._next_opaque
        self._next_opaque -= int(np.prod(shape))
        return torch.arange(start, self._next_opaque, -1).view(shape)

    # -- joining, context ------------------------------------------------------------------------------------------

    def _join(self, a: Tensor, b: Tensor, attached: bool = False) -> Tensor:
        a, b = torch.broadcast_tensors(a, b)
        a_is, b_is = a > 0, b > 0
        both = a_is & b_is
        if bool(both.any()):
            self._unite(a[both], b[both], attached)
        for ids, is_channel, other in ((a, a_is, b), (b, b_is, a)):
            meets = is_channel & (other < 0)
            if bool(meets.any()):
                self._add_context(
                    ids[meets],
                    other[meets],
                    f"{self._node.target} combines each with a value of its own (a rotary angle, a mask)",
                )
        return torch.where(a_is | ~b_is, a, b)

    def _reduce(self, ids: Tensor, dims: Sequence[int], keep: bool) -> Tensor:
        dims = sorted(d % ids.ndim for d in dims)
        kept = [d for d in range(ids.ndim) if d not in dims]
        rows = ids.permute(*kept, *dims).reshape(*[ids.shape[d] for d in kept], -1)
        first = rows[..., 0]
        fresh = self._opaque_like(first)
        alike = (rows == rows[..., :1]).all(-1)
        mixed = (rows > 0) & ~alike.unsqueeze(-1)
        if bool(mixed.any()):
            self._add_context(
                rows[mixed],
                fresh.unsqueeze(-1).expand_as(rows)[mixed],
                f"{self._node.target} reduces them in separate groups",
            )
        out = torch.where(alike & (first > 0), first, fresh)
        if keep:
            for d in dims:
                out = out.unsqueeze(d)
        return out

    def _touch(self, ids: Tensor) -> None:
        """Notes that an operator acted on channels, so that channels it did not act on are told apart."""
        if bool((ids > 0).any()):
            stamp = self._opaque(()).expand(ids.shape)
            self._add_context(ids[ids > 0], stamp[ids > 0], f"{self._node.target} acts on some of them only")

    def _unite(self, a: Tensor, b: Tensor, attached: bool) -> None:
        """Notes channels that move together; a parameter that is ``attached`` to a channel takes on its role too."""
        joined = a.reshape(-1) * self._next_id + b.reshape(-1)
        pairs = np.unique(joined.numpy())
        edges = np.stack([pairs // self._next_id, pairs % self._next_id])
        self._edges.append(edges)
        if attached:
            self._attachments.append(edges)

    def _add_context(self, ids: Tensor, values: Tensor, reason: str) -> None:
        """Adds, for each channel, a hash of what it met, in the order in which it met it."""
        order = np.argsort(ids.numpy(), kind="stable")
        unique, starts, counts = np.unique(ids.numpy()[order], return_index=True, return_counts=True)
        rank = np.arange(order.size) - np.repeat(starts, counts)
        met = _mix(values.numpy()[order].view(np.uint64) ^ _mix(rank.view(np.uint64)))
        self._events.append(_Event(unique, np.add.reduceat(met, starts), reason))

    def _separate(self, ids: Tensor, reason: str) -> None:
        unique = np.unique(ids.numpy())
        unique = unique[unique > 0]
        start = self._next_opaque
        self._next_opaque -= unique.size
        own = np.arange(start, self._next_opaque, -1, dtype=np.int64)
        self._events.append(_Event(unique, _mix(own.view(np.uint64)), reason))

    # -- result ----------------------------------------------------------------------------------------------------

    def finish(self) -> Provenance:
        total = self._next_id
        count, labels = _components(total, self._edges)
        role_count, role_labels = _components(total, self._attachments)
        with np.errstate(over="ignore"):
            own = np.zeros(role_count, np.uint64)
            for event in self._events:
                np.add.at(own, role_labels[event.ids], event.context)
            own = own[role_labels]
            for number, (start, size) in enumerate(self._axis_start.values()):
                ids = np.arange(start, start + size)
                membership = np.full(size, _mix(np.array([number + (1 << 40)]))[0], np.uint64)
                self._events.append(_Event(ids, membership, "they belong to different parameters"))
            contexts = np.zeros(count, np.uint64)
            for event in self._events:
                np.add.at(contexts, labels[event.ids], event.context)
        axes = {key: labels[start : start + size].astype(np.int64) for key, (start, size) in self._axis_start.items()}
        roles = {key: own[start : start + size] for key, (start, size) in self._axis_start.items()}
        return Provenance(
            self._linears,
            axes,
            roles,
            self._tables,
            labels[self._hidden_ids],
            contexts,
            list(self._barriers),
            self._events,
            labels,
        )


def _components(total: int, edges: Sequence[np.ndarray]) -> tuple[int, np.ndarray]:
    joined = np.concatenate([np.zeros((2, 0), np.int64), *edges], axis=1)
    graph = coo_array((np.ones(joined.shape[1], np.int8), (joined[0], joined[1])), shape=(total, total))
    return connected_components(graph, directed=False)


def _transposed(value: Any) -> Any:
    if isinstance(value, ParameterValue):
        return ParameterValue(value.name, value.shape[::-1], value.dims[::-1])
    return value


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate(value, lambda leaf: found.append(leaf) or leaf)  # type: ignore[func-returns-value]
    return found


_RESHAPING = {aten.view, aten.reshape, aten.contiguous, aten.clone, aten.alias, aten.to, aten.dropout, aten.flatten}


def _source(call: fx.Node, weight: ParameterValue) -> fx.Node:
    """Walks back from a linear's input over operators that keep the channels, so that siblings share a source."""
    node = call.args[1] if getattr(call.target, "overloadpacket", None) is aten.addmm else call.args[0]
    assert isinstance(node, fx.Node)
    while getattr(node.target, "overloadpacket", None) in _RESHAPING:
        before = node.args[0]
        assert isinstance(before, fx.Node)
        if before.meta["val"].shape[-1] != node.meta["val"].shape[-1]:
            break
        node = before
    return node
