"""What each operator does to channels: tables of operators by kind, and a rule per kind.

An operator of a known kind is one entry in that kind's table; any other operator is an entry of `SPECIAL` with its
rule. An operator without an entry is a barrier. A rule is called as ``rule(channels, arguments)``, with all
arguments of the operator by name, and returns the ids of the result. In place of parameters, the arguments hold
`ParameterValue`, in place of other tensors their ids (see `permtriton.passes.provenance`).
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from permtriton.passes.channel_ids import differing_dims, differs
from permtriton.passes.channels import Channels
from permtriton.passes.combining import Arguments, Rule, combine, contracted, joined, mapped, parts_of
from permtriton.passes.graph import SAME, aten
from permtriton.passes.graph_values import Crossed, ParameterValue, leaves
from permtriton.passes.product_rules import NORMS, PRODUCTS
from permtriton.passes.row_rules import index_add, index_put, known_size, summed_parts, taken_rows

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
    part_counts = {len(x.parts) for x in tensors if isinstance(x, Crossed)}
    count = part_counts.pop() if len(part_counts) == 1 else 1
    results = []
    for parts in zip(*(_as_parts(c, x, count) for x in tensors), strict=True):
        channel_parts = [part for part in parts if part.numel() and c.all_channels(part)]
        if 0 < len(channel_parts) < len(parts) and not any(differs(part, dim) for part in channel_parts):
            channel = channel_parts[0].narrow(dim, 0, 1)
            constant = [part.numel() and not differing_dims(part) and not c.any_channel(part) for part in parts]
            parts = tuple(channel.expand(p.shape) if same else p for p, same in zip(parts, constant, strict=True))
            c.touch(channel)
        results.append(c.compact_repeats(torch.cat(parts, dim)))
    return joined(results)


def _as_parts(c: Channels, value: Any, count: int) -> Sequence[Tensor]:
    """Returns an operand as ``count`` tensors of ids; if it is not `Crossed`, only the first of them has channels."""
    if isinstance(value, Crossed) and len(value.parts) == count:
        return value.parts
    ids = c.ids_of(value)
    return [ids, *[c.new_ids(ids.shape) if c.any_channel(ids) else ids] * (count - 1)]


def _along(c: Channels, args: Arguments) -> Any:
    x, take = args["self"], c.node.target
    if isinstance(x, ParameterValue) and take is aten.slice.Tensor and (moved := x.moved(take, args)) is not None:
        return moved
    taken = [_taken(c, take, {**args, "self": part}) for part in parts_of(c, x)]
    results = [joined(parts) for parts in zip(*taken, strict=True)]
    return results[0] if isinstance(c.node.meta["val"], Tensor) else results


def _taken(c: Channels, take: Any, args: Arguments) -> list[Tensor]:
    """Returns the results of an operator of `ALONG` on ids.

    Adds the operator, and the tokens at which it takes each channel, to the contexts of the channels taken.
    """

    def results_on(ids: Tensor) -> list[Tensor]:
        result = take(**{**args, "self": ids})
        return [result] if isinstance(result, Tensor) else list(result)

    x = args["self"]
    results = results_on(x)
    if len(results) == 1 and results[0].shape == x.shape and take.overloadpacket not in _REORDERING:
        return results
    dims = args["dims"] if "dims" in args else [args["dim"]]
    if not dims:
        return [c.barrier(f"{take} across dimensions")]
    for dim in dims:
        if (tokens := c.occurrences(x, dim)) is not None:
            for ids, positions in zip(results, results_on(tokens), strict=True):
                c.add_opaque_context(ids, positions, f"{take} takes different tokens of some of them")
    c.touch(results)
    return [*map(c.compact_repeats, results)]


def _scatter(c: Channels, args: Arguments, take: Any) -> Any:
    """Writes ``src`` to the positions of ``self`` that the operator ``take`` would read."""
    x, source = c.ids_of(args["self"]), c.ids_of(args["src"])
    places = {name: value for name, value in args.items() if name not in ("self", "src")}
    _taken(c, take, {"self": x, **places})  # for the contexts: which of each channel's values are overwritten
    c.touch(source)
    write: Any = c.node.target
    return c.compact_repeats(write(self=x, src=source, **places))


def _copy(c: Channels, args: Arguments) -> Any:
    return mapped(c, args["src"], lambda part: part.expand(c.node.meta["val"].shape))


def _pad(c: Channels, args: Arguments) -> Any:
    """Pads: where channels repeat along a dimension, padding adds values of each; elsewhere, padding is no channel."""
    ids, pad, mode = c.ids_of(args["self"]), args["pad"], args.get("mode", "constant")
    c.touch(ids)
    constant = int(c.new_ids(()))
    for pair in range(len(pad) // 2):
        dim = ids.ndim - 1 - pair
        left, right = pad[2 * pair : 2 * pair + 2]
        if left == right == 0:
            continue
        if not differs(ids, dim) and c.all_channels(ids):
            ids = ids.narrow(dim, 0, 1).expand(*ids.shape[:dim], ids.shape[dim] + left + right, *ids.shape[dim + 1 :])
        elif mode != "constant":
            return c.barrier(f"{c.node.target} by {mode} among channels")
        else:
            bounds = {"self": ids, "dim": dim, "start": max(-left, 0), "end": ids.shape[dim] - max(-right, 0)}
            (cut,) = _taken(c, aten.slice.Tensor, bounds)
            ids = functional.pad(cut, [0, 0] * pair + [max(left, 0), max(right, 0)], value=constant)
    return ids


_REORDERING = {aten.flip, aten.roll, aten.index_select}


def _index(c: Channels, args: Arguments) -> Any:
    """Takes rows of a table as an embedding does, rows that depend on data, or positions by a constant index."""
    indices: Any = c.node.args[1]  # one per dimension; None takes the whole dimension
    table = isinstance(args["self"], ParameterValue) and len(args["self"].shape) == 2 and len(indices) == 1
    if table and indices[0].meta["val"].dtype == torch.int64:  # such as Whisper's position embedding
        return PRODUCTS[aten.embedding](c, {"weight": args["self"], "indices": args["indices"][0]})
    x = c.ids_of(args["self"])
    dim, *others = [dim for dim, index in enumerate(indices) if index is not None]
    index = None if others else _constant_value(indices[dim])
    if index is not None and index.ndim == 1 and index.dtype == torch.int64:
        bounds = {"self": x, "dim": dim, "index": index % x.shape[dim]}
        return _taken(c, aten.index_select.default, bounds)[0]
    if index is None and not others and not c.any_channel(c.ids_of(args["indices"][dim])):
        rows = taken_rows(c, x, dim, indices[dim], c.node.meta["val"].shape)
        if rows is not None:
            return rows
    return c.barrier(f"{c.node.target} by an index without known values")


def _constant_value(node: fx.Node) -> Tensor | None:
    """Returns, on the CPU, the constant of the model's code that a node is or copies.

    Returns None if it is neither, if the constant or a copy has several readers, or if the constant is a meta tensor.
    """
    while len(node.users) == 1 and getattr(node.target, "overloadpacket", None) in SAME:
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "get_attr" or len(node.users) != 1 or "lifted_tensor" not in str(node.target):
        return None
    value: Tensor = operator.attrgetter(str(node.target))(node.graph.owning_module)
    return None if value.is_meta else value.cpu()


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
        c.touch(first)
        return replace(first, computed=True)
    return combine(c, operands)


def _prelu(c: Channels, args: Arguments) -> Any:
    """A leaky ReLU with a learned slope for each channel of dimension 1, or one slope for all."""
    x, weight = args.values()
    per_channel = isinstance(weight, ParameterValue) and math.prod(weight.shape) > 1
    return combine(c, [x, weight.with_dims([0, *[None] * (c.ids_of(x).ndim - 2)]) if per_channel else weight])


def _glu(c: Channels, args: Arguments) -> Any:
    halves = {"self": c.ids_of(args["self"]), "chunks": 2, "dim": args["dim"]}
    return combine(c, _taken(c, aten.chunk.default, halves))


def _triangle(c: Channels, args: Arguments) -> Any:
    x = c.ids_of(args["self"])
    return combine(c, [x, c.new_ids(x.shape[-2:])])


def _reduction(c: Channels, args: Arguments) -> Any:
    ids, dims = joined(parts_of(c, args["self"])), args.get("dim")
    ndim = len(ids.shape)
    dims = [dims] if isinstance(dims, int) else dims or list(range(ndim))
    return contracted(c, summed_parts(c, ids, dims), dims, keep=c.node.meta["val"].ndim == ndim)


def _cumulative(c: Channels, args: Arguments) -> Any:
    parts = parts_of(c, args["self"])
    if any(differs(part, args["dim"]) for part in parts):
        return c.barrier(f"{c.node.target} along channels")
    c.touch(parts)
    return joined([*map(c.renew_ids, parts)])


def _extreme(c: Channels, args: Arguments) -> Any:
    """``max`` and ``min`` of two operands, of all values, or along one dimension, which also returns positions."""
    if "other" in args:
        return _elementwise(c, args)
    if "dim" not in args:
        return _reduction(c, args)
    ids = c.ids_of(args["self"])
    if differs(ids, args["dim"]):
        return _choice(c, args)
    c.touch(ids)
    result = c.reduce(ids, [args["dim"]], keep=c.node.meta["val"][0].ndim == ids.ndim)
    return [result, result]


def _softmax(c: Channels, args: Arguments) -> Any:
    parts = parts_of(c, args["self"])
    for part in parts:
        c.reduce(part, [args["dim"]], keep=True)
    return joined([*map(c.renew_ids, parts)])


def _choice(c: Channels, args: Arguments) -> Any:
    c.separate(args, f"{c.node.target} selects among them by position")
    return c.unknown(c.node.meta["val"])


# Operators of no other kind, each with its rule; those of permtriton are listed by their qualified names.
SPECIAL: dict[Any, Rule] = {
    operator.getitem: lambda c, args: operator.getitem(*args.values()),
    aten._assert_tensor_metadata: lambda c, args: None,
    **dict.fromkeys([aten.cat, aten.concat, aten.concatenate], _cat),
    aten.copy: _copy,
    **dict.fromkeys([aten.pad, aten.constant_pad_nd], _pad),
    aten.select_scatter: lambda c, args: _scatter(c, args, aten.select.int),
    aten.slice_scatter: lambda c, args: _scatter(c, args, aten.slice.Tensor),
    aten.glu: _glu,
    **dict.fromkeys([aten.max, aten.min], _extreme),
    aten.prelu: _prelu,
    **dict.fromkeys([aten.tril, aten.triu], _triangle),
    **PRODUCTS,
    **NORMS,
    **dict.fromkeys([aten.log_softmax, aten.softmax, aten._log_softmax, aten._softmax], _softmax),
    **dict.fromkeys([aten.topk, aten.gather], _choice),
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
