# mypy: allow-untyped-defs
"""The Triton kernels of `permtriton.kernels.sparse_linear`, and their launcher: 2:4 weights, 1 to 64 tokens.

Only packed bytes are read of W; they are decompressed in registers (`permtriton.kernels.packing`).

One token: a thread takes a word, 16 bytes of a row's values (16 channels at 16 bits) and their positions, and gathers
the word's inputs, not its values. The four inputs of a group are two registers; one byte permutation (``prmt``, inline
PTX) takes both partners of the group's two values from them. Products and sums are float32. The inputs of a tile are
read once for its ``TILE_O`` rows. Most configurations have one warp per program: all programs of a large weight run at
once, and no warp waits for another. ``num_stages - 1`` tiles are on their way into shared memory. With ``index``, a
first launch permutes the input: if every program gathered it again, that would cost more than reading the weight.

2 to 64 tokens: the values are laid out as a dense ``[TILE_O, TILE_C]`` tile in registers and go to the tensor cores
(float32 weights, up to 16 tokens: exact float32 products). Tokens are padded to 16, 32 or 64. Split-K: each of
``SPLITS`` programs along the channels writes its own float32 partial sums, and a second kernel adds them in order, then
the bias: the same input gives the same bits. With one split there is no second kernel.

Floor: 9/16 of the dense weight's bytes at 16 bits, plus x and y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from permtriton.kernels.autotune import config_for
from permtriton.kernels.launch import Config, jit, tl, triton
from permtriton.kernels.packing import WORD, dense_tile, load_pairs, supports
from permtriton.kernels.permute import permute
from permtriton.util.sparsity import NMPattern

MAX_TOKENS = 64
MAX_FLOAT32_TOKENS = 16  # exact products take registers

# One token; the first of those for the number of rows is the default, see `vector_configs`.
VECTOR_CONFIGS: tuple[Config, ...] = (
    Config({"TILE_O": 8, "TILE_C": 512}, num_warps=1, num_stages=3),
    Config({"TILE_O": 4, "TILE_C": 512}, num_warps=1, num_stages=4),
    Config({"TILE_O": 4, "TILE_C": 2048}, num_warps=4, num_stages=3),
    Config({"TILE_O": 8, "TILE_C": 512}, num_warps=1, num_stages=4),
    Config({"TILE_O": 16, "TILE_C": 512}, num_warps=2, num_stages=3),
    Config({"TILE_O": 8, "TILE_C": 1024}, num_warps=2, num_stages=3),
)
MANY_ROWS, SOME_ROWS = 6000, 2500


def vector_configs(out_features: int) -> tuple[Config, ...]:
    """Returns the table for a number of rows: the default gives every multiprocessor of a GPU enough to wait for.

    Many rows run all at once with three stages, not with four; of few rows, a program has more channels on their way.
    """
    first = 0 if out_features > MANY_ROWS else 1 if out_features > SOME_ROWS else 2
    return (VECTOR_CONFIGS[first], *VECTOR_CONFIGS[:first], *VECTOR_CONFIGS[first + 1 :])


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


@jit
def _partners(bits, low0, high0, low1, high1, low2, high2, low3, high3, PTX: tl.constexpr):
    """The two inputs that each group of a word keeps, as the halves of 32 bits; ``low`` and ``high`` hold its four."""
    if PTX:  # position p becomes the byte that selects bytes 2p and 2p + 1: two lookups give those of four groups
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second, both;
            and.b32 first, $4, 0x3333;
            shr.u32 second, $4, 2;
            and.b32 second, second, 0x3333;
            prmt.b32 first, 0x76543210, 0, first;
            prmt.b32 second, 0x76543210, 0, second;
            prmt.b32 both, first, second, 0x40;
            prmt.b32 $0, $5, $6, both;
            prmt.b32 both, first, second, 0x51;
            prmt.b32 $1, $7, $8, both;
            prmt.b32 both, first, second, 0x62;
            prmt.b32 $2, $9, $10, both;
            prmt.b32 both, first, second, 0x73;
            prmt.b32 $3, $11, $12, both;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [bits, low0, high0, low1, high1, low2, high2, low3, high3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return (
        _two_of_four(bits, low0, high0), _two_of_four(bits >> 4, low1, high1),
        _two_of_four(bits >> 8, low2, high2), _two_of_four(bits >> 12, low3, high3),
    )  # fmt: skip


@jit
def _two_of_four(bits, low, high):
    first = tl.where((bits & 2) != 0, high, low) >> ((bits & 1) * 16)
    second = tl.where((bits & 8) != 0, high, low) >> ((bits & 4) * 4)
    return (first & 65535) | (second << 16)


@jit
def _add_halves(sums, values, inputs, DTYPE: tl.constexpr):
    """Adds the products of the lower and of the upper halves, in float32."""
    if tl.bfloat16 == DTYPE:  # the upper half of a float32
        sums += (values << 16).to(tl.float32, bitcast=True) * (inputs << 16).to(tl.float32, bitcast=True)
        return sums + (values & -65536).to(tl.float32, bitcast=True) * (inputs & -65536).to(tl.float32, bitcast=True)
    sums += _half(values, DTYPE) * _half(inputs, DTYPE)
    return sums + _half(values >> 16, DTYPE) * _half(inputs >> 16, DTYPE)


@jit
def _half(bits, DTYPE: tl.constexpr):
    return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@jit
def _add_group(sums, bits, first, second, x0, x1, x2, x3):
    """Adds a group's two products; positions ascend, so the first meets channel 0, 1 or 2, the second 1, 2 or 3."""
    sums += first * tl.where((bits & 2) != 0, x2, tl.where((bits & 1) != 0, x1, x0))
    return sums + second * tl.where((bits & 4) == 0, x2, tl.where((bits & 8) != 0, x3, x1))


@jit
def _four(tile, SHAPE: tl.constexpr):
    """The four tensors of a tile along its last dimension, which a thread holds whole; ``SHAPE`` ends in 2, 2."""
    even, odd = tl.split(tl.reshape(tile, SHAPE))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@jit
def _inputs(x_ptr, word, words, PLACE: tl.constexpr, WORDS: tl.constexpr):
    """Half of each word's inputs as four tensors ``[1, WORDS]``; through the L1 cache, since all programs read them."""
    places = x_ptr + (word * 8)[:, None] + (tl.arange(0, 4) + 4 * PLACE)[None, :]
    inputs = tl.load(places, mask=(word < words)[:, None], other=0, cache_modifier=".ca")
    first, second, third, fourth = _four(inputs, [WORDS, 2, 2])
    return first[None, :], second[None, :], third[None, :], fourth[None, :]


@jit
def _sparse_linear_vector_kernel(
    x_ptr, values_ptr, positions_ptr, bias_ptr, y_ptr, out_features, words,
    HAS_BIAS: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr, TILE_O: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = TILE_C * DTYPE.primitive_bitwidth // 256  # a word: 16 bytes of values
    if tl.float32 != DTYPE:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
        values_ptr = values_ptr.to(tl.pointer_type(tl.int32))
    o = tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)
    valid = o < out_features
    line = tl.minimum(o, out_features - 1).to(tl.int64)[:, None] * words
    sums = tl.zeros([TILE_O, WORDS], tl.float32)
    for start in tl.range(0, words, WORDS, num_stages=STAGES):
        word = start + tl.arange(0, WORDS)
        bits = tl.load(positions_ptr + line + word[None, :], mask=(word < words)[None, :], other=0).to(tl.int32)
        k = start * 4 + tl.arange(0, WORDS * 4)
        kept = tl.load(values_ptr + line * 4 + k[None, :], mask=(k < words * 4)[None, :], other=0)
        w0, w1, w2, w3 = _four(kept, [TILE_O, WORDS, 2, 2])
        x0, x1, x2, x3 = _inputs(x_ptr, word, words, 0, WORDS)
        x4, x5, x6, x7 = _inputs(x_ptr, word, words, 1, WORDS)
        if tl.float32 == DTYPE:
            sums = _add_group(sums, bits, w0, w1, x0, x1, x2, x3)
            sums = _add_group(sums, bits >> 4, w2, w3, x4, x5, x6, x7)
        else:
            x0, x1, x2, x3 = _partners(bits, x0, x1, x2, x3, x4, x5, x6, x7, PTX)
            sums = _add_halves(sums, w0, x0, DTYPE)
            sums = _add_halves(sums, w1, x1, DTYPE)
            sums = _add_halves(sums, w2, x2, DTYPE)
            sums = _add_halves(sums, w3, x3, DTYPE)
    result = tl.sum(sums, 1)
    if HAS_BIAS:
        result += tl.load(bias_ptr + o, mask=valid, other=0.0).to(tl.float32)
    tl.store(y_ptr + o, result.to(y_ptr.dtype.element_ty), mask=valid)


@jit
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


@jit
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


def takes(tokens: int, out_features: int, in_features: int, dtype: torch.dtype, pattern: NMPattern) -> bool:
    """Whether they support a product: 2:4, 1 to 64 tokens (float32: 16), a multiple of 16 channels, not empty."""
    most = MAX_FLOAT32_TOKENS if dtype == torch.float32 else MAX_TOKENS
    return 0 < tokens <= most and out_features * in_features > 0 and supports(dtype, in_features, pattern)


def sparse_linear_triton(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    in_features: int,
    pattern: NMPattern,
) -> Tensor:
    """Computes `sparse_linear_reference` of inputs that `takes` accepts, summing in another order.

    Copies ``x``, ``values`` and ``positions`` first if they are not contiguous.
    """
    values, positions = _in_words(values), _in_words(positions)
    if x.numel() == in_features:
        return _one_token(x if index is None else permute(x, index), values, positions, bias)
    return _tokens(x, values, positions, bias, index)


def _one_token(x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None) -> Tensor:
    in_features, out_features = x.shape[-1], values.shape[0]
    y = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    config = config_for("sparse_linear_vector", vector_configs(out_features), (1, out_features, in_features), x.dtype)
    channels = 16 // x.element_size() * 2  # whose values take 16 bytes
    _sparse_linear_vector_kernel[(triton.cdiv(out_features, config.constants["TILE_O"]),)](
        _in_words(x), values, positions.view(torch.int8 if channels == 8 else torch.int16),
        values if bias is None else bias.contiguous(), y, out_features, in_features // channels,
        HAS_BIAS=bias is not None, PTX=torch.version.hip is None and not triton.knobs.runtime.interpret,
        STAGES=config.num_stages, **config.arguments(),
    )  # fmt: skip
    return y


def _tokens(x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None, index: Tensor | None) -> Tensor:
    in_features, out_features = x.shape[-1], values.shape[0]
    tokens = x.numel() // in_features
    y = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    config = config_for("sparse_linear", CONFIGS, (tokens, out_features, in_features), x.dtype)
    options: dict[str, int] = config.arguments()
    tiles = triton.cdiv(in_features, options["TILE_C"])
    tiles_per_split = triton.cdiv(tiles, options["SPLITS"])
    splits = options["SPLITS"] = triton.cdiv(tiles, tiles_per_split)
    out = y if splits == 1 else torch.empty((splits, tokens, out_features), dtype=torch.float32, device=x.device)
    bias_or_any = values if bias is None else bias.contiguous()
    _sparse_linear_kernel[(triton.cdiv(out_features, options["TILE_O"]), splits)](
        x.contiguous(), values, positions.view(torch.int16), bias_or_any,
        values if index is None else index.contiguous(), out, tokens, out_features, in_features // WORD,
        tiles_per_split, HAS_BIAS=bias is not None, HAS_INDEX=index is not None,
        INTERPRETED=triton.knobs.runtime.interpret, TILE_T=max(triton.next_power_of_2(tokens), 16), **options,
    )  # fmt: skip
    if splits > 1:
        _sparse_linear_reduce_kernel[(triton.cdiv(y.numel(), 256),)](
            out, bias_or_any, y, y.numel(), out_features, HAS_BIAS=bias is not None, SPLITS=splits, TILE=256,
            num_warps=2,
        )  # fmt: skip
    return y


def _in_words(tensor: Tensor) -> Tensor:
    """Returns the tensor as the kernels read it: contiguous, and beginning at a 32-bit word."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 4 else tensor
