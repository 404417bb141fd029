"""How an operator on several tensors combines their channels: they move together, or add to each other's context.

Where a gate row is multiplied with one up row, both must move together. In an outer product, every row of one factor is
multiplied with every row of the other; the rows of either factor may then move independently if all of them are
multiplied with the same values. The result belongs to channels of both factors (`Crossed`).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from permtriton.passes.channel_ids import differing_dims, unexpanded
from permtriton.passes.channels import Channels
from permtriton.passes.graph_values import Crossed, ParameterValue

Arguments = dict[str, Any]  # all arguments of an operator, by name
Rule = Callable[[Channels, Arguments], Any]


def parts_of(c: Channels, value: Any, dim: int | None = None) -> list[Tensor]:
    """Returns the ids of an operand, one tensor per factor of a product; see `Channels.ids_of` for ``dim``."""
    return list(value.parts) if isinstance(value, Crossed) else [c.ids_of(value, dim)]


def joined(parts: Sequence[Tensor]) -> Any:
    """Returns one tensor of ids unchanged, several as `Crossed`."""
    return parts[0] if len(parts) == 1 else Crossed(tuple(parts))


def mapped(c: Channels, value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns the result of a function on tensors of ids, applied to each part of an operand."""
    return joined([function(part) for part in parts_of(c, value)])


def arranged(c: Channels, value: Any, dims: Sequence[int | None]) -> Any:
    """Returns an operand with its present dimensions in the order of ``dims``; None adds a dimension of size 1."""
    if isinstance(value, ParameterValue):
        return value.with_dims(dims)
    present = [dim for dim in dims if dim is not None]
    added = tuple(None if dim is None else slice(None) for dim in dims)
    return mapped(c, value, lambda ids: ids.permute(present)[added])


def combine(c: Channels, operands: Sequence[Any]) -> Any:
    """Returns the ids of an elementwise function of several operands, which are broadcast."""
    inputs = [part for operand in operands if not isinstance(operand, ParameterValue) for part in parts_of(c, operand)]
    ids = [parts_of(c, operand, _carrying(c, operand, inputs)) for operand in operands]
    parameters = [isinstance(operand, ParameterValue) for operand in operands]
    shape = torch.broadcast_shapes(*(parts[0].shape for parts in ids))
    if not any(c.any_channel(part) for parts in ids for part in parts):
        return _new_ids(c, shape, set().union(*map(differing_dims, inputs)))
    result, varying = [part.expand(shape) for part in ids[0]], _varying_dims(ids[0][0])
    c.touch(result)
    for parts, is_parameter in zip(ids[1:], parameters[1:], strict=True):
        others, others_varying = [part.expand(shape) for part in parts], _varying_dims(parts[0])
        _keep_order(c, result, others, others_varying)
        _keep_order(c, others, result, varying)
        varying |= others_varying
        for part in others:
            c.touch(part)
            result = _met(c, result, part, parameters[0] or is_parameter)
    return joined([c.renew_ids(part) for part in result if c.any_channel(part)])


def contracted(c: Channels, value: Any, dims: Sequence[int], *, keep: bool) -> Any:
    """Returns the ids of a reduction over ``dims`` that does not depend on the order along them."""
    parts = [c.reduce(part, dims, keep=keep) for part in parts_of(c, value)]
    return joined([part for part in parts if c.any_channel(part)] or parts[:1])


def _new_ids(c: Channels, shape: Sequence[int], differing: Collection[int]) -> Tensor:
    """Returns new ids, none of them channels, that differ along some dimensions of a shape, counted from the last."""
    dims = range(-len(shape), 0)
    return c.new_ids([size if dim in differing else 1 for dim, size in zip(dims, shape, strict=True)]).expand(shape)


def _varying_dims(ids: Tensor) -> set[int]:
    """Returns the dimensions along which an operand's values may differ, even if its ids do not.

    They cannot differ along a dimension in which the operator broadcasts the operand.
    """
    return {dim for dim in range(-ids.ndim, 0) if ids.shape[dim] > 1}


def _keep_order(c: Channels, parts: Sequence[Tensor], others: Sequence[Tensor], others_varying: set[int]) -> None:
    """Keeps channels at their positions along dimensions in which the values of ``others`` do not move with them.

    Such values have the ids of channels of another dimension: ``x[:, None] * table`` has the ids of ``x``, but varies
    along the columns of the table. Channels combined with this product may change places within a column only.
    """
    if not any(c.any_channel(other) for other in others):
        return  # `_met` then adds each value of ``others`` to a context
    fixed = others_varying.difference(*(_channel_dims(c, other) for other in others))
    for part in parts if fixed else ():
        if places := fixed & _channel_dims(c, part):
            reason = f"{c.node.target} combines each with values that do not move with it"
            c.add_opaque_context(part, _new_ids(c, part.shape, places), reason)


def _channel_dims(c: Channels, ids: Tensor) -> set[int]:
    """Returns the dimensions along which channels differ; ids that are no channels count as one channel."""
    if c.all_channels(ids):
        return differing_dims(ids)
    channels = unexpanded(ids).clamp_min(0)
    return {dim for dim in range(-ids.ndim, 0) if bool((channels != channels.narrow(dim, 0, 1)).any())}


def _met(c: Channels, result: list[Tensor], other: Tensor, attached: bool) -> list[Tensor]:
    """Returns the parts of the result after one more operand, ``other``, is joined or crossed with each of them."""
    if not c.any_channel(other):
        return [c.join(part, other) for part in result]
    remaining: list[Tensor] = []
    for part in result:
        if not c.any_channel(part):
            other = c.join(other, part)
            continue
        first, second = differing_dims(part), differing_dims(other)
        finer, coarser = _each_a_run(part, second), _each_a_run(other, first)
        # as in an outer product, both operands differ, but along no dimension in common
        is_outer = bool(first and second) and first.isdisjoint(second)
        if is_outer or (finer and coarser):
            c.cross(part, other)
            remaining.append(part)
        elif finer or coarser:
            c.cross(part, other)
            coarse, other = (other, part) if finer else (part, other)
            c.separate(coarse, f"{c.node.target} gives each a run of channels of its own")
        else:
            other = c.join(part, other, attached)
    return [*remaining, other]


def _each_a_run(ids: Tensor, others: set[int]) -> bool:
    """Whether neighbouring channels of ``ids``, such as a head's, are combined with one channel of another tensor.

    Args:
        others: `differing_dims` of the other tensor.
    """
    return bool(others) and any(_is_run(ids, dim) for dim in differing_dims(ids) - others)


def _is_run(ids: Tensor, dim: int) -> bool:
    """Whether a dimension holds neighbouring channels, in any order: a permutation must not change the answer."""
    line = ids.movedim(dim, -1)[(0,) * (ids.ndim - 1)]
    return bool(line.min() > 0) and int(line.sort().values.diff().min()) == 1


def _carrying(c: Channels, parameter: Any, others: Sequence[Tensor]) -> int | None:
    """Returns the only dimension of a parameter along which the channels of the other operands differ, or None."""
    if not isinstance(parameter, ParameterValue):
        return None
    ndim, differing = len(parameter.shape), set().union(*(differing_dims(ids) for ids in others if c.any_channel(ids)))
    stored = [dim for dim in range(ndim) if parameter.dims[dim] is not None and parameter.shape[dim] > 1]
    carrying = [dim for dim in stored if dim - ndim in differing]
    return carrying[0] if len(carrying) == 1 else None
