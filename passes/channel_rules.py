"""What each operator does to channels: tables of operators by kind, and a rule per kind.

An operator of a known kind is one entry in that kind's table; an operator like no other is an entry of `SPECIAL` with a
rule of its own. An operator without an entry is a barrier. A rule is called as ``rule(channels, target, args, kwargs)``
and returns the ids of the result. Among its arguments, tensors are ids (see `permtriton.passes.provenance`), parameters
are `ParameterValue` and indices are `IndexValue`.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from permtriton.passes.channels import Channels
from permtriton.passes.graph import source_of
from permtriton.passes.values import IndexValue, LinearCall, ParameterValue, leaves

aten = torch.ops.aten
Rule = Callable[[Channels, Any, Sequence[Any], dict[str, Any]], Any]

# The result is the first argument, value by value.
SAME = {
    aten.alias, aten.clone, aten.contiguous, aten.detach, aten.dropout, aten.to, aten.type_as, aten._to_copy,
}  # fmt: skip
# The same values in another shape or order: the operator itself runs on the ids.
LAYOUT = {
    aten.broadcast_to, aten.cat, aten.expand, aten.expand_as, aten.flatten, aten.movedim, aten.numpy_T, aten.permute,
    aten.repeat, aten.repeat_interleave, aten.reshape, aten.squeeze, aten.stack, aten.t, aten.transpose,
    aten.unflatten, aten.unsqueeze, aten.view, aten.view_as,
}  # fmt: skip
# Some of the values along one dimension, or all in another order -> the position of that dimension's argument.
ALONG = {
    aten.chunk: 2, aten.flip: 1, aten.narrow: 1, aten.roll: 2, aten.select: 1, aten.slice: 1, aten.split: 2,
    aten.split_with_sizes: 2, aten.unbind: 1,
}  # fmt: skip
# The same function at every element of the broadcast operands; in-place variants (``add_``) are found by name.
ELEMENTWISE = {
    aten.abs, aten.clamp, aten.clamp_max, aten.clamp_min, aten.cos, aten.elu, aten.erf, aten.exp,
    aten.gelu, aten.hardswish, aten.hardtanh, aten.leaky_relu, aten.log, aten.mish, aten.neg, aten.reciprocal,
    aten.relu, aten.relu6, aten.rsqrt, aten.sigmoid, aten.silu, aten.sin, aten.softplus, aten.sqrt, aten.square,
    aten.tanh, aten.add, aten.bitwise_and, aten.div, aten.eq, aten.ge, aten.gt, aten.le, aten.lt, aten.masked_fill,
    aten.maximum, aten.minimum, aten.mul, aten.ne, aten.pow, aten.rsub, aten.sub, aten.where, aten.addcmul, aten.lerp,
}  # fmt: skip
# A reduction over ``dim`` whose result does not depend on the order there.
REDUCTION = {aten.amax, aten.amin, aten.mean, aten.sum, aten.var, aten.std, aten.logsumexp}
# Operators whose result is always new memory, so that writing into it changes nothing else. Those that a pass inserts
# belong here, too: an in-place operator may write into what they replaced.
NEW_MEMORY: set[Any] = ELEMENTWISE | REDUCTION | {
    aten.linear, aten.addmm, aten.matmul, aten.mm, aten.bmm, aten.embedding, aten.layer_norm, aten.rms_norm,
    "permtriton::permute", "permtriton::norm_permute", "permtriton::sparse_linear",
}  # fmt: skip


def rule_of(node: fx.Node) -> Rule | None:
    """Returns the rule of the operator that a node calls, or None for a barrier."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if node.target in NOT_MOVEMENT:
        return None
    return RULES.get(packet) or RULES.get(_qualified_name(packet)) or (_elementwise if _acts_as_copy(node) else None)


def _qualified_name(packet: Any) -> str | None:
    return getattr(packet, "_qualified_op_name", None)


def _acts_as_copy(node: fx.Node) -> bool:
    """Whether a node is an in-place elementwise operator on memory that nothing else reads."""
    name = (_qualified_name(getattr(node.target, "overloadpacket", None)) or "").removeprefix("aten::")
    in_place = name.endswith("_") and not name.startswith("_")
    written = node.args[0] if node.args else None
    if not in_place or getattr(aten, name[:-1], None) not in ELEMENTWISE:
        return False
    if not isinstance(written, fx.Node) or len(written.users) != 1:
        return False
    packet = getattr(written.target, "overloadpacket", None)
    return packet in NEW_MEMORY or _qualified_name(packet) in NEW_MEMORY or _acts_as_copy(written)


# -- movement ----------------------------------------------------------------------------------------------------------

# Overloads that do more than move values: they reinterpret bits as another dtype, or repeat by a tensor of counts.
NOT_MOVEMENT = {aten.view.dtype, aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor}
_TRANSPOSITIONS = {aten.t, aten.numpy_T, aten.transpose}


def _same(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _layout(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    packet, x = target.overloadpacket, args[0]
    if isinstance(x, ParameterValue) and len(x.shape) == 2 and packet in _TRANSPOSITIONS:
        return x.transposed()
    if packet in (aten.view, aten.view_as):  # the strides of ids may differ from those of the data
        target = aten.reshape.default if packet is aten.view else aten.reshape_as.default
    args, kwargs = fx.node.map_aggregate((args, kwargs), c.ids_of)
    return c.compacted(target(*args, **kwargs))


def _along(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Adds to the contexts of channels that the operator acts on them, and which of their tokens it takes."""
    args, kwargs = fx.node.map_aggregate((args, kwargs), c.ids_of)
    x, packet = args[0], target.overloadpacket
    result = target(*args, **kwargs)
    parts = _listed(result)
    if len(parts) == 1 and parts[0].shape == x.shape and packet not in _REORDERING:
        return result
    position = ALONG.get(packet, 1)
    dims = args[position] if len(args) > position else kwargs.get("dim", kwargs.get("dims", 0))
    for dim in [dims] if isinstance(dims, int) else dims or range(x.ndim):
        tokens = c.occurrences(x, dim)
        if tokens is not None:
            for part, taken in zip(parts, _listed(target(tokens, *args[1:], **kwargs)), strict=True):
                c.meet(part, taken, f"{target} takes different tokens of some of them")
    for part in parts:
        c.touch(part)
    return c.compacted(result) if isinstance(result, Tensor) else [c.compacted(part) for part in parts]


_REORDERING = {aten.flip, aten.roll, aten.index_select}
_COPIES = {aten.lift_fresh_copy, aten.to, aten._to_copy}


def _index(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Indexing by a list of positions along one dimension that is a constant in the model's code."""
    x = c.ids_of(args[0])
    indices: Any = c.node.args[1]  # one per dimension; None takes all of it
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    index = _constant(indices[dims[0]]) if len(dims) == 1 else None
    if index is None or index.ndim != 1 or index.dtype != torch.int64:
        return c.barrier(f"{target} by an index without known values", (args, kwargs))
    return _along(c, aten.index_select.default, (x, dims[0], index % x.shape[dims[0]]), {})


def _constant(node: fx.Node) -> Tensor | None:
    """Returns the value of a constant in the model's code that nothing else reads, else None; also None on meta."""
    while len(node.users) == 1 and getattr(node.target, "overloadpacket", None) in _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "get_attr" or len(node.users) != 1 or "lifted_tensor" not in str(node.target):
        return None
    value: Tensor = operator.attrgetter(str(node.target))(node.graph.owning_module)
    return None if value.is_meta else value.cpu()


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _permute(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, index, dim = (*args, -1)[:3]
    dim = kwargs.get("dim", dim)
    if not isinstance(index, IndexValue):
        return c.barrier(f"{target} by a computed index", (args, kwargs))
    return x.permuted(index.index, dim) if isinstance(x, ParameterValue) else c.gather(x, index.index, dim)


# -- combining ---------------------------------------------------------------------------------------------------------


def _elementwise(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    operands = [a for a in leaves((args, kwargs)) if isinstance(a, (Tensor, ParameterValue, IndexValue))]
    tensors = [c.ids_of(a) for a in operands]
    if not any(c.any_channel(ids) for ids in tensors):
        return c.opaque_like(c.node.meta["val"])
    c.touch(tensors[0])
    joined = tensors[0]
    for operand, other in zip(operands[1:], tensors[1:], strict=True):
        c.touch(other)
        attached = any(isinstance(o, ParameterValue) for o in (operands[0], operand))
        joined = c.join(joined, other, attached)
    return joined if c.all_channels(joined) else torch.where(joined > 0, joined, c.opaque_like(joined))


def _reduction(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    ids = c.ids_of(args[0])
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if isinstance(dims, bool) or dims is None or dims == []:
        dims = list(range(ids.ndim))
    elif isinstance(dims, int):
        dims = [dims]
    return c.reduce(ids, dims, keep=c.node.meta["val"].ndim == ids.ndim)


def _softmax(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    ids = c.ids_of(args[0])
    if not c.any_channel(ids):
        return c.opaque_like(ids)
    c.reduce(ids, [args[1]], keep=True)
    return ids


def _norm(c: Channels, x: Any, dims: int, vectors: Sequence[Any]) -> Any:
    x = c.ids_of(x)
    c.touch(x)
    c.reduce(x, list(range(-dims, 0)), keep=True)
    for vector in vectors:
        if vector is not None:
            x = c.join(x, c.ids_of(vector), isinstance(vector, ParameterValue))
    return x


def _norm_permute(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, weight, bias, index = args[:4]
    if not isinstance(index, IndexValue):
        return c.barrier(f"{target} by a computed index", (args, kwargs))
    return c.gather(_norm(c, x, 1, (weight, bias)), index.index, -1)


def _attention(c: Channels, q: Any, k: Any, v: Any, mask: Any = None, *_: Any, **kwargs: Any) -> Any:
    mask = c.ids_of(kwargs.get("attn_mask", mask))
    if mask is not None and c.any_channel(mask):
        c.separate(mask, "they are an attention mask")
    q, k, v = c.ids_of(q), c.ids_of(k), c.ids_of(v)
    if q.ndim > 2 and k.shape[-3] != q.shape[-3]:
        repeats = q.shape[-3] // k.shape[-3]
        k, v = (c.compacted(t.repeat_interleave(repeats, -3)) for t in (k, v))
    scores = c.reduce(c.join(q.unsqueeze(-2), k.unsqueeze(-3)), [-1], keep=False)
    return c.reduce(c.join(scores.unsqueeze(-1), v.unsqueeze(-3)), [-2], keep=False)


# -- products with a weight --------------------------------------------------------------------------------------------


def _linear(c: Channels, x: Any, weight: Any, bias: Any = None) -> Any:
    x = c.ids_of(x)
    if not isinstance(weight, ParameterValue) or len(weight.shape) != 2:
        return c.barrier("a product with a computed weight", (x, weight, bias))
    columns, rows = c.axis(weight, 1), c.axis(weight, 0)
    channels, problem = c.channels_of(x)
    if problem:
        c.separate(x, problem)
        c.separate(columns, problem)
    else:
        c.unite(columns, channels, attached=True)
    if bias is not None:
        bias = c.ids_of(bias)
        if bias.shape == rows.shape and c.all_channels(bias):
            c.unite(bias, rows, attached=True)
        elif rows.numel() > 1:
            c.separate(torch.cat([rows, bias.reshape(-1)]), "their bias is not a parameter with one value per channel")
    c.linears.append(LinearCall(weight.name, weight.dims[1], c.node, _source(c.node), problem))
    if rows.numel() == 1:  # a gate: one value for all channels that it is multiplied with
        return c.opaque((*x.shape[:-1], 1))
    return rows.expand(*x.shape[:-1], -1)


def _transposed(weight: Any) -> Any:
    return weight.transposed() if isinstance(weight, ParameterValue) else weight


def _matmul(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    a, b = args
    if isinstance(b, ParameterValue) and len(b.shape) == 2:
        return _linear(c, a, b.transposed())
    a, b = c.ids_of(a), c.ids_of(b)
    if a.ndim < 2 or b.ndim < 2:
        return c.barrier("a product with a vector", (a, b))
    if not c.any_channel(a) and not c.any_channel(b):
        return c.opaque_like(c.node.meta["val"])
    return c.reduce(c.join(a.unsqueeze(-1), b.unsqueeze(-3)), [-2], keep=False)


def _sparse_linear(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, weight, _, bias, index, in_features = args[:6]
    packed = isinstance(weight, ParameterValue) and weight.shape[-1] == in_features
    if not packed or not isinstance(index, IndexValue | None):
        return c.barrier(f"{target} on a weight that no node of the graph packs", (args, kwargs))
    x = c.ids_of(x)
    return _linear(c, x if index is None else c.gather(x, index.index, -1), weight, bias)


def _embedding(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    weight, indices = args[:2]
    if not isinstance(weight, ParameterValue):
        return c.barrier("an embedding of a computed table", (weight, indices))
    c.tables.add((weight.name, weight.dims[1]))
    return c.axis(weight, 1).expand(*c.ids_of(indices).shape, -1)


def _of_a_weight(result: Callable[[ParameterValue], Any]) -> Rule:
    """Returns the rule of an operator on a weight, whose result is a function of the weight's value."""

    def rule(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        weight = args[0]
        return result(weight) if isinstance(weight, ParameterValue) else c.barrier(str(target), (args, kwargs))

    return rule


def _source(call: fx.Node) -> fx.Node:
    """Returns the node whose channels a linear reads: before any reshaping, so that siblings share a source."""
    node = call.args[1] if getattr(call.target, "overloadpacket", None) is aten.addmm else call.args[0]
    assert isinstance(node, fx.Node)
    return source_of(node)


def _choice(c: Channels, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    c.separate(c.ids_of(args[0]), f"{target} selects among them by position")
    return fx.node.map_aggregate(c.node.meta["val"], c.opaque_like)  # type: ignore[arg-type]


# Operators like no other, each with its rule. Those of permtriton are found by name: their kernels need not be loaded.
SPECIAL: dict[Any, Rule] = {
    operator.getitem: lambda c, _, args, kw: args[0][args[1]],
    aten._assert_tensor_metadata: lambda c, _, args, kw: None,
    aten.linear: lambda c, _, args, kw: _linear(c, *args, **kw),
    aten.addmm: lambda c, _, args, kw: _linear(c, args[1], _transposed(args[2]), args[0]),
    aten.matmul: _matmul,
    aten.mm: _matmul,
    aten.bmm: _matmul,
    aten.embedding: _embedding,
    aten.layer_norm: lambda c, _, args, kw: _norm(c, args[0], len(args[1]), args[2:4]),
    aten.rms_norm: lambda c, _, args, kw: _norm(c, args[0], len(args[1]), args[2:3]),
    aten.softmax: _softmax,
    aten._softmax: _softmax,
    aten.topk: _choice,
    aten.gather: _choice,
    aten.index: _index,
    aten.scaled_dot_product_attention: lambda c, _, args, kw: _attention(c, *args, **kw),
    "permtriton::permute": _permute,
    "permtriton::norm_permute": _norm_permute,
    "permtriton::nm_mask": _of_a_weight(lambda weight: weight),
    "permtriton::pack": _of_a_weight(lambda weight: (weight, weight)),
    "permtriton::sparse_linear": _sparse_linear,
}


RULES: dict[Any, Rule] = {
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys(LAYOUT, _layout),
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(REDUCTION, _reduction),
    **SPECIAL,
}
