"""The channels of a graph: their ids, their contexts, and which of them move together.

Two things keep this fast. Where ids repeat along a dimension (mostly tokens), a tensor of ids is an expanded view, and
work is done once for all repetitions. And most tensors are views of `Channels._ids`, which holds all channel ids: their
storage and strides tell, without a search, that their ids are channels and all different.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from permtriton.passes.channel_ids import (
    both_unexpanded,
    differing_dims,
    differs,
    mix,
    numbered,
    of_several_axes,
    unexpanded,
    values_of,
)
from permtriton.passes.graph import index_value, is_index
from permtriton.passes.graph_values import Crossed, ParameterValue, Products, leaves

AxisKey = tuple[str, int]  # a parameter and one of its dimensions


@dataclass(frozen=True)
class ContextChange:
    """What one operator adds to the contexts of some channels."""

    ids: np.ndarray  # int64, channel ids
    context: np.ndarray  # uint64 of the same shape, or one for all channels
    reason: str  # why channels with different contexts may not change places


@dataclass(frozen=True)
class Joint:
    """Channels that a node joins, pair by pair."""

    node: str  # name of the node
    a: np.ndarray  # int64, channel ids
    b: np.ndarray  # int64 of the same shape: channel ``b[i]`` moves together with ``a[i]``
    # whether one of each pair belongs to a parameter that acts on the other (a bias, a norm vector, a column), so that
    # both have the same role
    attached: bool
    # uint64 of the same shape, or one for all pairs: hash of which occurrences of the two channels are joined
    places: np.ndarray


class Channels(fx.Interpreter):
    """All channels of a graph: their ids, their contexts, and which of them move together.

    The class is the interpreter that runs the graph on ids, because a rule may need the running node and its inputs.

    Args:
        contexts: Whether to record contexts; False records only joints, which is faster.
    """

    def __init__(self, graph_module: fx.GraphModule, *, contexts: bool = True) -> None:
        super().__init__(graph_module)
        self.node: fx.Node = next(iter(graph_module.graph.nodes))  # the node that is running
        self.linears: dict[str, Products] = {}  # weight -> the products with it that have run so far
        self.spans: dict[AxisKey, slice] = {}  # ids of every dimension of every parameter of the graph
        self.total = 1  # one more than the largest id
        for name in sorted({str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}):
            value = attrgetter(name)(graph_module)
            for dim, size in enumerate(value.shape if isinstance(value, nn.Parameter) else ()):
                self.spans[name, dim] = slice(self.total, self.total + size)
                self.total += size
        self.starts = np.array([span.start for span in self.spans.values()], np.int64)  # first ids, in order
        self._ids = torch.arange(self.total)  # id 0 belongs to no channel
        self.used_axes: dict[AxisKey, None] = {}  # axes that the graph has used so far, in order of first use
        self._contexts = contexts
        self._next_opaque = -1
        self.joints: list[Joint] = []
        self.context_changes: list[ContextChange] = []
        self._scalars: dict[str, int] = {}
        self.barriers: dict[str, None] = {}  # reasons of the barriers that channels entered, each once and in order

    # -- ids -------------------------------------------------------------------------------------------------------

    def ids_of(self, value: Any, dim: int | None = None) -> Any:
        """Returns an argument of an operator as one tensor of ids, if it is a parameter or `Crossed`.

        A parameter that is used as data carries the channels of one dimension; its other dimensions must then keep
        their order. Of `Crossed` parts, the one that differs along the last dimension is returned; the channels of the
        other parts must keep their order.

        Args:
            value: Any argument; other kinds are returned unchanged.
            dim: Dimension of the parameter whose channels are returned; None for its last one of size above 1.
        """
        if isinstance(value, Crossed):
            differing = next((part for part in value.parts if differs(part, -1)), value.parts[0])
            others = [part for part in value.parts if part is not differing]
            self.separate(others, f"{self.node.target} has a rule for the other factor of a product only")
            return differing
        if not isinstance(value, ParameterValue):
            return value
        if np.prod(value.shape) == 1:
            return torch.full(value.shape, self._scalars.setdefault(value.name, int(self.new_ids(()))))
        stored_dims = [d for d, stored_dim in enumerate(value.dims) if stored_dim is not None]
        dim = max((d for d in stored_dims if value.shape[d] > 1), default=stored_dims[-1]) if dim is None else dim
        self.separate([self.axis(value, d) for d in stored_dims if d != dim], "their parameter is also used as data")
        return self.axis(value, dim).view([-1 if d == dim else 1 for d in range(len(value.shape))]).expand(value.shape)

    def axis(self, value: ParameterValue, dim: int) -> Tensor:
        """Returns the channels of a parameter's current dimension ``dim``, in their current order, ``[size]``."""
        stored_dim, order = value.dims[dim], value.orders[dim]
        assert stored_dim is not None, f"{value.name} has no dimension at position {dim}"
        self.used_axes[value.name, stored_dim] = None
        ids = self._ids[self.spans[value.name, stored_dim]]
        return ids if order is None else ids[order]

    def axes(self, value: ParameterValue) -> list[Tensor]:
        """Returns the channels of every stored dimension of a parameter."""
        return [self.axis(value, dim) for dim, stored in enumerate(value.dims) if stored is not None]

    def all_ids(self, arguments: Any) -> list[Tensor]:
        """Returns all ids that arguments of an operator hold, including those of every dimension of a parameter."""
        ids: list[Tensor] = []
        for value in leaves(arguments):
            if isinstance(value, ParameterValue):
                ids += self.axes(value)
            elif isinstance(value, Crossed):
                ids += value.parts
            elif isinstance(value, Tensor):
                ids.append(value)
        return ids

    def index_argument(self, position: int) -> Tensor | None:
        """Returns the index, int64 ``[C]``, that a pass has put at a position of the node's arguments, or None."""
        node: Any = self.node.args[position]
        return index_value(node) if is_index(node) else None

    def new_ids(self, shape: Sequence[int]) -> Tensor:
        """Returns new, distinct ids for values that are not channels."""
        start = self._next_opaque
        self._next_opaque -= int(np.prod(shape))
        return torch.arange(start, self._next_opaque, -1).view(tuple(shape))

    def renew_ids(self, ids: Tensor) -> Tensor:
        """Returns the ids of an operator's result: channels keep their ids, all other elements get new ones."""
        return ids if self.all_channels(ids) else torch.where(ids > 0, ids, self.new_ids(ids.shape))

    def any_channel(self, ids: Tensor) -> bool:
        return self._in_range(ids) or bool((unexpanded(ids) > 0).any())

    def all_channels(self, ids: Tensor) -> bool:
        return self._in_range(ids) or bool((unexpanded(ids) > 0).all())

    def channels_of(self, x: Tensor) -> tuple[Tensor, str]:
        """Returns the channels of the last dimension, and why they are not known (empty if they are)."""
        flat = unexpanded(x, keep=x.ndim - 1).reshape(-1, x.shape[-1])
        if not self.all_channels(flat):
            return flat[0], "its input comes from an operator without a channel rule, or from outside the model"
        return flat[0], "" if bool((flat == flat[:1]).all()) else "its input mixes tokens into channels"

    def gather(self, ids: Tensor, index: Tensor, dim: int) -> Tensor:
        return unexpanded(ids, keep=dim % ids.ndim).index_select(dim, index).expand(ids.shape)

    def compact_repeats(self, ids: Tensor) -> Tensor:
        """Returns the same ids, as an expanded view where they repeat along a whole dimension."""
        if self._in_range(ids) or not ids.numel():
            return ids
        view = unexpanded(ids)
        for dim, size in enumerate(view.shape):
            first = view.narrow(dim, 0, 1)
            if size > 1 and torch.equal(first, view.narrow(dim, size - 1, 1)) and bool((view == first).all()):
                view = first
        return view.expand(ids.shape)

    def occurrences(self, ids: Tensor, dim: int) -> Tensor | None:
        """Returns non-channel ids, in the shape of ``ids``, that number the occurrences of each id along ``dim``.

        Returns None where no channel occurs more than once along ``dim``, or each repeats along all of it: an operator
        that takes some positions along ``dim`` then takes the same occurrences of every channel that it takes.
        """
        view = unexpanded(ids)
        size = view.shape[dim]
        if size == 1 or self._distinct(view) or not self.any_channel(view):
            return None
        lines = view.movedim(dim, -1).clamp_min(0)  # one number for everything that is no channel
        line_number = torch.arange(lines.numel() // size).view(*lines.shape[:-1], 1)
        occurrence = numbered((lines + self.total * line_number).reshape(-1).numpy()).reshape(lines.shape)
        if not occurrence[(lines > 0).numpy()].any():
            return None
        return self.new_ids((size,))[torch.from_numpy(occurrence).movedim(-1, dim)].expand(ids.shape)

    def _in_range(self, ids: Tensor) -> bool:
        """Whether the tensor is a view of `_ids`, so that each of its elements is a channel."""
        return ids.numel() > 0 and ids.untyped_storage().data_ptr() == self._ids.untyped_storage().data_ptr()

    def _distinct(self, view: Tensor) -> bool:
        """Whether the tensor is a view of `_ids` whose strides show that no id occurs twice."""
        if not self._in_range(view):
            return False
        max_offset = 0
        for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
            if size > 1 and stride <= max_offset:
                return False
            max_offset += stride * (size - 1)
        return True

    # -- joining, context ------------------------------------------------------------------------------------------

    def join(self, a: Tensor, b: Tensor, attached: bool = False) -> Tensor:
        """Joins two tensors of ids element by element and returns the ids of the result.

        Two channels at one position are joined; an id that is no channel is added to the context of a channel at its
        position. The result has the ids of ``a``, or those of ``b`` where these repeat along tokens at which ``a`` has
        channels of several parameters: a class token and the patches after it come from two parameters, but are the
        same channels once one position embedding is added to both.
        """
        a, b = torch.broadcast_tensors(a, b)
        a_all_channels, b_all_channels = self.all_channels(a), self.all_channels(b)
        if a_all_channels and b_all_channels:
            self.unite(a, b, attached)
            return b if self._stands_for_more(b, a) else a
        a_no_channels, b_no_channels = not self.any_channel(a), not self.any_channel(b)
        if a_no_channels and b_no_channels:
            return a
        reason = f"{self.node.target} combines each channel with a value of its own (a rotary angle, a mask)"
        self.add_opaque_context(a, b, reason)
        self.add_opaque_context(b, a, reason)
        if (a_all_channels and b_no_channels) or (b_all_channels and a_no_channels):
            return a if a_all_channels else b
        shape = a.shape
        a, b = both_unexpanded(a, b)
        both_channels = (a > 0) & (b > 0)
        self.unite(a[both_channels], b[both_channels], attached)
        return self.compact_repeats(torch.where((a > 0) | (b < 0), a, b)).expand(shape)

    def cross(self, a: Tensor, b: Tensor) -> None:
        """Adds to the context of each channel in two tensors the value at the same position in the other tensor."""
        reason = f"{self.node.target} combines each channel with other channels"
        self._add_context(a, values_of(b), reason)
        self._add_context(b, values_of(a), reason)

    def _stands_for_more(self, ids: Tensor, others: Tensor) -> bool:
        """Whether ``ids`` repeat where ``others`` are of several parameters, along dimensions other than the last."""
        dims, other_dims = differing_dims(ids), differing_dims(others)
        more = other_dims - dims
        return dims < other_dims and all(dim != -1 and of_several_axes(others, dim, self.starts) for dim in more)

    def reduce(self, ids: Tensor, dims: Sequence[int], *, keep: bool) -> Tensor:
        """Returns the ids of a reduction over ``dims`` that does not depend on the order along them.

        Different channels that are reduced together give a new id that is no channel, which is added to the context of
        each. A channel that is reduced alone, or only with itself, stays.
        """
        dims = sorted(d % ids.ndim for d in dims)
        kept_dims = [d for d in range(ids.ndim) if d not in dims]
        rows = ids.permute(*kept_dims, *dims)
        shape = rows.shape[: len(kept_dims)]
        for d in range(len(kept_dims), ids.ndim):
            if rows.stride(d) == 0:
                rows = rows.narrow(d, 0, 1)
        group_ids = self.new_ids(shape)
        reason = f"{self.node.target} reduces the channels in separate groups"
        if self._distinct(unexpanded(ids)):
            out = rows
            for _ in dims:
                out = out.select(-1, 0)
            if out.numel() < rows.numel():
                self._add_context(rows, group_ids.view(*shape, *[1] * len(dims)).expand(rows.shape), reason)
                out = group_ids
        else:
            rows = rows.reshape(*shape, -1)
            is_uniform = (rows == rows[..., :1]).all(-1)
            mixed_channels = (rows > 0) & ~is_uniform.unsqueeze(-1)
            self._add_context(rows[mixed_channels], group_ids.unsqueeze(-1).expand_as(rows)[mixed_channels], reason)
            out = self.compact_repeats(torch.where(is_uniform & (rows[..., 0] > 0), rows[..., 0], group_ids))
        if keep:
            for d in dims:
                out = out.unsqueeze(d)
        return out

    def touch(self, arguments: Any) -> None:
        """Adds the current operator to the contexts of channels, to distinguish them from all others."""
        for ids in self.all_ids(arguments) if self._contexts else ():
            self.add_opaque_context(ids, self.new_ids(()), f"{self.node.target} acts on some of the channels only")

    def add_opaque_context(self, ids: Tensor, other: Tensor, reason: str) -> None:
        """Adds the ids in ``other`` that are no channels to the contexts of the channels at their positions."""
        if not self._contexts or not self.any_channel(ids):
            return
        ids, other = torch.broadcast_tensors(ids, other)
        if self.any_channel(other):
            ids, other = ids[other < 0], other[other < 0]
        self._add_context(ids, other, reason)

    def unite(self, a: Tensor, b: Tensor, attached: bool = False) -> None:
        """Records that the channels of two tensors move together, element by element; see `Joint` for ``attached``."""
        a, b = both_unexpanded(a, b)
        are_distinct = self._distinct(a), self._distinct(b)
        first, second = a.reshape(-1).numpy(), b.reshape(-1).numpy()
        places = np.zeros(1, np.uint64)
        if self._contexts and not all(are_distinct):
            places = mix(numbered(first).view(np.uint64) ^ mix(numbered(second)))
        if not any(are_distinct):
            pairs, inverse = np.unique(first * self.total + second, return_inverse=True)
            first, second = pairs // self.total, pairs % self.total
            place_sums = np.zeros(pairs.size, np.uint64)
            np.add.at(place_sums, inverse, places)
            places = place_sums
        if first.size:
            self.joints.append(Joint(self.node.name, first, second, attached, places))

    def _add_context(self, ids: Tensor, values: Tensor, reason: str) -> None:
        """Adds to the context of each channel a hash of the values that stand where ``ids`` holds it, in order."""
        if self._contexts and not self.all_channels(ids):
            ids, values = ids[ids > 0], values[ids > 0]
        if not self._contexts or not ids.numel():
            return
        # Along expanded dimensions, every channel is combined with the same values, which are hashed once.
        expanded_dims = [d for d in range(ids.ndim) if ids.stride(d) == 0]
        other_dims = [d for d in range(ids.ndim) if d not in expanded_dims]
        ids = ids[tuple(0 if d in expanded_dims else slice(None) for d in range(ids.ndim))]
        values = unexpanded(values).permute(expanded_dims + other_dims)
        table = values.reshape(-1, *values.shape[len(expanded_dims) :]).numpy()
        position = np.arange(len(table), dtype=np.uint64).reshape(-1, *[1] * len(other_dims))
        hashes = mix(table.view(np.uint64) ^ mix(position)).sum(0, dtype=np.uint64)
        flat = ids.reshape(-1).numpy()
        if self._distinct(ids):
            is_shared = hashes.size == 1
            context = hashes.reshape(()) if is_shared else np.broadcast_to(hashes, ids.shape).reshape(-1)
            self.context_changes.append(ContextChange(flat, context, reason))
            return
        # A channel occurs at several positions: each hash is hashed again with the number of the occurrence.
        hashes = mix(np.broadcast_to(hashes, ids.shape).reshape(-1) ^ mix(numbered(flat)))
        order = np.argsort(flat, kind="stable")
        unique, starts = np.unique(flat[order], return_index=True)
        self.context_changes.append(ContextChange(unique, np.add.reduceat(hashes[order], starts), reason))

    def separate(self, arguments: Any, reason: str) -> None:
        """Gives every channel in arguments a unique context, so that none may change places with another."""
        for view in map(unexpanded, self.all_ids(arguments)) if self._contexts else ():
            unique = view.reshape(-1).numpy()
            if not self._distinct(view):
                unique = np.unique(unique[unique > 0])
            if unique.size:
                contexts = mix(self.new_ids(unique.shape).numpy().view(np.uint64))
                self.context_changes.append(ContextChange(unique, contexts, reason))

    def barrier(self, operator: str) -> Any:
        """Returns new ids for the node's result; the channels that it reads keep their order.

        Args:
            operator: The node's operator, in the words of the reason.
        """
        arguments = [self.env[source] for source in self.node.all_input_nodes]
        if any(map(self.any_channel, self.all_ids(arguments))):
            reason = f"{operator} has no channel rule"
            self.barriers[f"{reason} (node {self.node.name})"] = None
            self.separate(arguments, reason)
        return self.unknown(self.node.meta.get("val"))

    def unknown(self, value: Any) -> Any:
        """Returns new ids in place of every tensor; a size that depends on data counts as 1."""

        def new(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return self.new_ids([size if isinstance(size, int) else 1 for size in leaf.shape])

        return fx.node.map_aggregate(value, new)
