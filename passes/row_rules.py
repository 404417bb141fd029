"""What operators that take, write or sum whole rows, such as a token's or an expert's, do to channels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from permtriton.passes.channel_ids import differing_dims, differs, of_several_axes
from permtriton.passes.channels import Channels
from permtriton.passes.combining import Arguments, combine, mapped
from permtriton.passes.graph import PERMUTE, SPARSE_LINEAR, aten
from permtriton.passes.graph_values import leaves

# Operators whose rule takes ids of one row in place of rows whose number depends on data.
BY_ROWS = {
    aten.clone, aten.dropout, aten.gelu, aten.index, aten.index_put, aten.linear, aten.relu, aten.silu, aten.tanh,
    PERMUTE.overloadpacket, SPARSE_LINEAR.overloadpacket,
}  # fmt: skip


def known_size(node: fx.Node, packet: Any) -> bool:
    """Whether the sizes of all that an operator reads and returns are known, except, in `BY_ROWS`, the number of rows.

    The number of rows that a mask selects depends on data. Ids have one row instead, which few operators can take.
    """
    values = leaves([node.meta.get("val"), *(before.meta.get("val") for before in node.all_input_nodes)])
    sizes = [value.shape[int(packet in BY_ROWS) :] if isinstance(value, Tensor) else [value] for value in values]
    return not any(isinstance(size, torch.SymInt) for shape in sizes for size in shape)


def taken_rows(c: Channels, x: Tensor, dim: int, index: Any, shape: Sequence[Any]) -> Tensor | None:
    """Returns the ids of rows of ``x`` that data select, by positions along one dimension or a mask over several.

    Args:
        dim: First dimension that rows are taken along; the dimensions of the positions, or one for a mask, replace it.
        index: The node of the positions or of the mask.
        shape: Shape of the result; a size that is not known counts as 1.

    Returns:
        The ids; None unless all elements are channels, and all rows have the same ones.
    """
    dims = _indexed(dim, index)
    if any(differs(x, position) for position in dims) or not c.all_channels(x):
        return None
    c.touch(x)
    row_ids = x
    for _ in dims:
        row_ids = row_ids.select(dim, 0)
    for _ in range(len(shape) - row_ids.ndim):
        row_ids = row_ids.unsqueeze(dim)
    return row_ids.expand([size if isinstance(size, int) else 1 for size in shape])


def index_put(c: Channels, args: Arguments) -> Any:
    """Writes one row wherever a mask is true, or several under a mask or at positions: any row may go to any place."""
    x, source, nodes = c.ids_of(args["self"]), c.ids_of(args["values"]), list[Any](c.node.args[1])  # type: ignore[arg-type]
    if len(nodes) == 1 and isinstance(nodes[0], fx.Node):
        index, dims = c.ids_of(args["indices"][0]), _indexed(0, nodes[0])
        rest = x.ndim - len(dims)
        if nodes[0].meta["val"].dtype == torch.bool and source.ndim <= rest:
            return combine(c, [args["self"], args["values"], index.view(*index.shape, *[1] * rest)])
        fits = source.ndim == rest + 1 and not differs(source, 0) and not c.any_channel(index)
        if fits and not any(differs(x, position) for position in dims):
            return combine(c, [x, source[0].expand(x.shape)])
    return c.barrier(f"{c.node.target} by an index without known values")


def _indexed(dim: int, index: fx.Node) -> range:
    """Returns the dimensions, from ``dim`` on, that an index replaces: one for positions, as many as a mask has."""
    value = index.meta["val"]
    return range(dim, dim + (value.ndim if value.dtype == torch.bool else 1))


def index_add(c: Channels, args: Arguments) -> Any:
    """Adds each row of ``source`` to a row of ``self`` that depends on data and may be any row."""
    dim = args["dim"]
    x, index, source = (c.ids_of(args[name]) for name in ("self", "index", "source"))
    if differs(x, dim) or differs(source, dim) or c.any_channel(index):
        return c.barrier(f"{c.node.target} of rows that hold different channels")
    return combine(c, [x, source.narrow(dim, 0, 1).expand(x.shape)])


def summed_parts(c: Channels, ids: Any, dims: Sequence[int]) -> Any:
    """Joins slices along a reduced dimension that hold channels of different parameters, as operands of a sum.

    The results of several linears that are stacked and summed must move together. Slices of one parameter, such as the
    channels of a head, are left to `Channels.reduce`.

    Returns:
        The ids; along a joined dimension, the ids of the sum repeat.
    """
    if not isinstance(ids, Tensor) or not ids.ndim or not c.all_channels(ids):
        return ids
    dims, differing = [dim % ids.ndim - ids.ndim for dim in dims], differing_dims(ids)
    if differing <= {*dims}:
        return ids
    several = [dim for dim in dims if dim in differing and of_several_axes(ids, dim, c.starts)]
    if not several:
        return ids
    first = combine(c, list(ids.unbind(several[0])))
    return mapped(c, first, lambda part: part.unsqueeze(several[0]).expand(ids.shape))
