# mypy: allow-untyped-defs
"""Packed N:M weights: the kept values and their positions.

A row of ``W [O, C]`` is stored as the ``kept`` values of each ``group`` of consecutive channels, and their positions in
the group:

    values     [O, C / group * kept], the dtype of W
    positions  uint8 [O, ceil(C / group * kept * bits / 8)],  bits = ceil(log2(group)) per position

Positions ascend within a group. They follow each other from the lowest bit of a row's first byte on; unused bits at the
end of a row are 0. A group with fewer than ``kept`` nonzero weights also stores its first zeros, so that a weight has
exactly one packed form. Rows are independent. At 2:4 and 16 bits this takes 9/16 of the dense weight's bytes.
Bytes moved by `unpack`: the packed weight read, the dense one written.

On a GPU, Triton unpacks 2:4 weights; other patterns, and packing, are plain torch. Eight values of a row of W (16 bytes
at 16 bits) and a 16-bit word of their positions make four groups of channels. A thread loads both at once and
decompresses them in registers, so that only packed bytes of W are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from permtriton.errors import ModelError
from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import DTYPES as TRITON_DTYPES
from permtriton.kernels.launch import Config, jit, tl, triton
from permtriton.kernels.operator import operator
from permtriton.util.sparsity import NMPattern

DTYPES, FLOAT8 = (torch.bfloat16, torch.float16, torch.float32, torch.float64), torch.float8_e4m3fn
CHUNK = 1 << 20  # weights whose positions are unpacked at once: 64-bit temporaries take a few MiB each

PATTERN = NMPattern(2, 4)  # the only one that the kernels read
WORD = 16  # channels whose positions fill 16 bits

CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 4, "TILE_C": 1024}, num_warps=4, num_stages=1),
    Config({"TILE_O": 8, "TILE_C": 1024}, num_warps=8, num_stages=1),
    Config({"TILE_O": 8, "TILE_C": 512}, num_warps=4, num_stages=1),
    Config({"TILE_O": 2, "TILE_C": 2048}, num_warps=4, num_stages=1),
)


def packed_shapes(out_features: int, in_features: int, pattern: NMPattern) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the shapes of a packed weight: of the values, ``[O, C / M * N]``, and the positions, ``[O, bytes]``."""
    if in_features % pattern.group:
        raise ModelError(
            f"{in_features} input channels cannot be packed at {pattern}: expected a multiple of {pattern.group}"
        )
    row = in_features // pattern.group * pattern.kept
    return (out_features, row), (out_features, math.ceil(row * position_bits(pattern.group) / 8))


def position_bits(group: int) -> int:
    return (group - 1).bit_length()


def packed_share(kept: int, group: int, element: int) -> float:
    """Returns the bytes of a packed weight of ``element`` bytes per value, as a share of those of the dense one."""
    return kept / group * (1 + position_bits(group) / (8 * element))


def pack_positions(slots: Tensor, group: int) -> Tensor:
    """Returns positions ``[O, K]``, each below ``group``, as uint8 ``[O, bytes]``, `position_bits` bits for each."""
    bits = position_bits(group)
    eights = pad(slots.long(), (0, -slots.shape[1] % 8)).unflatten(1, (-1, 8))
    words = (eights << torch.arange(0, 8 * bits, bits, device=slots.device)).sum(2, keepdim=True)
    packed = (words >> torch.arange(0, 8 * bits, 8, device=slots.device)) & 255
    return packed.to(torch.uint8).flatten(1)[:, : math.ceil(slots.shape[1] * bits / 8)].contiguous()


def unpack_positions(positions: Tensor, count: int, group: int) -> Tensor:
    """Returns uint8 ``[O, count]``: the positions inside their groups."""
    bits = position_bits(group)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=positions.device)
        return ((positions.unsqueeze(2) >> shifts) & (2**bits - 1)).flatten(1)[:, :count]
    octets = pad(positions, (0, -positions.shape[1] % bits)).unflatten(1, (-1, bits)).long()
    words = (octets << torch.arange(0, 8 * bits, 8, device=positions.device)).sum(2, keepdim=True)
    slots = (words >> torch.arange(0, 8 * bits, bits, device=positions.device)) & (2**bits - 1)
    return slots.to(torch.uint8).flatten(1)[:, :count]


def _chosen(grouped: Tensor, kept: int) -> Tensor:
    """Returns bool ``[rows, groups, group]``: all nonzero weights, and a group's first zeros to make up ``kept``."""
    free = grouped == 0
    spare = kept - grouped.shape[2] + free.sum(2, keepdim=True, dtype=torch.int8)
    return ~free | (free.cumsum(2, dtype=torch.int8) <= spare)


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(CHUNK // max(columns, 1), 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def check_packed_shapes(
    values: Tensor, positions: Tensor, in_features: int, pattern: NMPattern, dtypes: Sequence[torch.dtype] = DTYPES
) -> None:
    """Refuses values and positions whose dtypes or shapes do not fit the arguments; does not check their content."""
    shapes = packed_shapes(values.shape[0], in_features, pattern)
    fits = values.dtype in dtypes and positions.dtype == torch.uint8
    if not fits or (tuple(values.shape), tuple(positions.shape)) != shapes:
        raise ModelError(
            f"packed values of {values.dtype} {list(values.shape)} with positions of {positions.dtype} "
            f"{list(positions.shape)}: expected {' or '.join(map(str, dtypes))} {list(shapes[0])} with torch.uint8 "
            f"{list(shapes[1])} for {in_features} channels at {pattern}"
        )


def _empty_packed(weight: Tensor, pattern: NMPattern) -> tuple[Tensor, Tensor]:
    values_shape, positions_shape = packed_shapes(weight.shape[0], weight.shape[1], pattern)
    return weight.new_empty(values_shape), weight.new_empty(positions_shape, dtype=torch.uint8)


@operator(_empty_packed)
def pack(weight_OC: Tensor, pattern: NMPattern) -> tuple[Tensor, Tensor]:
    """Returns (values, positions) of an N:M weight; `unpack` restores it bit for bit.

    Args:
        weight_OC: ``[O, C]``, bfloat16, float16, float32 or float64, pruned along its last dimension.
        pattern: Its group divides C.

    Raises:
        ModelError: a group holds more than ``kept`` nonzero weights; a weight is -0.0 or not finite; a shape or dtype
            that cannot be packed.
    """
    if weight_OC.dim() != 2 or weight_OC.dtype not in DTYPES:
        raise ModelError(
            f"a {weight_OC.dtype} weight of shape {list(weight_OC.shape)} cannot be packed: expected [out, in] of "
            + ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        )
    out_features, in_features = weight_OC.shape
    values, positions = _empty_packed(weight_OC, pattern)
    for rows in _row_chunks(out_features, in_features):
        weight = weight_OC[rows].contiguous()  # masked weights are transposed views, slow to sum in groups
        chosen = _chosen(weight.unflatten(1, (-1, pattern.group)), pattern.kept)
        too_many = chosen.sum(2, dtype=torch.int8) > pattern.kept
        for what, bad in (
            ("a weight that is not finite", ~weight.isfinite()),
            ("a weight of -0.0: store 0.0", (weight == 0) & weight.signbit()),
            (f"more nonzero weights in a group than {pattern} keeps: prune before packing", too_many),
        ):
            if bool(bad.any()):
                raise ModelError(f"row {rows.start + int(bad.nonzero()[0, 0])}: {what}")
        kept = weight.shape[0] * values.shape[1]
        places = torch.nonzero_static(chosen.flatten(), size=kept).view(-1, values.shape[1])
        values[rows] = weight.reshape(-1)[places]
        positions[rows] = pack_positions(places % pattern.group, pattern.group)
    return values, positions


def unpack_reference(values: Tensor, positions: Tensor, in_features: int, pattern: NMPattern) -> Tensor:
    """Returns the dense weight ``[O, in_features]``, in chunks of rows. The content of ``positions`` is trusted."""
    if values.dtype == FLOAT8:  # torch does not scatter float8, so its bytes are unpacked
        return unpack_reference(values.view(torch.uint8), positions, in_features, pattern).view(FLOAT8)
    weight_OC = values.new_zeros(values.shape[0], in_features)
    # the first channel of the group of each kept value
    starts = torch.arange(0, in_features, pattern.group, device=values.device).repeat_interleave(pattern.kept)
    for rows in _row_chunks(values.shape[0], in_features):
        channels = unpack_positions(positions[rows], values.shape[1], pattern.group).long().add_(starts)
        weight_OC[rows].scatter_(1, channels, values[rows])
    return weight_OC


@jit
def _unpack_kernel(
    values_ptr, positions_ptr, weight_ptr, out_features, words, TILE_O: tl.constexpr, TILE_C: tl.constexpr
):  # fmt: skip
    o = tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)
    valid, lines = (o < out_features)[:, None], o.to(tl.int64)[:, None]
    k = tl.program_id(1) * (TILE_C // 2) + tl.arange(0, TILE_C // 2)
    word = tl.program_id(1) * (TILE_C // 16) + tl.arange(0, TILE_C // 16)
    c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    kept = tl.load(values_ptr + lines * (words * 8) + k[None, :], mask=valid & (k < words * 8)[None, :], other=0.0)
    packed = tl.load(positions_ptr + lines * words + word[None, :], mask=valid & (word < words)[None, :], other=0)
    first, second = tl.split(tl.reshape(kept, [TILE_O, TILE_C // 4, 2]))
    bits = packed.to(tl.int32)[:, :, None] >> (tl.arange(0, 4) * 4)[None, None, :]
    bits = tl.reshape(bits, [TILE_O, TILE_C // 4])
    slot, other = bits & 3, (bits >> 2) & 3  # slot < other
    zero = tl.zeros_like(first)
    w0 = tl.where(slot == 0, first, zero)
    w1 = tl.where(slot == 1, first, tl.where(other == 1, second, zero))
    w2 = tl.where(slot == 2, first, tl.where(other == 2, second, zero))
    w3 = tl.where(other == 3, second, zero)
    dense = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE_O, TILE_C])
    tl.store(weight_ptr + lines * (words * 16) + c[None, :], dense, mask=valid & (c < words * 16)[None, :])


def supports(dtype: torch.dtype, in_features: int, pattern: NMPattern) -> bool:
    """Whether the kernel unpacks a weight: 2:4, a multiple of 16 channels, in float8, 16 bits or float32."""
    return pattern == PATTERN and in_features % WORD == 0 and dtype in (*TRITON_DTYPES, FLOAT8)


def unpack_triton(values: Tensor, positions: Tensor, in_features: int, pattern: NMPattern) -> Tensor:
    if values.dtype == FLOAT8:
        return unpack_triton(values.view(torch.int8), positions, in_features, pattern).view(FLOAT8)
    out_features = values.shape[0]
    weight = torch.empty((out_features, in_features), dtype=values.dtype, device=values.device)
    options = config_for("packing", CONFIGS, (out_features, in_features), values.dtype).arguments()
    grid = (triton.cdiv(out_features, options["TILE_O"]), triton.cdiv(in_features, options["TILE_C"]))
    _unpack_kernel[grid](
        values.contiguous(), positions.contiguous().view(torch.int16), weight, out_features, in_features // WORD,
        **options,
    )  # fmt: skip
    return weight


unpack = operator(
    lambda values, positions, in_features, pattern: values.new_empty(values.shape[0], in_features),
    check=partial(check_packed_shapes, dtypes=(*DTYPES, FLOAT8)),
    launcher=unpack_triton,
    supports=lambda values, positions, in_features, pattern: supports(values.dtype, in_features, pattern),
)(unpack_reference)
