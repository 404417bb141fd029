"""The Triton kernel that unpacks 2:4 weights; what reads packed ones serves sparse_linear_triton.py, too.

Eight values of a row of W (16 bytes at 16 bits) and a 16-bit word of their positions make four groups of channels; a
thread loads both at once and decompresses them in registers, so that packed bytes are all that is read of W.
Floor of unpacking: 9/16 of the dense weight's bytes read at 16 bits, all of them written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Build, Config, jit, tl, triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WORD = 16  # channels whose positions fill 16 bits

CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 4, "TILE_C": 1024}, num_warps=4, num_stages=1),
    Config({"TILE_O": 8, "TILE_C": 1024}, num_warps=8, num_stages=1),
    Config({"TILE_O": 8, "TILE_C": 512}, num_warps=4, num_stages=1),
    Config({"TILE_O": 2, "TILE_C": 2048}, num_warps=4, num_stages=1),
)


@jit
def load_pairs(
    values, positions, o, valid, c_start, words, end, TILE_O: tl.constexpr, TILE_C: tl.constexpr
):  # fmt: skip
    """(first values, second values, 4 bits of positions) of a tile, each ``[TILE_O, TILE_C / 4]``; zeros outside."""
    k = c_start // 2 + tl.arange(0, TILE_C // 2)
    lines = o.to(tl.int64)[:, None]
    kept = tl.load(values + lines * (words * 8) + k[None, :], mask=valid[:, None] & (k < end // 2)[None, :], other=0.0)
    word = c_start // 16 + tl.arange(0, TILE_C // 16)
    packed = tl.load(
        positions + lines * words + word[None, :],
        mask=valid[:, None] & (word < end // 16)[None, :], other=0,
    )  # fmt: skip
    first, second = tl.split(tl.reshape(kept, [TILE_O, TILE_C // 4, 2]))
    bits = packed.to(tl.int32)[:, :, None] >> (tl.arange(0, 4) * 4)[None, None, :]
    return first, second, tl.reshape(bits, [TILE_O, TILE_C // 4])


@jit
def dense_tile(first, second, bits, TILE_O: tl.constexpr, TILE_C: tl.constexpr):
    """The dense ``[TILE_O, TILE_C]`` of what `load_pairs` returns; positions of a group ascend."""
    slot, other = bits & 3, (bits >> 2) & 3
    zero = tl.zeros_like(first)
    w0 = tl.where(slot == 0, first, zero)
    w1 = tl.where(slot == 1, first, tl.where(other == 1, second, zero))
    w2 = tl.where(slot == 2, first, tl.where(other == 2, second, zero))
    w3 = tl.where(other == 3, second, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE_O, TILE_C])


@jit
def _unpack_kernel(
    values, positions, weight, out_features, words, TILE_O: tl.constexpr, TILE_C: tl.constexpr
):  # fmt: skip
    o = tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)
    valid = o < out_features
    c_start = tl.program_id(1) * TILE_C
    first, second, bits = load_pairs(values, positions, o, valid, c_start, words, words * 16, TILE_O, TILE_C)
    c = c_start + tl.arange(0, TILE_C)
    places = o.to(tl.int64)[:, None] * (words * 16) + c[None, :]
    dense = dense_tile(first, second, bits, TILE_O, TILE_C)
    tl.store(weight + places, dense, mask=valid[:, None] & (c < words * 16)[None, :])


def supports(dtype: torch.dtype, in_features: int, kept: int, group: int) -> bool:
    """Whether the kernel takes such a weight: 2:4, bfloat16, float16 or float32, a multiple of 16 channels."""
    return (kept, group) == (2, 4) and in_features % WORD == 0 and dtype in DTYPES


def unpack_triton(values: Tensor, positions: Tensor, in_features: int) -> Tensor:
    """`unpack_reference` by a Triton kernel, bit for bit, of 2:4 weights.

    Raises:
        ModelError: what `supports` does not name.
    """
    if not supports(values.dtype, in_features, 2, 4):
        raise ModelError(
            f"unpack: {values.dtype} values of {in_features} channels: the Triton kernel expects bfloat16, float16 or "
            f"float32 with a multiple of {WORD} channels; the reference takes the rest"
        )
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


def builds() -> Iterator[Build]:
    """Yields the kernel in every configuration."""
    for dtype in ("bf16", "fp32"):
        for config in CONFIGS:
            signature = {
                "values": f"*{dtype}", "positions": "*i16", "weight": f"*{dtype}", "out_features": "i32",
                "words": "i32", **dict.fromkeys(config.constants, "constexpr"),
            }  # fmt: skip
            sizes = " ".join(f"{name}={value}" for name, value in config.constants.items())
            name = f"unpack {dtype} {sizes} {config.num_warps} warps"
            yield Build(name, _unpack_kernel, signature, config.constants, config, config == CONFIGS[0])
