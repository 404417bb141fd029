"""What each operator does to channels: tables of operators by kind, and a rule per kind.

An operator of a known kind is one entry in that kind's table; an operator like no other is an entry of `SPECIAL` with a
rule of its own. An operator without an entry is a barrier. A rule is called as ``rule(channels, arguments)``, with all
arguments of the operator by name, and returns the ids of the result. In place of parameters, the arguments hold
`ParameterValue`, in place of other tensors their ids (see `permtriton.passes.provenance`).
"""

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from permtriton.passes.channel_ids import differs
from permtriton.passes.channels import Channels
from permtriton.passes.combining import Arguments, Rule, combine, contracted, joined, mapped, parts_of
from permtriton.passes.graph_values import Crossed, ParameterValue, leaves
from permtriton.passes.product_rules import NORMS, PRODUCTS
from permtriton.passes.row_rules import index_add, index_put, joined_weights, known_size, summed_parts, taken_rows

aten = torch.ops.aten

# The result is the first argument, unchanged or cast.
SAME = {
    aten.alias, aten.clone, aten.contiguous, aten.detach, aten.detach_, aten.dropout, aten.lift_fresh_copy, aten.to,
    aten.type_as, aten._to_copy,
}  # fmt: skip
# The same values in another shape or order: the operator itself runs on the ids.
LAYOUT = {
    aten.broadcast_to, aten.expand, aten.expand_as, aten.flatten, aten.mT, aten.movedim,
    aten.numpy_T, aten.permute, aten.repeat, aten.repeat_interleave, aten.reshape, aten.reshape_as, aten.squeeze,
    aten.stack, aten.t, aten.transpose, aten.unflatten, aten.unsqueeze, aten._unsafe_view, aten.view, aten.view_as,
}  # fmt: skip
# Operators that take some positions along the dimensions ``dim`` or ``dims``, or reorder them.
ALONG = {
    aten.chunk, aten.flip, aten.narrow, aten.roll, aten.select, aten.slice, aten.split, aten.split_with_sizes,
    aten.unbind,
}  # fmt: skip
# The same function at every element of the broadcast operands.
ELEMENTWISE = {
    aten.abs, aten.celu, aten.clamp, aten.clamp_max, aten.clamp_min, aten.cos, aten.elu, aten.erf, aten.exp, aten.exp2,
    aten.expm1, aten.gelu, aten.hardsigmoid, aten.hardswish, aten.hardtanh, aten.isinf, aten.isnan, aten.leaky_relu,
    aten.log, aten.log1p, aten.log_sigmoid, aten.logical_not, aten.mish, aten.nan_to_num, aten.neg, aten.reciprocal,
    aten.relu, aten.relu6, aten.round, aten.rsqrt, aten.selu, aten.sigmoid, aten.sign, aten.silu, aten.sin,
    aten.softplus, aten.sqrt, aten.square, aten.tanh, aten.add, aten.addcmul, aten.bitwise_and, aten.bitwise_not,
    aten.bitwise_or, aten.div, aten.eq, aten.ge, aten.gt, aten.le, aten.lerp, aten.logical_and, aten.logical_or,
    aten.lt, aten.masked_fill, aten.maximum, aten.minimum, aten.mul, aten.multiply, aten.ne, aten.pow, aten.rsub,
    aten.sub, aten.where,
}  # fmt: skip
# A reduction over ``dim``, or all dimensions, whose result does not depend on the order along them.
REDUCTION = {
    aten.all, aten.amax, aten.amin, aten.any, aten.linalg_vector_norm, aten.logsumexp, aten.mean, aten.std, aten.sum,
    aten.var,
}  # fmt: skip
# Each element is a function of the values up to it along ``dim``.
CUMULATIVE = {aten.cumsum, aten.cumprod, aten.logcumsumexp}
# The same value at every element, whatever the arguments hold; the values of ``empty`` should never be read.
CONSTANT = {
    aten.empty, aten.empty_like, aten.full, aten.full_like, aten.new_empty, aten.new_full, aten.new_ones,
    aten.new_zeros, aten.ones, aten.ones_like, aten.scalar_tensor, aten.zeros, aten.zeros_like,
}  # fmt: skip


def rule_of(node: fx.Node) -> Rule | None:
    """Returns the rule of the operator that a node calls, or None for a barrier."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if packet is aten.sym_size:
        return lambda c, args: c.node.meta["val"]
    if node.target in WITHOUT_RULE or not known_size(node, packet):
        return None
    return RULES.get(packet) or RULES.get(getattr(packet, "_qualified_op_name", None))


# -- movement ----------------------------------------------------------------------------------------------------------

# Overloads to which their operator's rule does not apply: they reinterpret bits, or repeat by a tensor of counts.
WITHOUT_RULE = {aten.view.dtype, aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor}
VIEWS = {aten.view, aten.view_as, aten._unsafe_view}


def _same(c: Channels, args: Arguments) -> Any:
    return next(iter(args.values()))


def constant(c: Channels, args: Arguments) -> Any:
    """The rule of an operator whose result has the same value at every element."""
    return c.new_ids(()).expand(c.node.meta["val"].shape)


def _layout(c: Channels, args: Arguments) -> Any:
    target: Any = c.node.target
    x = args.get("self")
    if isinstance(x, ParameterValue) and (moved := x.moved(target, args)) is not None:
        return moved
    others = fx.node.map_aggregate({name: value for name, value in args.items() if name != "self"}, c.ids_of)
    if x is None:  # ``stack``
        return c.compact_repeats(target(**others))
    if target.overloadpacket in VIEWS:  # the strides of ids may differ from those of the data
        return mapped(c, x, lambda part: c.compact_repeats(part.reshape(c.node.meta["val"].shape)))
    return mapped(c, x, lambda part: c.compact_repeats(target(self=part, **others)))


def _cat(c: Channels, args: Arguments) -> Any:
    """Concatenates; a constant beside channels that repeat along ``dim`` counts as one more value of each channel."""
    tensors, dim = args["tensors"], args["dim"]
    if len(tensors) > 1 and all(
        isinstance(x, ParameterValue) and len(x.shape) > 1 and None not in x.dims for x in tensors
    ):
        return joined_weights(c, tensors, dim)
    part_counts = {len(x.parts) for x in tensors if isinstance(x, Crossed)}
    operands = tensors if len(part_counts) == 1 else [c.ids_of(x) for x in tensors]
    count = part_counts.pop() if len(part_counts) == 1 else 1
    split = [parts_of(c, x) for x in operands]
    split = [parts if len(parts) == count else _repeated(c, parts[0], count) for parts in split]
    results = []
    for parts in zip(*split, strict=True):
        channel_parts = [part for part in parts if part.numel() and c.all_channels(part)]
        if len(channel_parts) < len(parts) and channel_parts and not any(differs(part)[dim] for part in channel_parts):
            channel = channel_parts[0].narrow(dim, 0, 1)
            parts = tuple(
                channel.expand(part.shape)
                if part.numel() and not any(differs(part)) and not c.any_channel(part)
                else part
                for part in parts
            )
            c.touch(channel)
        results.append(c.compact_repeats(torch.cat(parts, dim)))
    return joined(results)


def _repeated(c: Channels, ids: Tensor, count: int) -> list[Tensor]:
    """Returns ids as ``count`` parts of `Crossed` ids; only the first part has channels."""
    return [ids, *[c.new_ids(ids.shape) if c.any_channel(ids) else ids] * (count - 1)]


def _along(c: Channels, args: Arguments, take: Any = None) -> Any:
    """Adds the operator, and the tokens at which it takes each channel, to the contexts of the channels taken.

    Args:
        take: Operator that is applied to the arguments; None for the operator of the node.
    """
    x, take = args["self"], take or c.node.target
    packet = take.overloadpacket
    moved = x.moved(take, args) if packet is aten.slice and isinstance(x, ParameterValue) else None
    if moved is not None:
        return moved
    if isinstance(x, Crossed):
        results = [_along(c, {**args, "self": part}, take) for part in x.parts]
        return joined(results) if isinstance(results[0], Tensor) else [joined(r) for r in zip(*results, strict=True)]
    args = fx.node.map_aggregate(args, c.ids_of)
    x = args["self"]
    result = take(**args)
    parts = _as_list(result)
    if len(parts) == 1 and parts[0].shape == x.shape and packet not in _REORDERING:
        return result
    dims = args["dims"] if "dims" in args else [args["dim"]]
    if not dims:
        return c.barrier(f"{take} across dimensions")
    for dim in dims:
        tokens = c.occurrences(x, dim)
        if tokens is not None:
            for part, positions in zip(parts, _as_list(take(**{**args, "self": tokens})), strict=True):
                c.add_opaque_context(part, positions, f"{take} takes different tokens of some of them")
    for part in parts:
        c.touch(part)
    return c.compact_repeats(result) if isinstance(result, Tensor) else [c.compact_repeats(part) for part in parts]


def _scatter(c: Channels, args: Arguments, take: Any) -> Any:
    """Writes ``src`` where the operator ``take`` reads ``self``."""
    x, source = c.ids_of(args["self"]), c.ids_of(args["src"])
    places = {name: value for name, value in args.items() if name not in ("self", "src")}
    _along(c, {"self": x, **places}, take)  # for the contexts: which of each channel's values are overwritten
    c.touch(source)
    write: Any = c.node.target
    return c.compact_repeats(write(self=x, src=source, **places))


def _copy(c: Channels, args: Arguments) -> Any:
    return mapped(c, args["src"], lambda part: part.expand(c.node.meta["val"].shape))


def _pad(c: Channels, args: Arguments) -> Any:
    """Pads: where channels repeat along a dimension, padding is more values of each; elsewhere it is no channel."""
    ids, pad, mode = c.ids_of(args["self"]), args["pad"], args.get("mode", "constant")
    c.touch(ids)
    constant = c.new_ids(())
    for pair in range(len(pad) // 2):
        dim = ids.ndim - 1 - pair
        left, right = pad[2 * pair : 2 * pair + 2]
        if left == right == 0:
            continue
        if not differs(ids)[dim] and c.all_channels(ids):
            shape = list(ids.shape)
            shape[dim] += left + right
            ids = ids.narrow(dim, 0, 1).expand(shape)
        elif mode != "constant":
            return c.barrier(f"{c.node.target} by {mode} among channels")
        else:
            bounds = {"self": ids, "dim": dim, "start": max(-left, 0), "end": ids.shape[dim] - max(-right, 0)}
            cut = _along(c, bounds, aten.slice.Tensor)
            ends = [constant.expand(*cut.shape[:dim], max(n, 0), *cut.shape[dim + 1 :]) for n in (left, right)]
            ids = torch.cat([ends[0], cut, ends[1]], dim)
    return ids


_REORDERING = {aten.flip, aten.roll, aten.index_select}
_COPIES = {aten.clone, aten.lift_fresh_copy, aten.to, aten._to_copy}


def _index(c: Channels, args: Arguments) -> Any:
    """Takes rows of a table as an embedding does, rows that depend on data, or positions by a constant index."""
    indices: Any = c.node.args[1]  # one per dimension; None takes the whole dimension
    table = isinstance(args["self"], ParameterValue) and len(args["self"].shape) == 2 and len(indices) == 1
    if table and indices[0].meta["val"].dtype == torch.int64:  # such as Whisper's position embedding
        return PRODUCTS[aten.embedding](c, {"weight": args["self"], "indices": args["indices"][0]})
    x = c.ids_of(args["self"])
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    index = _constant_value(indices[dims[0]]) if len(dims) == 1 else None
    if index is None and len(dims) == 1 and not c.any_channel(c.ids_of(args["indices"][dims[0]])):
        rows = taken_rows(c, x, dims[0], indices[dims[0]], c.node.meta["val"].shape)
        if rows is not None:
            return rows
    if index is None or index.ndim != 1 or index.dtype != torch.int64:
        return c.barrier(f"{c.node.target} by an index without known values")
    return _along(c, {"self": x, "dim": dims[0], "index": index % x.shape[dims[0]]}, aten.index_select.default)


def _constant_value(node: fx.Node) -> Tensor | None:
    """Returns, on the CPU, the constant of the model's code that a node is or copies.

    Returns None if it is neither, if the constant or a copy has several readers, or if the constant is a meta tensor.
    """
    while len(node.users) == 1 and getattr(node.target, "overloadpacket", None) in _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "get_attr" or len(node.users) != 1 or "lifted_tensor" not in str(node.target):
        return None
    value: Tensor = operator.attrgetter(str(node.target))(node.graph.owning_module)
    return None if value.is_meta else value.cpu()


def _as_list(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _permute(c: Channels, args: Arguments) -> Any:
    x, dim, index = args["x"], args["dim"], c.index_argument(1)
    if index is None:
        return c.barrier(f"{c.node.target} by a computed index")
    if isinstance(x, ParameterValue):
        return x.permuted(index, dim)
    return mapped(c, x, lambda part: c.gather(part, index, dim))


# -- combining ---------------------------------------------------------------------------------------------------------


def _elementwise(c: Channels, args: Arguments) -> Any:
    operands = [value for value in leaves(args) if isinstance(value, (Tensor, Crossed, ParameterValue))]
    first = operands[0]
    if len(operands) == 1 and isinstance(first, ParameterValue) and math.prod(first.shape) > 1:
        for axis in c.axes(first):
            c.touch(axis)
        return replace(first, computed=True)
    return combine(c, operands)


def _prelu(c: Channels, args: Arguments) -> Any:
    """A leaky ReLU with a learned slope for each channel of dimension 1, or one slope for all."""
    x, weight = args.values()
    per_channel = isinstance(weight, ParameterValue) and math.prod(weight.shape) > 1
    return combine(c, [x, weight.with_dims([0, *[None] * (c.ids_of(x).ndim - 2)]) if per_channel else weight])


def _glu(c: Channels, args: Arguments) -> Any:
    halves = {"self": c.ids_of(args["self"]), "chunks": 2, "dim": args["dim"]}
    return combine(c, _along(c, halves, aten.chunk.default))


def _triangle(c: Channels, args: Arguments) -> Any:
    x = c.ids_of(args["self"])
    return combine(c, [x, c.new_ids(x.shape[-2:])])


def _reduction(c: Channels, args: Arguments) -> Any:
    ids, dims = joined(parts_of(c, args["self"])), args.get("dim")
    ndim = len(ids.shape)
    if dims is None or dims == []:
        dims = list(range(ndim))
    elif isinstance(dims, int):
        dims = [dims]
    return contracted(c, summed_parts(c, ids, dims), dims, keep=c.node.meta["val"].ndim == ndim)


def _cumulative(c: Channels, args: Arguments) -> Any:
    parts = parts_of(c, args["self"])
    if any(differs(part)[args["dim"]] for part in parts):
        return c.barrier(f"{c.node.target} along channels")
    for part in parts:
        c.touch(part)
    return joined([c.renew_ids(part) for part in parts])


def _extreme(c: Channels, args: Arguments) -> Any:
    """``max`` and ``min`` of two operands, of all values, or along one dimension, which also returns positions."""
    if "other" in args:
        return _elementwise(c, args)
    if "dim" not in args:
        return _reduction(c, args)
    ids = c.ids_of(args["self"])
    if differs(ids)[args["dim"]]:
        return _choice(c, args)
    c.touch(ids)
    result = c.reduce(ids, [args["dim"]], keep=c.node.meta["val"][0].ndim == ids.ndim)
    return [result, result]


def _softmax(c: Channels, args: Arguments) -> Any:
    parts = parts_of(c, args["self"])
    for part in parts:
        c.reduce(part, [args["dim"]], keep=True)
    return joined([c.renew_ids(part) for part in parts])


def _choice(c: Channels, args: Arguments) -> Any:
    for leaf in leaves(args):
        if isinstance(leaf, (Tensor, Crossed, ParameterValue)):
            c.separate(c.ids_of(leaf), f"{c.node.target} selects among them by position")
    return c.unknown(c.node.meta["val"])


# Operators like no other, each with its rule; those of permtriton stand under their qualified names.
SPECIAL: dict[Any, Rule] = {
    operator.getitem: lambda c, args: operator.getitem(*args.values()),
    aten._assert_tensor_metadata: lambda c, args: None,
    aten.cat: _cat,
    aten.concat: _cat,
    aten.concatenate: _cat,
    aten.copy: _copy,
    aten.pad: _pad,
    aten.constant_pad_nd: _pad,
    aten.select_scatter: lambda c, args: _scatter(c, args, aten.select.int),
    aten.slice_scatter: lambda c, args: _scatter(c, args, aten.slice.Tensor),
    aten.glu: _glu,
    aten.max: _extreme,
    aten.min: _extreme,
    aten.prelu: _prelu,
    aten.tril: _triangle,
    aten.triu: _triangle,
    **PRODUCTS,
    **NORMS,
    aten.log_softmax: _softmax,
    aten.softmax: _softmax,
    aten._log_softmax: _softmax,
    aten._softmax: _softmax,
    aten.topk: _choice,
    aten.gather: _choice,
    aten.index: _index,
    aten.index_add: index_add,
    aten.index_put: index_put,
    "permtriton::permute": _permute,
}


RULES: dict[Any, Rule] = {
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys(LAYOUT, _layout),
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(REDUCTION, _reduction),
    **dict.fromkeys(CUMULATIVE, _cumulative),
    **dict.fromkeys(CONSTANT, constant),
    **SPECIAL,
}
