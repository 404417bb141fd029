"""N:M weights stored packed: what is kept, and where it stands.

A row of ``W [O, C]`` is stored as the ``kept`` values of each ``group`` consecutive channels and their positions in it:

    values     [O, C / group * kept], the dtype of W
    positions  uint8 [O, ceil(C / group * kept * bits / 8)],  bits = ceil(log2(group)) a position

Positions ascend inside a group and lie one after another from the lowest bit of a row's first byte on; bits left over
at the end of a row are 0. A group with fewer nonzero weights stores zeros at its first free positions, so that a weight
has exactly one packed form. Rows are independent. At 2:4 and 16 bits that is 9/16 of the dense weight.
Bytes moved by `unpack`: the packed weight read, the dense one written. At 2:4 Triton unpacks on a GPU, see
`permtriton.kernels.packing_triton`; other patterns, and packing, are plain torch.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from permtriton.errors import ModelError
from permtriton.kernels import packing_triton as kernels
from permtriton.kernels.launch import on_gpu
from permtriton.sparsity import NMPattern

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CHUNK = 1 << 20  # weights whose positions are unpacked at a time: 64-bit temporaries stay at a few MiB each


def pack(weight_OC: Tensor, kept: int, group: int) -> tuple[Tensor, Tensor]:
    """Returns (values, positions) of an N:M weight; `unpack` gives it back bit for bit.

    Args:
        weight_OC: ``[O, C]``, bfloat16, float16, float32 or float64, pruned along its last dimension.
        kept: weights kept in a group.
        group: consecutive channels in a group; divides C.

    Raises:
        ConfigError: the pattern is not possible.
        ModelError: a group holds more than ``kept`` nonzero weights; a weight is -0.0 or not finite; a shape or dtype
            that cannot be packed.
    """
    return torch.ops.permtriton.pack(weight_OC, kept, group)


def unpack(values: Tensor, positions: Tensor, in_features: int, kept: int, group: int) -> Tensor:
    """Returns the weight ``[O, in_features]`` that was packed. The content of ``positions`` is trusted.

    Raises:
        ModelError: shapes or dtypes that do not fit.
    """
    return torch.ops.permtriton.unpack(values, positions, in_features, kept, group)


def packed_shapes(
    out_features: int, in_features: int, kept: int, group: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the shapes of values and positions.

    Raises:
        ConfigError: the pattern is not possible.
        ModelError: ``in_features`` is no multiple of ``group``.
    """
    pattern = NMPattern(kept, group)
    if in_features % group:
        raise ModelError(f"{in_features} input channels cannot be packed at {pattern}: expected a multiple of {group}")
    row = in_features // group * kept
    return (out_features, row), (out_features, math.ceil(row * position_bits(group) / 8))


def position_bits(group: int) -> int:
    """Returns how many bits a position in a group takes."""
    return (group - 1).bit_length()


def pack_positions(slots: Tensor, group: int) -> Tensor:
    """Returns uint8 ``[O, bytes]`` of positions ``[O, K]``, each below ``group``: eight of them fill ``bits`` bytes."""
    bits = position_bits(group)
    eights = pad(slots.long(), (0, -slots.shape[1] % 8)).unflatten(1, (-1, 8))
    words = (eights << torch.arange(0, 8 * bits, bits, device=slots.device)).sum(2, keepdim=True)
    packed = (words >> torch.arange(0, 8 * bits, 8, device=slots.device)) & 255
    return packed.to(torch.uint8).flatten(1)[:, : math.ceil(slots.shape[1] * bits / 8)].contiguous()


def unpack_positions(positions: Tensor, count: int, group: int) -> Tensor:
    """Returns uint8 ``[O, count]``: the positions inside their groups."""
    return _unpack_all(positions, group)[:, :count]


def _unpack_all(positions: Tensor, group: int) -> Tensor:
    """Returns uint8 ``[O, 8 n]``: the positions, then what the padding bits hold."""
    bits = position_bits(group)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=positions.device)
        return ((positions.unsqueeze(2) >> shifts) & (2**bits - 1)).flatten(1)
    octets = pad(positions, (0, -positions.shape[1] % bits)).unflatten(1, (-1, bits)).long()
    words = (octets << torch.arange(0, 8 * bits, 8, device=positions.device)).sum(2, keepdim=True)
    slots = (words >> torch.arange(0, 8 * bits, bits, device=positions.device)) & (2**bits - 1)
    return slots.to(torch.uint8).flatten(1)


def check_packed(values: Tensor, positions: Tensor, out_features: int, in_features: int, kept: int, group: int) -> None:
    """Refuses what `pack` cannot have made; afterwards `unpack` is safe and `pack` of its result gives the same.

    Works on a chunk of rows at a time: its temporaries stay at some tens of MiB.

    Args:
        values: as stored.
        positions: as stored.
        out_features: O that the model has.
        in_features: C that the model has.
        kept: weights kept in a group.
        group: consecutive channels in a group.

    Raises:
        ConfigError: the pattern is not possible.
        ModelError: wrong shapes or dtypes, a position outside its group, positions that do not ascend, padding bits
            that are not 0, a value that is not finite or is -0.0, zeros not at the first free positions.
    """
    check_packed_shapes(values, positions, out_features, in_features, kept, group)
    starts = _starts(in_features, kept, group, values.device)
    for rows in _row_chunks(out_features, in_features):
        kept_values = values[rows]
        slots_and_padding = _unpack_all(positions[rows], group)
        slots, padding = slots_and_padding.split((values.shape[1], slots_and_padding.shape[1] - values.shape[1]), 1)
        _refuse(slots >= group, rows, f"a position outside its group of {group}")
        grouped = slots.unflatten(1, (-1, kept))
        _refuse(grouped[..., 1:] <= grouped[..., :-1], rows, "positions of a group that do not ascend")
        _refuse(padding != 0, rows, "padding bits that are not 0")
        _refuse(~kept_values.isfinite(), rows, "a value that is not finite")
        _refuse(_negative_zero(kept_values), rows, "a value of -0.0")
        weight = kept_values.new_zeros(kept_values.shape[0], in_features)
        weight.scatter_(1, slots.long() + starts, kept_values)
        chosen = _chosen(weight.unflatten(1, (-1, group)), kept).flatten(1)
        _refuse(~chosen.gather(1, slots.long() + starts), rows, "zeros that are not at the first free positions")


def pack_reference(weight_OC: Tensor, kept: int, group: int) -> tuple[Tensor, Tensor]:
    """Packing in plain torch, a chunk of rows at a time."""
    if weight_OC.dim() != 2 or weight_OC.dtype not in DTYPES:
        raise ModelError(
            f"a {weight_OC.dtype} weight of shape {list(weight_OC.shape)} cannot be packed: expected [out, in] of "
            + ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        )
    out_features, in_features = weight_OC.shape
    values_shape, positions_shape = packed_shapes(out_features, in_features, kept, group)
    values = weight_OC.new_empty(values_shape)
    positions = torch.empty(positions_shape, dtype=torch.uint8, device=weight_OC.device)
    for rows in _row_chunks(out_features, in_features):
        weight = weight_OC[rows]
        _refuse(~weight.isfinite(), rows, "a weight that is not finite")
        _refuse(_negative_zero(weight), rows, "a weight of -0.0: store 0.0")
        grouped = weight.unflatten(1, (-1, group))
        excess = f"more nonzero weights than {kept}:{group} keeps: prune before packing"
        _refuse(((grouped != 0).sum(2) > kept), rows, excess, group)
        chosen = _chosen(grouped, kept)
        places = chosen.flatten().nonzero().view(-1, values_shape[1])
        values[rows] = weight.reshape(-1)[places]
        positions[rows] = pack_positions(places % group, group)
    return values, positions


def unpack_reference(values: Tensor, positions: Tensor, in_features: int, kept: int, group: int) -> Tensor:
    """Unpacking in plain torch, a chunk of rows at a time."""
    check_packed_shapes(values, positions, values.shape[0], in_features, kept, group)
    weight_OC = values.new_zeros(values.shape[0], in_features)
    starts = _starts(in_features, kept, group, values.device)
    for rows in _row_chunks(values.shape[0], in_features):
        channels = unpack_positions(positions[rows], values.shape[1], group).long().add_(starts)
        weight_OC[rows].scatter_(1, channels, values[rows])
    return weight_OC


def _chosen(grouped: Tensor, kept: int) -> Tensor:
    """Returns bool ``[rows, groups, group]``: ``kept`` of each group, nonzero weights before zeros, in their order."""
    nonzero = grouped != 0
    free = ~nonzero
    spare = kept - nonzero.sum(2, keepdim=True)
    return nonzero | (free & (free.cumsum(2, dtype=torch.int8) <= spare))


def _negative_zero(values: Tensor) -> Tensor:
    return (values == 0) & values.signbit()


def _starts(in_features: int, kept: int, group: int, device: torch.device) -> Tensor:
    """Returns int64 ``[in_features / group * kept]``: the first channel of the group of each kept value."""
    return torch.arange(0, in_features, group, device=device).repeat_interleave(kept)


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(CHUNK // max(columns, 1), 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _refuse(bad: Tensor, rows: slice, what: str, group: int | None = None) -> None:
    """Raises ModelError where ``bad`` (rows first) holds anywhere, naming the first row, and the group where asked."""
    if bool(bad.any()):
        first = bad.nonzero()[0].tolist()
        where = f"row {rows.start + first[0]}"
        if group is not None:
            where += f", group {first[1]} (channels {first[1] * group} to {(first[1] + 1) * group - 1})"
        raise ModelError(f"{where}: {what}")


def check_packed_shapes(
    values: Tensor, positions: Tensor, out_features: int, in_features: int, kept: int, group: int
) -> None:
    """Refuses values and positions of shapes or dtypes that no such weight has; their content is not looked at.

    Raises:
        ConfigError: the pattern is not possible.
        ModelError: with what was found and what was expected.
    """
    expected_values, expected_positions = packed_shapes(out_features, in_features, kept, group)
    if values.dtype not in DTYPES or positions.dtype != torch.uint8:
        raise ModelError(
            f"packed values of {values.dtype} with positions of {positions.dtype}: expected floating-point values of "
            "16 to 64 bits with positions of torch.uint8"
        )
    if (tuple(values.shape), tuple(positions.shape)) != (expected_values, expected_positions):
        raise ModelError(
            f"packed values of shape {list(values.shape)} with positions of shape {list(positions.shape)}: expected "
            f"{list(expected_values)} and {list(expected_positions)} for a weight [{out_features}, {in_features}] at "
            f"{kept}:{group}"
        )


@torch.library.custom_op("permtriton::pack", mutates_args=())
def _pack(weight: Tensor, kept: int, group: int) -> tuple[Tensor, Tensor]:
    return pack_reference(weight, kept, group)


@_pack.register_fake
def _(weight: Tensor, kept: int, group: int) -> tuple[Tensor, Tensor]:
    values_shape, positions_shape = packed_shapes(weight.shape[0], weight.shape[1], kept, group)
    return weight.new_empty(values_shape), weight.new_empty(positions_shape, dtype=torch.uint8)


@torch.library.custom_op("permtriton::unpack", mutates_args=())
def _unpack(values: Tensor, positions: Tensor, in_features: int, kept: int, group: int) -> Tensor:
    return unpack_reference(values, positions, in_features, kept, group)


@on_gpu(_unpack)
def _unpack_cuda(values: Tensor, positions: Tensor, in_features: int, kept: int, group: int) -> Tensor:
    if not kernels.supports(values.dtype, in_features, kept, group):
        return unpack_reference(values, positions, in_features, kept, group)
    check_packed_shapes(values, positions, values.shape[0], in_features, kept, group)
    return kernels.unpack_triton(values, positions, in_features)


@_unpack.register_fake
def _(values: Tensor, positions: Tensor, in_features: int, kept: int, group: int) -> Tensor:
    return values.new_empty(values.shape[0], in_features)
