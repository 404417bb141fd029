# mypy: allow-untyped-defs
"""The Triton kernel that unpacks 2:4 weights; sparse_linear_triton.py shares the functions that read packed ones.

Eight values of a row of W (16 bytes at 16 bits) and a 16-bit word of their positions make four groups of channels. A
thread loads both at once and decompresses them in registers, so that only packed bytes are read of W.
Floor of unpacking: 9/16 of the dense weight's bytes read at 16 bits, all of them written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Config, Kernel, jit, tl, triton
from permtriton.util.sparsity import NMPattern

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PATTERN = NMPattern(2, 4)  # the only one that the kernels read
WORD = 16  # channels whose positions fill 16 bits

CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 4, "TILE_C": 1024}, num_warps=4, num_stages=1),
    Config({"TILE_O": 8, "TILE_C": 1024}, num_warps=8, num_stages=1),
    Config({"TILE_O": 8, "TILE_C": 512}, num_warps=4, num_stages=1),
    Config({"TILE_O": 2, "TILE_C": 2048}, num_warps=4, num_stages=1),
)


@jit
def load_pairs(
    values_ptr, positions_ptr, o, valid, c_start, words, end, TILE_O: tl.constexpr, TILE_C: tl.constexpr
):  # fmt: skip
    """(first values, second values, 4 bits of positions) of a tile, each ``[TILE_O, TILE_C / 4]``; zeros outside."""
    k = c_start // 2 + tl.arange(0, TILE_C // 2)
    lines = o.to(tl.int64)[:, None]
    kept = tl.load(
        values_ptr + lines * (words * 8) + k[None, :], mask=valid[:, None] & (k < end // 2)[None, :], other=0.0
    )
    word = c_start // 16 + tl.arange(0, TILE_C // 16)
    packed = tl.load(
        positions_ptr + lines * words + word[None, :],
        mask=valid[:, None] & (word < end // 16)[None, :], other=0,
    )  # fmt: skip
    first, second = tl.split(tl.reshape(kept, [TILE_O, TILE_C // 4, 2]))
    bits = packed.to(tl.int32)[:, :, None] >> (tl.arange(0, 4) * 4)[None, None, :]
    return first, second, tl.reshape(bits, [TILE_O, TILE_C // 4])


@jit
def dense_tile(first, second, bits, TILE_O: tl.constexpr, TILE_C: tl.constexpr):
    """The dense ``[TILE_O, TILE_C]`` tile of what `load_pairs` returns; positions in a group ascend."""
    slot, other = bits & 3, (bits >> 2) & 3
    zero = tl.zeros_like(first)
    w0 = tl.where(slot == 0, first, zero)
    w1 = tl.where(slot == 1, first, tl.where(other == 1, second, zero))
    w2 = tl.where(slot == 2, first, tl.where(other == 2, second, zero))
    w3 = tl.where(other == 3, second, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE_O, TILE_C])


@Kernel
def _unpack_kernel(
    values_ptr, positions_ptr, weight_ptr, out_features, words, TILE_O: tl.constexpr, TILE_C: tl.constexpr
):  # fmt: skip
    o = tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)
    valid = o < out_features
    c_start = tl.program_id(1) * TILE_C
    first, second, bits = load_pairs(values_ptr, positions_ptr, o, valid, c_start, words, words * 16, TILE_O, TILE_C)
    c = c_start + tl.arange(0, TILE_C)
    places = o.to(tl.int64)[:, None] * (words * 16) + c[None, :]
    dense = dense_tile(first, second, bits, TILE_O, TILE_C)
    tl.store(weight_ptr + places, dense, mask=valid[:, None] & (c < words * 16)[None, :])


def supports(dtype: torch.dtype, in_features: int, pattern: NMPattern) -> bool:
    """Whether the kernel supports the weight: 2:4, bfloat16, float16 or float32, a multiple of 16 channels."""
    return pattern == PATTERN and in_features % WORD == 0 and dtype in DTYPES


def unpack_triton(values: Tensor, positions: Tensor, in_features: int) -> Tensor:
    """Computes `unpack_reference` of a weight that `supports` accepts: the same bits."""
    out_features = values.shape[0]
    weight = torch.empty((out_features, in_features), dtype=values.dtype, device=values.device)
    if not weight.numel():
        return weight
    options = config_for("packing", CONFIGS, (out_features, in_features), values.dtype).arguments()
    grid = (triton.cdiv(out_features, options["TILE_O"]), triton.cdiv(in_features, options["TILE_C"]))
    _unpack_kernel[grid](
        values.contiguous(), positions.contiguous().view(torch.int16), weight, out_features, in_features // WORD,
        **options,
    )  # fmt: skip
    return weight
