"""How an operator on several tensors combines their channels: they move together, or add to each other's context.

Where a gate row is multiplied with one up row, both must move together. In an outer product, every row of one factor is
multiplied with every row of the other; the rows of either factor may then move independently if all of them are
multiplied with the same values. The result belongs to channels of both factors (`Crossed`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from permtriton.passes.channel_ids import differs, unexpanded
from permtriton.passes.channels import Channels
from permtriton.passes.graph_values import Crossed, ParameterValue

Arguments = dict[str, Any]  # all arguments of an operator, by name
Rule = Callable[[Channels, Arguments], Any]


def parts_of(c: Channels, value: Any, dim: int | None = None) -> list[Tensor]:
    """Returns the ids of an operand, one tensor per factor of a product; see `Channels.ids_of` for ``dim``."""
    return list(value.parts) if isinstance(value, Crossed) else [c.ids_of(value, dim)]


def joined(parts: Sequence[Tensor]) -> Any:
    """Returns one tensor of ids as it is, several as `Crossed`."""
    return parts[0] if len(parts) == 1 else Crossed(tuple(parts))


def mapped(c: Channels, value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns the result of a function on tensors of ids, applied to each part of an operand."""
    return joined([function(part) for part in parts_of(c, value)])


def combine(c: Channels, operands: Sequence[Any]) -> Any:
    """Returns the ids of an elementwise function of several operands, which are broadcast."""
    inputs = [part for operand in operands if not isinstance(operand, ParameterValue) for part in parts_of(c, operand)]
    ids = [parts_of(c, operand, _carrying(c, operand, inputs)) for operand in operands]
    parameters = [isinstance(operand, ParameterValue) for operand in operands]
    shape = torch.broadcast_shapes(*(parts[0].shape for parts in ids))
    if not any(c.any_channel(part) for parts in ids for part in parts):
        return _opaque(c, shape, inputs)
    result = [part.expand(shape) for part in ids[0]]
    varies = _varies(ids[0], shape)
    for part in result:
        c.touch(part)
    for number in range(1, len(ids)):
        others, others_vary = [part.expand(shape) for part in ids[number]], _varies(ids[number], shape)
        _keep_order(c, result, others, others_vary)
        _keep_order(c, others, result, varies)
        varies = [any(pair) for pair in zip(varies, others_vary, strict=True)]
        for part in ids[number]:
            c.touch(part)
            result = _met(c, result, part.expand(shape), parameters[0] or parameters[number])
    return joined([c.renew_ids(part) for part in result if c.any_channel(part)])


def contracted(c: Channels, value: Any, dims: Sequence[int], *, keep: bool) -> Any:
    """Returns the ids of a reduction over ``dims`` that does not depend on the order along them."""
    parts = [c.reduce(part, dims, keep=keep) for part in parts_of(c, value)]
    return joined([part for part in parts if c.any_channel(part)] or parts[:1])


def _opaque(c: Channels, shape: Sequence[int], operands: Sequence[Tensor]) -> Tensor:
    """Returns new ids, none of them channels, that are equal along the dimensions in which no operand differs."""
    different = [any(part.ndim + dim >= 0 and differs(part)[dim] for part in operands) for dim in range(-len(shape), 0)]
    return c.new_ids(tuple(size if differ else 1 for size, differ in zip(shape, different, strict=True))).expand(shape)


def _varies(parts: Sequence[Tensor], shape: Sequence[int]) -> list[bool]:
    """Returns for each dimension of ``shape`` whether an operand's values may differ along it, even if its ids do not.

    They cannot differ along a dimension in which the operator broadcasts the operand.
    """
    return [False] * (len(shape) - parts[0].ndim) + [size > 1 for size in parts[0].shape]


def _keep_order(c: Channels, parts: Sequence[Tensor], others: Sequence[Tensor], others_vary: Sequence[bool]) -> None:
    """Keeps channels at their positions along dimensions in which the values of ``others`` do not move with them.

    Such values have the ids of channels of another dimension: ``x[:, None] * table`` has the ids of ``x``, but varies
    along the columns of the table. Channels combined with this product may change places within a column only.
    """
    if not any(c.any_channel(other) for other in others):
        return  # `_met` then adds each value of ``others`` to a context
    moving = [any(differing) for differing in zip(*(_channels_differ(c, other) for other in others), strict=True)]
    for part in parts:
        if not c.any_channel(part):
            continue
        meetings = zip(_channels_differ(c, part), others_vary, moving, strict=True)
        fixed = [differ and vary and not moves for differ, vary, moves in meetings]
        if any(fixed):
            places = c.new_ids(tuple(size if fix else 1 for size, fix in zip(part.shape, fixed, strict=True)))
            c.add_opaque_context(part, places, f"{c.node.target} combines each with values that do not move with it")


def _channels_differ(c: Channels, ids: Tensor) -> list[bool]:
    """Returns for each dimension whether channels differ along it; ids that are no channels count as one channel."""
    if c.all_channels(ids):
        return differs(ids)
    channels = unexpanded(ids).clamp_min(0)
    return [bool((channels != channels.narrow(dim, 0, 1)).any()) for dim in range(ids.ndim)]


def _met(c: Channels, result: list[Tensor], other: Tensor, attached: bool) -> list[Tensor]:
    """Returns the parts of the result after one more operand, ``other``, is joined or crossed with each of them."""
    if not c.any_channel(other):
        return [c.join(part, other) for part in result]
    remaining: list[Tensor] = []
    for part in result:
        if not c.any_channel(part):
            other = c.join(other, part)
            continue
        first, second = differs(part), differs(other)
        finer, coarser = _each_a_run(part, second), _each_a_run(other, first)
        # like the factors of an outer product, both differ, but along no dimension in common
        is_outer = any(first) and any(second) and not any(x and y for x, y in zip(first, second, strict=True))
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


def _each_a_run(ids: Tensor, others: Sequence[bool]) -> bool:
    """Whether neighbouring channels of ``ids`` are combined with one channel of another tensor.

    Examples are the channels of a head, combined with one value per head. ``others`` is `differs` of the other tensor.
    """
    return any(others) and any(_is_run(ids, dim) for dim, differ in enumerate(others) if not differ)


def _is_run(ids: Tensor, dim: int) -> bool:
    """Whether a dimension holds neighbouring channels, in any order: a permutation must not change the answer."""
    if not differs(ids)[dim]:
        return False
    line = ids.movedim(dim, -1)[(0,) * (ids.ndim - 1)]
    return bool(line.min() > 0) and int(line.sort().values.diff().min()) == 1


def _carrying(c: Channels, parameter: Any, others: Sequence[Tensor]) -> int | None:
    """Returns the only dimension of a parameter along which the channels of the other operands differ, or None."""
    if not isinstance(parameter, ParameterValue):
        return None
    ndim = len(parameter.shape)
    dims = [
        dim
        for dim, stored in enumerate(parameter.dims)
        if stored is not None
        and parameter.shape[dim] > 1
        and any(ids.ndim >= ndim - dim and differs(ids)[dim - ndim] and c.any_channel(ids) for ids in others)
    ]
    return dims[0] if len(dims) == 1 else None
