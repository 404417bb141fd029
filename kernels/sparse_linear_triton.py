# mypy: allow-untyped-defs
"""The Triton kernels of `permtriton.kernels.sparse_linear`, and their launcher: 2:4 weights, 1 to 64 tokens.

Only packed bytes are read of W; they are decompressed in registers (`permtriton.kernels.packing_triton`).

One token: positions in a group ascend, so the first value multiplies one of the group's input channels 0 to 2 and the
second one of 1 to 3. That takes two selections per value and no gather from memory. The input of a tile is read once
for its ``TILE_O`` rows, through ``index`` if there is one. Sums stay in float32, one per group, until the end of the
row. 2 to 64 tokens: the values are laid out as a dense ``[TILE_O, TILE_C]`` tile in registers and go to the tensor
cores (float32 weights, up to 16 tokens: exact float32 products). Tokens are padded to 16, 32 or 64. Split-K: each of
``SPLITS`` programs along the channels writes its own float32 partial sums, and a second kernel adds them in order, then
the bias: the same input gives the same bits. With one split there is no second kernel.

Floor: 9/16 of the dense weight's bytes at 16 bits, plus x and y. One token takes about 8 instructions per value, half
of what an H200 has time for at its bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.builds import Build, builds_of, name_of
from permtriton.kernels.launch import Config, Kernel, refuse_unsupported, tl, triton
from permtriton.kernels.packing_triton import PATTERN, WORD, dense_tile, load_pairs
from permtriton.kernels.packing_triton import supports as supports_weight
from permtriton.sparsity import NMPattern

MAX_TOKENS = 64
MAX_FLOAT32_TOKENS = 16  # exact products take registers

# One token.
VECTOR_CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 8, "TILE_C": 1024, "SPLITS": 1}, num_warps=4, num_stages=1),
    Config({"TILE_O": 4, "TILE_C": 2048, "SPLITS": 1}, num_warps=4, num_stages=1),
    Config({"TILE_O": 4, "TILE_C": 1024, "SPLITS": 1}, num_warps=2, num_stages=1),
    Config({"TILE_O": 8, "TILE_C": 512, "SPLITS": 1}, num_warps=2, num_stages=1),
    Config({"TILE_O": 16, "TILE_C": 512, "SPLITS": 1}, num_warps=4, num_stages=1),
    Config({"TILE_O": 8, "TILE_C": 1024, "SPLITS": 2}, num_warps=4, num_stages=1),
    Config({"TILE_O": 8, "TILE_C": 1024, "SPLITS": 4}, num_warps=4, num_stages=1),
)
# 2 to 64 tokens.
CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 32, "TILE_C": 128, "SPLITS": 2}, num_warps=4, num_stages=3),
    Config({"TILE_O": 32, "TILE_C": 128, "SPLITS": 1}, num_warps=4, num_stages=3),
    Config({"TILE_O": 32, "TILE_C": 256, "SPLITS": 1}, num_warps=4, num_stages=3),
    Config({"TILE_O": 32, "TILE_C": 128, "SPLITS": 1}, num_warps=2, num_stages=4),
    Config({"TILE_O": 16, "TILE_C": 256, "SPLITS": 1}, num_warps=2, num_stages=3),
    Config({"TILE_O": 64, "TILE_C": 128, "SPLITS": 2}, num_warps=4, num_stages=3),
    Config({"TILE_O": 64, "TILE_C": 128, "SPLITS": 4}, num_warps=4, num_stages=4),
    Config({"TILE_O": 64, "TILE_C": 64, "SPLITS": 4}, num_warps=4, num_stages=4),
)


@Kernel
def _sparse_linear_vector_kernel(
    x_ptr, values_ptr, positions_ptr, bias_ptr, index_ptr, y_ptr, out_features, words, tiles_per_split,
    HAS_BIAS: tl.constexpr, HAS_INDEX: tl.constexpr, SPLITS: tl.constexpr, TILE_O: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)
    valid = o < out_features
    begin = tl.program_id(1) * tiles_per_split * TILE_C
    end = tl.minimum(begin + tiles_per_split * TILE_C, words * 16)  # a multiple of 16, for wide loads
    sums = tl.zeros([TILE_O, TILE_C // 4], tl.float32)
    for c_start in range(begin, end, TILE_C):
        first, second, bits = load_pairs(values_ptr, positions_ptr, o, valid, c_start, words, end, TILE_O, TILE_C)
        c = c_start + tl.arange(0, TILE_C)
        source = c
        if HAS_INDEX:
            source = tl.load(index_ptr + c, mask=c < end, other=0).to(tl.int32)
        inputs = tl.load(x_ptr + source, mask=c < end, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(inputs, [TILE_C // 2, 2]))
        x0, x2 = tl.split(tl.reshape(even, [TILE_C // 4, 2]))
        x1, x3 = tl.split(tl.reshape(odd, [TILE_C // 4, 2]))
        x0, x1, x2, x3 = x0[None, :], x1[None, :], x2[None, :], x3[None, :]
        first_input = tl.where((bits & 2) != 0, x2, tl.where((bits & 1) != 0, x1, x0))
        second_input = tl.where((bits & 4) == 0, x2, tl.where((bits & 8) != 0, x3, x1))
        sums += first.to(tl.float32) * first_input + second.to(tl.float32) * second_input
    result = tl.sum(sums, 1)
    if HAS_BIAS and SPLITS == 1:
        result += tl.load(bias_ptr + o, mask=valid, other=0.0).to(tl.float32)
    place = tl.program_id(1).to(tl.int64) * out_features + o
    tl.store(y_ptr + place, result.to(y_ptr.dtype.element_ty), mask=valid)


@Kernel
def _sparse_linear_kernel(
    x_ptr, values_ptr, positions_ptr, bias_ptr, index_ptr, y_ptr, tokens, out_features, words, tiles_per_split,
    HAS_BIAS: tl.constexpr, HAS_INDEX: tl.constexpr, INTERPRETED: tl.constexpr, SPLITS: tl.constexpr,
    TILE_T: tl.constexpr, TILE_O: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)
    t = tl.arange(0, TILE_T)
    valid, real = o < out_features, t < tokens
    begin = tl.program_id(1) * tiles_per_split * TILE_C
    end = tl.minimum(begin + tiles_per_split * TILE_C, words * 16)  # a multiple of 16, for wide loads
    product = tl.zeros([TILE_O, TILE_T], tl.float32)
    for c_start in range(begin, end, TILE_C):
        first, second, bits = load_pairs(values_ptr, positions_ptr, o, valid, c_start, words, end, TILE_O, TILE_C)
        dense = dense_tile(first, second, bits, TILE_O, TILE_C)
        c = c_start + tl.arange(0, TILE_C)
        source = c
        if HAS_INDEX:
            source = tl.load(index_ptr + c, mask=c < end, other=0).to(tl.int32)
        places = t.to(tl.int64)[:, None] * (words * 16) + source[None, :]
        inputs = tl.load(x_ptr + places, mask=real[:, None] & (c < end)[None, :], other=0.0)
        if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as integers
            dense, inputs = dense.to(tl.float32), inputs.to(tl.float32)
        product = tl.dot(dense, tl.trans(inputs), product, input_precision="ieee")
    if HAS_BIAS and SPLITS == 1:
        product += tl.load(bias_ptr + o, mask=valid, other=0.0).to(tl.float32)[:, None]
    lines = tl.program_id(1).to(tl.int64) * tokens + t
    places = lines[None, :] * out_features + o[:, None]
    tl.store(y_ptr + places, product.to(y_ptr.dtype.element_ty), mask=valid[:, None] & real[None, :])


@Kernel
def _sparse_linear_reduce_kernel(
    partial_ptr, bias_ptr, y_ptr, count, out_features, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = place < count
    result = tl.zeros([TILE], tl.float32)
    for split in tl.static_range(SPLITS):
        result += tl.load(partial_ptr + split * count + place, mask=valid, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias_ptr + place % out_features, mask=valid, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, result.to(y_ptr.dtype.element_ty), mask=valid)


def supports(x: Tensor, values: Tensor, in_features: int, pattern: NMPattern) -> bool:
    """Whether the kernels support the product: see `takes`; an empty weight is left to the reference."""
    tokens = x.numel() // max(in_features, 1)
    return values.numel() > 0 and takes(tokens, values.dtype, in_features, pattern)


def takes(tokens: int, dtype: torch.dtype, in_features: int, pattern: NMPattern) -> bool:
    """Whether the kernels support a shape: 2:4, 1 to 64 tokens (float32: 16), a multiple of 16 channels."""
    most = MAX_FLOAT32_TOKENS if dtype == torch.float32 else MAX_TOKENS
    return 0 < tokens <= most and supports_weight(dtype, in_features, pattern)


def sparse_linear_triton(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    pattern: NMPattern,
) -> Tensor:
    """Computes `sparse_linear_reference` with Triton kernels, summing in another order.

    Copies ``x``, ``values`` and ``positions`` first if they are not contiguous.

    Raises:
        ModelError: an input that `supports` refuses.
    """
    got = f"an input of shape {list(x.shape)} for {values.dtype} values at {pattern}"
    expected = (
        f"1 to {MAX_TOKENS} tokens ({MAX_FLOAT32_TOKENS} in float32), a multiple of {WORD} channels, and values of "
        f"bfloat16, float16 or float32 at {PATTERN}"
    )
    refuse_unsupported("sparse_linear", supports(x, values, in_features, pattern), got, expected)
    tokens, out_features = x.numel() // in_features, values.shape[0]
    y = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    name, configs = ("sparse_linear_vector", VECTOR_CONFIGS) if tokens == 1 else ("sparse_linear", CONFIGS)
    config = config_for(name, configs, (tokens, out_features, in_features), x.dtype)
    options: dict[str, int] = config.arguments()
    tiles = triton.cdiv(in_features, options["TILE_C"])
    tiles_per_split = triton.cdiv(tiles, options["SPLITS"])
    splits = options["SPLITS"] = triton.cdiv(tiles, tiles_per_split)
    out = y if splits == 1 else torch.empty((splits, tokens, out_features), device=x.device)
    grid = (triton.cdiv(out_features, options["TILE_O"]), splits)
    arguments = (
        x.reshape(-1).contiguous(), values.contiguous(), positions.contiguous().view(torch.int16),
        values if bias is None else bias.contiguous(), values if index is None else index.contiguous(), out,
    )  # fmt: skip
    given = {"HAS_BIAS": bias is not None, "HAS_INDEX": index is not None}
    if tokens == 1:
        _sparse_linear_vector_kernel[grid](
            *arguments, out_features, in_features // WORD, tiles_per_split, **given, **options
        )
    else:
        _sparse_linear_kernel[grid](
            *arguments, tokens, out_features, in_features // WORD, tiles_per_split, **given, **options,
            TILE_T=max(triton.next_power_of_2(tokens), 16), INTERPRETED=triton.knobs.runtime.interpret,
        )  # fmt: skip
    if splits > 1:
        _sparse_linear_reduce_kernel[(triton.cdiv(y.numel(), 256),)](
            out, arguments[3], y, y.numel(), out_features, HAS_BIAS=bias is not None, SPLITS=splits, TILE=256,
            num_warps=2,
        )  # fmt: skip
    return y


def builds() -> Iterator[Build]:
    """Yields every kernel in every configuration, with bias and index."""
    rows, channels = 4096, 16384

    def product_of(tokens: int, dtype: torch.dtype) -> object:
        values = torch.empty(rows, channels // 2, dtype=dtype)
        positions = torch.empty(rows, channels // 8, dtype=torch.uint8)
        bias, index = torch.empty(rows, dtype=dtype), torch.empty(channels, dtype=torch.int16)
        x = torch.empty(tokens, channels, dtype=dtype)
        return sparse_linear_triton(x, values, positions, bias, index, channels, PATTERN)

    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (1, 16) if dtype == torch.float32 else (1, 16, 64):
            name, configs = ("sparse_linear_vector", VECTOR_CONFIGS) if tokens == 1 else ("sparse_linear", CONFIGS)
            about = f"{name_of(dtype)} {tokens} tokens"
            yield from builds_of(about, partial(product_of, tokens, dtype), name, configs)
