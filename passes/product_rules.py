"""What products (linears, convolutions, embeddings, attention) and norms do to channels.

The rows of a weight are the channels of the result, and its columns move together with the channels of the input.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from permtriton.passes.channel_ids import differs
from permtriton.passes.channels import Channels
from permtriton.passes.combining import Arguments, Rule, arranged, combine, contracted, mapped
from permtriton.passes.graph import argument, aten, source_of
from permtriton.passes.graph_values import ParameterValue, Products

# -- a weight ----------------------------------------------------------------------------------------------------------


def _linear(c: Channels, x: Any, weight: Any, bias: Any = None, *, position: int = 0) -> Any:
    """Returns the product of ``x``, the node's argument number ``position``, with a weight."""
    x = c.ids_of(x)
    if not isinstance(weight, ParameterValue) or not weight.is_matrix:
        return c.barrier("a product with a computed weight")
    rows = c.axis(weight, 0)
    _contract(c, x, weight, position)
    _add_bias(c, rows, bias)
    if rows.numel() == 1:  # a gate: one value for all channels that it is multiplied with
        return c.new_ids((*x.shape[:-1], 1))
    return rows.expand(*x.shape[:-1], -1)


def _contract(c: Channels, x: Tensor, weight: ParameterValue, position: int = 0) -> None:
    """Joins dimension 1 of a weight with the last dimension of the activation ``x``, and records the product."""
    columns, in_dim = c.axis(weight, 1), weight.dims[1]
    channels, problem = c.channels_of(x)
    if problem:
        c.separate([x, columns], problem)
    else:
        c.unite(columns, channels, attached=True)
    assert in_dim is not None
    products = c.linears.setdefault(weight.name, Products(weight.name, in_dim))
    products.nodes.append(c.node)
    products.sources.append(source_of(argument(c.node, position)))


def _one_order(c: Channels, x: Tensor) -> Tensor:
    """Joins the inputs ``[stack, tokens, channels]`` of stacked weights, and returns the first input's ids for all."""
    if x.ndim == 3 and c.all_channels(x) and differs(x, 0) and not differs(x, 1):
        first = x[:1].expand(x.shape)
        c.unite(first, x)
        return first
    return x


def _add_bias(c: Channels, rows: Tensor, bias: Any) -> None:
    if bias is None:
        return
    bias = c.ids_of(bias)
    if bias.shape == rows.shape and c.all_channels(bias):
        c.unite(bias, rows, attached=True)
    elif rows.numel() > 1:
        c.separate([rows, bias], "their bias is not a parameter with one value per channel")


def _addmm(c: Channels, args: Arguments) -> Any:
    if isinstance(args["mat2"], ParameterValue):
        return _linear(c, args["mat1"], args["mat2"].transposed(), args["self"], position=1)
    return combine(c, [args["self"], _matmul(c, args["mat1"], args["mat2"], first=1)])


def _matmul(c: Channels, a: Any, b: Any, first: int = 0) -> Any:
    """Multiplies ``a``, which is at position ``first`` of the node's arguments, with ``b``, which follows it."""
    if isinstance(b, ParameterValue) and b.is_matrix:
        return _linear(c, a, b.transposed(), position=first)
    if isinstance(b, ParameterValue) and len(b.shape) == 3 and not b.computed and None not in b.dims:
        c.separate(c.axis(b, 0), "each has weights of its own")  # a stack of weights that share one order
        _contract(c, _one_order(c, c.ids_of(a)), b)
        return c.axis(b, 2).expand(c.node.meta["val"].shape)
    if isinstance(a, ParameterValue) and a.is_matrix and c.node.meta["val"].ndim > 1:
        return c.compact_repeats(_linear(c, c.ids_of(mapped(c, b, lambda part: part.mT)), a, position=first + 1).mT)
    if c.node.meta["val"].ndim < 2 or min(len(a.shape), len(b.shape)) < 2:
        return c.barrier("a product with a vector")
    a, b = mapped(c, a, lambda part: part.unsqueeze(-1)), mapped(c, b, lambda part: part.unsqueeze(-3))
    return contracted(c, combine(c, [a, b]), [-2], keep=False)


def _einsum(c: Channels, args: Arguments) -> Any:
    """A product of tensors, each with a letter per dimension, summed over the letters that the result lacks."""
    equation, operands = args["equation"].replace(" ", ""), args["tensors"]
    inputs, arrow, result_letters = equation.partition("->")
    terms = inputs.split(",")
    if not arrow or "." in equation or any(len(set(term)) != len(term) for term in [*terms, result_letters]):
        return c.barrier(f"{c.node.target} {equation}")
    letters = result_letters + "".join(dict.fromkeys(letter for letter in inputs if letter not in result_letters + ","))
    summed_dims = list(range(len(result_letters), len(letters)))
    result = combine(
        c,
        [
            arranged(c, operand, [term.index(letter) if letter in term else None for letter in letters])
            for term, operand in zip(terms, operands, strict=True)
        ],
    )
    return contracted(c, result, summed_dims, keep=False) if summed_dims else result


def _conv(c: Channels, args: Arguments) -> Any:
    """A convolution: a product at every position of its kernel, over all channels or within groups of channels."""
    weight, groups = args["weight"], args["groups"]
    is_stored = isinstance(weight, ParameterValue) and not weight.computed and weight.dims[0] is not None
    if not is_stored or (groups == 1 and weight.dims[1] is None) or args.get("transposed"):
        return c.barrier(f"{c.node.target} with a computed or transposed weight")
    x, rows = c.ids_of(args["input"]), c.axis(weight, 0)
    kernel = len(weight.shape) - 2
    for positions in c.axes(weight)[1 if weight.dims[1] is None else 2 :]:
        c.separate(positions, "they are positions of a convolution's kernel")
    c.touch(x)
    _add_bias(c, rows, args["bias"])
    if groups != 1:
        return _by_groups(c, x, weight, groups, args["stride"])
    _contract(c, x.movedim(x.ndim - 1 - kernel, -1), weight)
    return rows.view(-1, *[1] * kernel).expand(c.node.meta["val"].shape)


def _by_groups(c: Channels, x: Tensor, weight: ParameterValue, groups: int, stride: Sequence[int]) -> Any:
    """A grouped convolution. Channels may move if it is depthwise, and mixes or skips only positions of one channel."""
    rows, shape, kernel = c.axis(weight, 0), c.node.meta["val"].shape, len(weight.shape) - 2
    problem = "" if groups == x.shape[-1 - kernel] == rows.numel() else f"{c.node.target} reads them in groups"
    for dim in range(-kernel, 0):
        is_pointwise = weight.shape[dim] == 1 and shape[dim] == x.shape[dim] and set(stride) == {1}
        if not is_pointwise and differs(x, dim):
            problem = problem or "its input mixes tokens into channels"
        elif not is_pointwise:
            x = x.narrow(dim, 0, 1)
    if not problem:
        return combine(c, [x.expand(*shape), weight.with_dims([0, *[None] * kernel])])
    c.separate([x, weight], problem)
    return rows.view(-1, *[1] * kernel).expand(shape)


def _sparse_linear(c: Channels, args: Arguments) -> Any:
    x, weight, index = c.ids_of(args["x"]), args["values"], c.index_argument(4)
    packed = isinstance(weight, ParameterValue) and weight.shape[-1] == args["in_features"]
    if not packed or (index is None and args["index"] is not None):
        return c.barrier(f"{c.node.target} on a weight that no node of the graph packs")
    return _linear(c, x if index is None else c.gather(x, index, -1), weight, args["bias"])


def _embedding(c: Channels, args: Arguments) -> Any:
    weight, indices = args["weight"], c.ids_of(args["indices"])
    if not isinstance(weight, ParameterValue) or not weight.is_matrix:
        return c.barrier("an embedding of a computed table")
    c.separate(indices, f"{c.node.target} makes numbers of them, each of which it looks up")
    c.separate(c.axis(weight, 0), f"{c.node.target} looks them up by their numbers")
    return c.axis(weight, 1).expand(*indices.shape, -1)


# -- norms, attention --------------------------------------------------------------------------------------------------


def _norm(c: Channels, args: Arguments, first: int, groups: int = 1) -> Any:
    """Normalizes over dimension ``first``, in groups of its positions, and over all dimensions after it."""
    x = c.renew_ids(c.ids_of(next(iter(args.values()))))
    first %= x.ndim
    c.touch(x)
    split = x.unflatten(first, (groups, -1))
    c.reduce(split, range(first + 1, split.ndim), keep=True)
    for vector in (args["weight"], args.get("bias")):
        if vector is not None:
            ids = c.ids_of(vector)
            ids = ids.view(*ids.shape, *[1] * (x.ndim - first - ids.ndim))
            x = c.join(x, ids, isinstance(vector, ParameterValue))
    return x


def _norm_permute(c: Channels, args: Arguments) -> Any:
    index = c.index_argument(3)
    if index is None:
        return c.barrier(f"{c.node.target} by a computed index")
    return c.gather(_norm(c, args, -1), index, -1)


def _attention(c: Channels, args: Arguments) -> Any:
    q, k, v = (c.ids_of(args[name]) for name in ("query", "key", "value"))
    c.separate(args["attn_mask"], "they are an attention mask")
    if args["enable_gqa"]:  # otherwise, heads are broadcast
        repeats = q.shape[-3] // k.shape[-3]
        k, v = (c.compact_repeats(t.repeat_interleave(repeats, -3)) for t in (k, v))
    scores = c.reduce(c.join(q.unsqueeze(-2), k.unsqueeze(-3)), [-1], keep=False)
    return c.reduce(c.join(scores.unsqueeze(-1), v.unsqueeze(-3)), [-2], keep=False)


PRODUCTS: dict[Any, Rule] = {
    aten.linear: lambda c, args: _linear(c, *args.values()),
    aten.addmm: _addmm,
    **dict.fromkeys([aten.matmul, aten.mm, aten.bmm], lambda c, args: _matmul(c, *args.values())),
    aten.baddbmm: lambda c, args: combine(c, [args["self"], _matmul(c, args["batch1"], args["batch2"])]),
    aten.einsum: _einsum,
    **dict.fromkeys([aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution], _conv),
    aten.embedding: _embedding,
    aten.scaled_dot_product_attention: _attention,
    "permtriton::nm_mask": lambda c, args: args["weight"],
    "permtriton::pack": lambda c, args: [args["weight_OC"]] * 2,
    "permtriton::sparse_linear": _sparse_linear,
}
NORMS: dict[Any, Rule] = {
    **dict.fromkeys([aten.layer_norm, aten.rms_norm], lambda c, args: _norm(c, args, -len(args["normalized_shape"]))),
    aten.group_norm: lambda c, args: _norm(c, args, 1, args["num_groups"]),
    "permtriton::norm_permute": _norm_permute,
}
