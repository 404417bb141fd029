"""The channels of a graph: their ids, what each has met so far, and which move together.

Ids that repeat (along tokens, mostly) are kept as expanded views, and work is done on what they expand. Most tensors
are views of one range of all ids: their ids are channels, and all different, without a search.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from permtriton.passes.channel_rules import IndexValue, LinearCall, ParameterValue, leaves
from permtriton.passes.graph import INSERTED

Axis = tuple[str, int]  # a parameter and one of its dimensions


@dataclass(frozen=True)
class Event:
    """What an operator added to the contexts of some channels."""

    ids: np.ndarray  # unique channel ids
    context: np.ndarray  # uint64, one a channel, or one for all
    reason: str


@dataclass(frozen=True)
class Joint:
    """Channels that a node joins, pair by pair: ids ``a[i]`` and ``b[i]``."""

    node: str
    a: np.ndarray
    b: np.ndarray
    attached: bool


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps torch from splitting small work: where the machine is busy, waiting for the threads takes far longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Channels:
    """All channels of a graph: their ids, what each has met so far, and which move together.

    Attributes:
        node: the graph node that is running.
        linears: products with a weight so far.
        tables: the axes that are columns of an embedding.
        total: one more than the largest id.
        sizes: (parameter, dimension) -> its size, of all parameters of the graph.
        starts: (parameter, dimension) -> the first of its ids.
        used: the axes that the graph uses, in order.
        joints: channels that move together.
        events: what channels met.
        barriers: reasons of operators without a rule that channels entered.
    """

    def __init__(self, graph_module: fx.GraphModule, *, contexts: bool = True) -> None:
        self.node: fx.Node = next(iter(graph_module.graph.nodes))
        self.linears: list[LinearCall] = []
        self.tables: set[Axis] = set()
        targets = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
        self.sizes: dict[Axis, int] = {}
        for name in sorted(targets):
            value = _attribute(graph_module, name)
            if isinstance(value, nn.Parameter) and not name.startswith(INSERTED):
                self.sizes.update({(name, dim): size for dim, size in enumerate(value.shape)})
        starts = np.cumsum([1, *self.sizes.values()])
        self.starts = {axis: int(start) for axis, start in zip(self.sizes, starts[:-1], strict=True)}
        self.total = int(starts[-1])
        self._ids = torch.arange(self.total)  # id 0 is nobody's
        self.used: dict[Axis, None] = {}
        self._contexts = contexts
        self._next_opaque = -1
        self.joints: list[Joint] = []
        self.events: list[Event] = []
        self._scalars: dict[str, int] = {}
        self.barriers: dict[str, None] = {}

    # -- ids -------------------------------------------------------------------------------------------------------

    def ids_of(self, value: Any) -> Any:
        """A parameter used as data carries the channels of its last dimension; its others must then stay in order."""
        if isinstance(value, IndexValue):
            return self.opaque_like(value.index)
        if not isinstance(value, ParameterValue):
            return value
        if np.prod(value.shape) == 1:
            return torch.full(value.shape, self._scalars.setdefault(value.name, int(self.opaque(()))))
        for dim in range(len(value.shape) - 1):
            self.separate(self.axis(value, dim), "their parameter is also used as data")
        return self.axis(value, -1).expand(value.shape)

    def axis(self, value: ParameterValue, dim: int) -> Tensor:
        """Returns the channels of one of a parameter's present dimensions."""
        key, order = (value.name, value.dims[dim]), value.orders[dim]
        self.used[key] = None
        ids = self._ids[self.starts[key] : self.starts[key] + self.sizes[key]]
        return ids if order is None else ids[order]

    def opaque(self, shape: tuple[int, ...]) -> Tensor:
        """Returns new ids of something that is no channel."""
        start = self._next_opaque
        self._next_opaque -= int(np.prod(shape))
        return torch.arange(start, self._next_opaque, -1).view(shape)

    def opaque_like(self, value: Tensor) -> Tensor:
        """Returns new ids of something that is no channel, of a tensor's shape."""
        return self.opaque(tuple(value.shape))

    def any_channel(self, ids: Tensor) -> bool:
        """Whether any element is a channel."""
        return self._in_range(ids) or bool((_base(ids) > 0).any())

    def all_channels(self, ids: Tensor) -> bool:
        """Whether every element is a channel."""
        return self._in_range(ids) or bool((_base(ids) > 0).all())

    def channels_of(self, x: Tensor) -> tuple[Tensor, str]:
        """Returns the channels of the last dimension, and why they are none; empty where they are."""
        flat = _base(x, keep=x.ndim - 1).reshape(-1, x.shape[-1])
        if not self.all_channels(flat):
            return flat[0], "its input channels come from an operator that is not understood, or from outside the model"
        return flat[0], "" if bool((flat == flat[:1]).all()) else "its input mixes tokens into channels"

    def gather(self, ids: Tensor, index: Tensor, dim: int) -> Tensor:
        """Returns ids with one dimension in the order of ``index``."""
        return _base(ids, keep=dim % ids.ndim).index_select(dim, index).expand(ids.shape)

    def relaxed(self, ids: Tensor) -> Tensor:
        """Returns the same ids as an expanded view along dimensions in which they repeat."""
        if self._in_range(ids) or not ids.numel():
            return ids
        base = _base(ids)
        for dim, size in enumerate(base.shape):
            first = base.narrow(dim, 0, 1)
            if size > 1 and torch.equal(first, base.narrow(dim, size - 1, 1)) and bool((base == first).all()):
                base = first
        return base.expand(ids.shape)

    def repeats_along(self, ids: Tensor, dim: int) -> Tensor | None:
        """Returns the number, among its own along a dimension, of each element, as ids of no channel; ids' shape.

        None where no channel stands there more than once, or every one stands all along it: then what is taken along
        the dimension is the same for each channel.
        """
        base = _base(ids)
        if base.shape[dim] == 1 or self._distinct(base) or not self.any_channel(base):
            return None
        ordered, order = base.sort(stable=True, dim=dim)
        first = torch.ones_like(ordered, dtype=torch.bool)
        size = base.shape[dim] - 1
        first.narrow(dim, 1, size).copy_(ordered.narrow(dim, 1, size) != ordered.narrow(dim, 0, size))
        if bool((first | (ordered < 0)).all()):
            return None
        position = torch.arange(size + 1).view([-1 if d == dim % base.ndim else 1 for d in range(base.ndim)])
        number = position - (position * first).cummax(dim).values
        return self.opaque((size + 1,))[torch.empty_like(number).scatter_(dim, order, number)].expand(ids.shape)

    def _in_range(self, ids: Tensor) -> bool:
        return ids.numel() > 0 and ids.untyped_storage().data_ptr() == self._ids.untyped_storage().data_ptr()

    def _distinct(self, base: Tensor) -> bool:
        """Whether all ids are known to be different from the way that they lie in the range of all."""
        if not self._in_range(base):
            return False
        reach = 0
        for stride, size in sorted(zip(base.stride(), base.shape, strict=True)):
            if size > 1 and stride <= reach:
                return False
            reach += stride * (size - 1)
        return True

    # -- joining, context ------------------------------------------------------------------------------------------

    def join(self, a: Tensor, b: Tensor, attached: bool = False) -> Tensor:
        """Joins two tensors element by element; what is no channel goes into the context of the channel it meets."""
        a, b = torch.broadcast_tensors(a, b)
        a_all, b_all = self.all_channels(a), self.all_channels(b)
        if a_all and b_all:
            self.unite(a, b, attached)
            return a
        a_none, b_none = not self.any_channel(a), not self.any_channel(b)
        if a_none and b_none:
            return a
        reason = f"{self.node.target} combines each with a value of its own (a rotary angle, a mask)"
        self.meet(a, b, reason)
        self.meet(b, a, reason)
        if (a_all and b_none) or (b_all and a_none):
            return a if a_all else b
        shape = a.shape
        a, b = _base_of_both(a, b)
        both = (a > 0) & (b > 0)
        self.unite(a[both], b[both], attached)
        return self.relaxed(torch.where((a > 0) | (b < 0), a, b)).expand(shape)

    def reduce(self, ids: Tensor, dims: Sequence[int], *, keep: bool) -> Tensor:
        """Reduces over ``dims``, blind to the order there: channels that meet lose their names and get a context."""
        dims = sorted(d % ids.ndim for d in dims)
        kept = [d for d in range(ids.ndim) if d not in dims]
        rows = ids.permute(*kept, *dims)
        shape = rows.shape[: len(kept)]
        for d in range(len(kept), ids.ndim):
            if rows.stride(d) == 0:
                rows = rows.narrow(d, 0, 1)
        fresh = self.opaque(tuple(shape))
        if self._in_range(ids) and self._distinct(_base(ids)):
            first = rows
            for _ in dims:
                first = first.select(-1, 0)
            alone = first.numel() == rows.numel()
            if not alone:
                self._add_context(rows, fresh.view(*shape, *[1] * len(dims)).expand(rows.shape), self._apart())
            out = first if alone else fresh
        else:
            rows = rows.reshape(*shape, -1)
            alike = (rows == rows[..., :1]).all(-1)
            mixed = (rows > 0) & ~alike.unsqueeze(-1)
            self._add_context(rows[mixed], fresh.unsqueeze(-1).expand_as(rows)[mixed], self._apart())
            out = self.relaxed(torch.where(alike & (rows[..., 0] > 0), rows[..., 0], fresh))
        for d in dims if keep else ():
            out = out.unsqueeze(d)
        return out

    def _apart(self) -> str:
        return f"{self.node.target} reduces them in separate groups"

    def touch(self, ids: Tensor) -> None:
        """Notes that an operator acted on channels, so that channels it did not act on are told apart."""
        self.meet(ids, self.opaque(()), f"{self.node.target} acts on some of them only")

    def meet(self, ids: Tensor, other: Tensor, reason: str) -> None:
        """Adds to the contexts of channels what they meet that is no channel."""
        if not self._contexts or not self.any_channel(ids):
            return
        ids, other = torch.broadcast_tensors(ids, other)
        if self.all_channels(ids) and not self.any_channel(other):
            self._add_context(ids, other, reason)
        else:
            meets = (ids > 0) & (other < 0)
            self._add_context(ids[meets], other[meets], reason)

    def unite(self, a: Tensor, b: Tensor, attached: bool = False) -> None:
        """Notes channels that move together; a parameter that is ``attached`` to a channel takes on its role too."""
        a, b = _base_of_both(a, b)
        distinct = self._distinct(a) or self._distinct(b)
        first, second = a.reshape(-1).numpy(), b.reshape(-1).numpy()
        if not distinct:
            pairs = np.unique(first * self.total + second)
            first, second = pairs // self.total, pairs % self.total
        if first.size:
            self.joints.append(Joint(self.node.name, first, second, attached))

    def _add_context(self, ids: Tensor, values: Tensor, reason: str) -> None:
        """Adds, for each channel, a hash of the values that it met, in the order in which it met them."""
        if not self._contexts or not ids.numel():
            return
        repeated = [d for d in range(ids.ndim) if ids.stride(d) == 0]
        rest = [d for d in range(ids.ndim) if d not in repeated]
        base = _base(ids).permute(*rest, *repeated).flatten(len(rest)).squeeze(-1) if repeated else ids
        values = _base(values).permute(*repeated, *rest)
        table = values.reshape(-1, *values.shape[len(repeated) :]).numpy()
        rank = np.arange(len(table), dtype=np.uint64).reshape(-1, *[1] * len(rest))
        met = mix(table.view(np.uint64) ^ mix(rank)).sum(0, dtype=np.uint64)
        flat = base.reshape(-1).numpy()
        if self._distinct(base):
            if met.size > 1:
                met = np.broadcast_to(met, base.shape).reshape(-1)
            self.events.append(Event(flat, met.reshape(-1) if met.size > 1 else met.reshape(()), reason))
            return
        met = np.broadcast_to(met, base.shape).reshape(-1)
        order = np.argsort(flat, kind="stable")
        unique, starts, counts = np.unique(flat[order], return_index=True, return_counts=True)
        rank = (np.arange(order.size) - np.repeat(starts, counts)).view(np.uint64)
        self.events.append(Event(unique, np.add.reduceat(mix(met[order] ^ mix(rank)), starts), reason))

    def separate(self, ids: Tensor, reason: str) -> None:
        """Tells every channel apart from every other."""
        if not self._contexts or not ids.numel():
            return
        base = _base(ids)
        unique = base.reshape(-1).numpy()
        if not self._distinct(base):
            unique = np.unique(unique)
            unique = unique[unique > 0]
        self.events.append(Event(unique, mix(self.opaque((unique.size,)).numpy().view(np.uint64)), reason))

    def unknown(self, operator: str, arguments: Any) -> Any:
        """A barrier: every channel that enters is told apart, and what comes out is no channel."""
        entering = [v for v in leaves(arguments) if isinstance(v, (Tensor, ParameterValue))]
        ids = [self.ids_of(v) for v in entering]
        for value in entering:
            if isinstance(value, ParameterValue):
                ids += [self.axis(value, dim) for dim in range(len(value.shape))]
        if any(self.any_channel(i) for i in ids):
            reason = f"{operator} has no channel rule"
            self.barriers[f"{reason} (node {self.node.name})"] = None
            self.separate(torch.cat([i.reshape(-1) for i in ids]), reason)
        result = self.node.meta.get("val")
        if isinstance(result, (tuple, list)):
            return [self.opaque_like(v) if isinstance(v, Tensor) else v for v in result]
        return self.opaque_like(result) if isinstance(result, Tensor) else result


def _attribute(module: nn.Module, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _base(ids: Tensor, keep: int = -1) -> Tensor:
    """Returns a view of size 1 along dimensions in which a tensor is expanded, but ``keep``."""
    for dim in range(ids.ndim):
        if dim != keep and ids.shape[dim] > 1 and ids.stride(dim) == 0:
            ids = ids.narrow(dim, 0, 1)
    return ids


def _base_of_both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    for dim in range(a.ndim):
        if a.shape[dim] > 1 and a.stride(dim) == 0 == b.stride(dim):
            a, b = a.narrow(dim, 0, 1), b.narrow(dim, 0, 1)
    return a, b


def mix(values: np.ndarray) -> np.ndarray:
    """A 64-bit hash (splitmix64's finaliser)."""
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
