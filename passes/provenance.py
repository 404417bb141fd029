"""Channel provenance: run a graph on channel ids instead of data.

Every tensor of the graph is replaced by an int64 tensor of the same shape that says what each element carries:

* ``id > 0``: the channel with that id. Every position of every parameter dimension is a channel. Ids are assigned by
  parameter name, so two graphs over the same parameters have the same channels.
* ``id < 0``: something that is no channel (a mask, a rotary cosine, a variance), different for each element.

Data movement acts on the ids as it would on data. Elementwise operators join channels: joined channels must be permuted
together. Every operator that acts on a channel adds to the channel's *context*, and so does every non-channel value
that is combined with the channel. Two channels may change places if and only if they have the same context. A norm over
the whole stream gives every channel the same context, rotary cosines give each channel a different one, and attention
gives one to each head. An operator without a rule is a barrier: every channel that enters it gets a unique context,
and the reason is recorded.

The rules are in `permtriton.passes.channel_rules`, ids and contexts in `permtriton.passes.channels`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, fx, nn

from permtriton.passes.channel_ids import mix, numbered
from permtriton.passes.channel_rules import ALONG, CONSTANT, LAYOUT, constant, rule_of
from permtriton.passes.channels import AxisKey, Channels, ContextChange, Joint
from permtriton.passes.graph import SAME, aten, one_thread
from permtriton.passes.graph_values import ParameterValue, Products

ZERO = {aten.new_zeros, aten.zeros, aten.zeros_like}
SUMS_OF_PRODUCTS = {aten.bmm, aten.einsum, aten.matmul, aten.mm}


@dataclass
class Provenance:
    """Which channels of a graph must move together, and which of them may change places.

    Channels that must move together share a label, a number from 0. Labels with the same context may change places.
    """

    linears: dict[str, Products]  # weight -> all products with it
    # (parameter, dimension) -> int64 label of each position, for the dimensions that the graph uses
    axes: dict[AxisKey, np.ndarray]
    # (parameter, dimension) -> uint64 role of each position: its context without that of other activations with which
    # it is joined. A gate row and its up row have different roles.
    roles: dict[AxisKey, np.ndarray]
    hidden_node: fx.Node  # node of the last hidden state
    hidden_labels: np.ndarray  # labels of the last hidden state's channels; empty if they are not known
    contexts: np.ndarray  # context of each label, uint64 ``[labels]``
    barriers: list[str]  # reasons of the barriers that channels entered, each once
    _context_changes: list[ContextChange] = field(repr=False)
    _labels: np.ndarray = field(repr=False)

    @property
    def parameters(self) -> set[str]:
        """Names of the parameters that the graph uses."""
        return {parameter for parameter, _ in self.axes}

    def reason(self, labels: np.ndarray) -> str:
        """Returns why the channels of ``labels`` may not all change places: the first context change that differs."""
        for change in self._context_changes:
            if np.unique(_sums(self.contexts.size, self._labels, [change])[labels]).size > 1:
                return change.reason
        return "its channels differ in what reads them"


@dataclass(frozen=True)
class Unions:
    """Which channels a graph joins, and at which nodes, without the contexts of the channels."""

    parameters: set[str]  # names of the parameters that the graph reads
    joints: Sequence[Joint]  # channels that move together, in execution order
    labels: np.ndarray  # number of the set of joined channels that each channel id belongs to, ``[ids]``

    def first_new(self, other: "Unions") -> str | None:
        """Returns the name of the first node that joins channels which are not joined in ``other``, or None.

        Both graphs must read the same parameters.
        """
        for joint in self.joints:
            if (other.labels[joint.a] != other.labels[joint.b]).any():
                return joint.node
        return None


@one_thread()
@np.errstate(over="ignore")
def propagate(graph_module: fx.GraphModule, outputs: Sequence[int], hidden_position: int = -1) -> Provenance:
    """Runs channel ids through a graph.

    Args:
        graph_module: Graph whose parameters are ``get_attr`` nodes and whose other nodes have ``meta["val"]``. The only
            values that are read are those of index buffers and of constant vectors.
        outputs: Positions in the graph's output tuple that a caller sees: their channels must keep their order.
        hidden_position: Position of the last hidden state in the output tuple.
    """
    channels = _ChannelRun(graph_module)
    results = channels.run(enable_io_processing=False)
    for position in outputs:
        channels.separate(results[position], "it is an output of the model, whose order must stay")
    hidden_ids, problem = channels.channels_of(channels.ids_of(results[hidden_position]))
    hidden_node: Any = graph_module.graph.output_node().args[0]
    count, labels = _components(channels.total, channels.joints)
    role_count, role_labels = _components(channels.total, [joint for joint in channels.joints if joint.attached])
    roles = _sums(role_count, role_labels, channels.context_changes)[role_labels]
    spans = {axis: channels.spans[axis] for axis in channels.used_axes}
    own_contexts = mix(np.arange(len(spans), dtype=np.uint64) + np.uint64(1 << 40))  # one per axis
    context_changes = channels.context_changes + [
        ContextChange(np.arange(span.start, span.stop), context, "they belong to different parameters")
        for context, span in zip(own_contexts, spans.values(), strict=True)
    ]
    context_changes += _arrangement(channels, labels, count)
    return Provenance(
        linears=channels.linears,
        axes={axis: labels[span].astype(np.int64) for axis, span in spans.items()},
        roles={axis: roles[span] for axis, span in spans.items()},
        hidden_node=hidden_node[hidden_position],
        hidden_labels=labels[[] if problem else hidden_ids.numpy()],
        contexts=_sums(count, labels, context_changes),
        barriers=list(channels.barriers),
        _context_changes=context_changes,
        _labels=labels,
    )


@one_thread()
@np.errstate(over="ignore")
def channel_unions(graph_module: fx.GraphModule) -> Unions:
    """Returns which channels a graph joins, in a fraction of the time of `propagate`."""
    channels = _ChannelRun(graph_module, contexts=False)
    channels.run(enable_io_processing=False)
    _, labels = _components(channels.total, channels.joints)
    return Unions({parameter for parameter, _ in channels.spans}, channels.joints, labels)


class _ChannelRun(Channels):
    """Runs a graph on channel ids, calling each operator's rule."""

    def __init__(self, graph_module: fx.GraphModule, *, contexts: bool = True) -> None:
        super().__init__(graph_module, contexts=contexts)
        self._emptied: set[fx.Node] = set()
        self._zeros: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        return super().run_node(n)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.unknown(self.node.meta.get("val"))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, nn.Parameter):
            return ParameterValue(target, tuple(value.shape), tuple(range(value.ndim)), (None,) * value.ndim)
        return self._constant_ids(value) if isinstance(value, Tensor) else value

    def _constant_ids(self, value: Tensor) -> Tensor:
        """Returns ids of a constant; equal elements of a floating-point vector have equal ids."""
        if value.is_meta or not value.is_floating_point() or max(value.shape, default=1) != value.numel():
            return self.new_ids(value.shape)
        bits = value.detach().double().cpu().numpy().view(np.int64)
        distinct_bits, inverse = np.unique(bits, return_inverse=True)
        return self.new_ids(distinct_bits.shape)[torch.from_numpy(inverse).view(value.shape)]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self._lacks_a_part(self.node):
            return self.barrier(f"{target} of a part that is empty where the model was traced")
        rule = rule_of(self.node)
        if rule is None:
            return self.barrier(str(target))
        if self._is_zero(self.node):
            self._zeros.add(self.node)
            rule = constant
        return rule(self, _by_name(target, args, kwargs))

    def _lacks_a_part(self, node: fx.Node) -> bool:
        """Whether a node reads a tensor that was empty in the trace, but that more tokens may fill with anything."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return False
        inputs = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
        if not _is_empty(value):
            return not self._emptied.isdisjoint(inputs)
        constant = getattr(node.target, "overloadpacket", None) in CONSTANT
        if not constant and any(not _is_empty(source.meta["val"]) or source in self._emptied for source in inputs):
            self._emptied.add(node)
        return False

    def _is_zero(self, node: fx.Node) -> bool:
        """Whether every element of a result is zero, such as a product with an initial state of zeros."""
        packet = getattr(node.target, "overloadpacket", None)
        if packet in SUMS_OF_PRODUCTS:
            return not self._zeros.isdisjoint(node.all_input_nodes)
        moves_values = packet in SAME or packet in LAYOUT or packet in ALONG
        is_tensor = isinstance(node.meta.get("val"), Tensor)
        return packet in ZERO or (moves_values and is_tensor and self._zeros.issuperset(node.all_input_nodes))


def _by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns all arguments of an operator by name; by position for an operator of Python."""
    if not isinstance(target, torch._ops.OpOverload):
        return dict(enumerate(args))
    parameters = target._schema.arguments
    named = {**dict(zip((p.name for p in parameters), args, strict=False)), **kwargs}
    return {p.name: named.get(p.name, p.default_value) for p in parameters}


def _is_empty(value: Tensor) -> bool:
    """Whether a tensor has no tokens: a dimension other than the last, whose size the config decides, has size 0."""
    return any(isinstance(size, int) and not size for size in value.shape[:-1])  # a size that is no int depends on data


def _arrangement(channels: Channels, labels: np.ndarray, count: int) -> list[ContextChange]:
    """Returns context changes that distinguish units whose channels are joined in different orders.

    Units with several channels of an axis change places channel by channel: first with first, second with second.
    Channels at equal places of two units must therefore be joined with others in the same way.
    """
    axes = np.searchsorted(channels.starts, np.arange(channels.total), side="right")
    occurrence = numbered(axes * count + labels)
    place = mix(occurrence.view(np.uint64) ^ mix(axes))
    joint_hashes = mix(np.arange(len(channels.joints)))
    reason = "the channels that move with each are joined in another order"
    return [
        ContextChange(joint.a, mix(place[joint.a] ^ mix(place[joint.b]) ^ mix(joint.places + joint_hash)), reason)
        for joint, joint_hash in zip(channels.joints, joint_hashes, strict=True)
        if occurrence[joint.a].any() or occurrence[joint.b].any()
    ]


def _sums(count: int, labels: np.ndarray, changes: Sequence[ContextChange]) -> np.ndarray:
    """Returns the context of each of ``count`` labels, uint64: the sum over its channels and changes of context."""
    sums = np.zeros(count, np.uint64)
    for change in changes:
        np.add.at(sums, labels[change.ids], change.context)
    return sums


def _components(total: int, joints: Sequence[Joint]) -> tuple[int, np.ndarray]:
    """Returns how many sets of joined channels there are, and the number of the set of each id."""
    none = np.zeros(0, np.int64)
    first = np.concatenate([none, *(joint.a for joint in joints)])
    second = np.concatenate([none, *(joint.b for joint in joints)])
    graph = coo_array((np.ones(first.size, np.int8), (first, second)), shape=(total, total))
    return connected_components(graph, directed=False)
