"""Gather of channels: ``y[..., j, ...] = x[..., index[j], ...]`` along one dimension, the last one by default.

Shapes: ``x`` ``[..., C, ...]`` of any dtype, ``index`` ``[C]`` of any integer dtype -> ``y`` contiguous, of that shape.
Bytes moved: x read once, y written once; no arithmetic. The floor is a copy of the same bytes. Backward is the gather
of the gradient by the inverse index, which is recomputed: C entries beside ``rows x C``.

Triton, along the last dimension (others run the reference): a program takes rows of up to `STAGED` channels through
shared memory: 16-byte loads, staging, a gather of one word a channel, 16-byte stores. A gather straight from global
memory would touch up to 32 lines a warp for 64 bytes of 16-bit values, a fifth of the copy's speed where the index
reaches across the row; banks of shared memory answer 32 random words in about 3.5 turns, and without conflict where
the index stays inside a 128-byte line. Rows of 8 and 16-bit values are staged four and two to a 32-bit word, so that a
turn moves as many bytes as for 32-bit ones. A program keeps its index in registers and walks over rows. The staged
tile is one-dimensional on purpose: Triton turns a gather of more dimensions into shuffles, thousands of them here.
Longer rows, up to any C, are gathered from global memory through the cache. An entry outside of 0 to C-1, which no
permutation has, reads channel 0, never foreign memory.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels.launch import Build, Config, jit, tl, triton
from permtriton.permutation import inverse

INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def permute(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    """Returns ``x`` with dimension ``dim`` in the order of ``index``; differentiable in ``x``.

    Args:
        x: ``[..., C, ...]``.
        index: uint8, int8, int16, int32 or int64 ``[C]``, a permutation.
        dim: the dimension that holds the C channels; negative counts from the end.

    Raises:
        ModelError: ``dim`` is none of ``x``, or ``index`` has another shape or dtype.
    """
    return torch.ops.permtriton.permute(x, index, dim)


def permute_reference(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    """The gather in plain torch.

    Along the last dimension as a matrix: with three dimensions index_select is up to sixteen times slower on a CPU, and
    fast on 32-bit values only.
    """
    index = index.long()
    if dim not in (-1, x.dim() - 1):
        return x.index_select(dim, index)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = rows.index_select(1, index) if x.element_size() == 4 else rows.gather(1, index.expand_as(rows))
    return y.view(x.shape)


def check_shapes(op: str, x: Tensor, index: Tensor, dim: int = -1) -> None:
    """Refuses an index that cannot be one of dimension ``dim`` of ``x``; its values are not looked at.

    Raises:
        ModelError: with the operator's name, the shapes and what was expected.
    """
    if not -x.dim() <= dim < x.dim():
        raise ModelError(f"{op}: dimension {dim} of a tensor of shape {list(x.shape)}: expected one that it has")
    if index.dtype not in INDEX_DTYPES:
        raise ModelError(f"{op}: an index of {index.dtype}: expected whole numbers of at most 64 bits, such as int64")
    if index.dim() != 1 or index.shape[0] != x.shape[dim]:
        raise ModelError(
            f"{op}: an index of shape {list(index.shape)} for dimension {dim} of a tensor of shape {list(x.shape)}: "
            f"expected [{x.shape[dim]}], one entry a channel"
        )


# TILE: staged words of a program, and the row length that num_warps is meant for. PACK_BITS: rows share words of this
# size, or have their own at 8.
CONFIGS = (
    Config({"TILE": 4096, "PACK_BITS": 32}, num_warps=8),
    Config({"TILE": 4096, "PACK_BITS": 32}, num_warps=4),
    Config({"TILE": 2048, "PACK_BITS": 32}, num_warps=4),
    Config({"TILE": 8192, "PACK_BITS": 32}, num_warps=8),
    Config({"TILE": 4096, "PACK_BITS": 8}, num_warps=8),
    Config({"TILE": 4096, "PACK_BITS": 8}, num_warps=4),
)
STAGED = 16384  # channels of up to 32 bits that a program can hold; half of it for 64 bits
DIRECT_TILE = 1024
MAX_WARPS = 16
PROGRAMS_PER_SM = 8
PACKED_ROWS = 1024  # fewer rows rather spread over the processors than share words
WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@jit
def _permute_fwd_kernel(  # type: ignore[no-untyped-def]
    x,
    index,
    y,
    rows,
    C,
    stride_row,
    stride_channel,
    BLOCK_C: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    PACK_BITS: tl.constexpr,
):
    PACK: tl.constexpr = PACK_BITS // BITS if PACK_BITS > BITS else 1
    ROWS: tl.constexpr = TILE // BLOCK_C if TILE > BLOCK_C else 1
    at = tl.arange(0, ROWS * BLOCK_C)
    channel = at % BLOCK_C
    row_in_tile = at // BLOCK_C
    inside = channel < C
    source = tl.load(index + channel, mask=inside, other=0).to(tl.int32)
    source = tl.where((source >= 0) & (source < C), source, 0) + row_in_tile * BLOCK_C
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS * PACK), tl.num_programs(0)):
        first = tile.to(tl.int64) * (ROWS * PACK) + row_in_tile
        if PACK == 1:
            there = inside & (first < rows)
            words = tl.load(x + first * stride_row + channel.to(tl.int64) * stride_channel, mask=there, other=0)
        else:
            words = tl.zeros([ROWS * BLOCK_C], dtype=tl.uint32)
            for part in tl.static_range(PACK):
                row = first + part * ROWS
                there = inside & (row < rows)
                value = tl.load(x + row * stride_row + channel.to(tl.int64) * stride_channel, mask=there, other=0)
                words |= value.to(tl.uint32) << (part * BITS)
        words = tl.gather(words, source, 0)
        for part in tl.static_range(PACK):
            row = first + part * ROWS
            value = words if PACK == 1 else words >> (part * BITS)
            tl.store(y + row * C + channel, value.to(y.dtype.element_ty), mask=inside & (row < rows))


@jit
def _permute_direct_kernel(x, index, y, rows, C, stride_row, stride_channel, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    source = tl.load(index + channel, mask=inside, other=0).to(tl.int64)
    source = tl.where((source >= 0) & (source < C), source, 0)
    for start in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = start.to(tl.int64)
        value = tl.load(x + row * stride_row + source * stride_channel, mask=inside)
        tl.store(y + row * C + channel, value, mask=inside)


def warps_for(config: Config, block: int) -> int:
    """Returns the warps for a row of ``block`` channels (a power of two), where the configuration speaks of 4096."""
    return max(min(config.num_warps * block // 4096, MAX_WARPS), 1)


def programs_for(x: Tensor, tiles: int, per_processor: int) -> int:
    """Returns how many programs walk over ``tiles``; under the interpreter two, so that each walks."""
    if x.device.type != "cuda":
        return min(tiles, 2)
    return min(tiles, torch.cuda.get_device_properties(x.device).multi_processor_count * per_processor)


def permute_triton(x: Tensor, index: Tensor, dim: int = -1, config: Config | None = None) -> Tensor:
    """The gather by Triton along the last dimension; other dimensions and 128-bit values run the reference.

    Any strides of ``x`` are read as they are, as far as its rows are at one distance; ``x`` is copied otherwise.
    """
    check_shapes("permute", x, index, dim)
    channels, size = x.shape[dim], x.element_size()
    if dim not in (-1, x.dim() - 1) or size not in WORDS:
        return permute_reference(x, index, dim)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    rows, index = x.reshape(-1, channels).view(WORDS[size]), index.contiguous()
    arguments = (rows, index, y.view(WORDS[size]), rows.shape[0], channels, *rows.stride())
    block = triton.next_power_of_2(channels)
    if block * max(size, 4) > STAGED * 4:
        grid = (programs_for(x, rows.shape[0], PROGRAMS_PER_SM), triton.cdiv(channels, DIRECT_TILE))
        _permute_direct_kernel[grid](*arguments, BLOCK_C=DIRECT_TILE, num_warps=4)
        return y
    config = config or config_for("permute", CONFIGS, tuple(rows.shape), x.dtype)
    launch = _launch(config, block, size, rows.shape[0])
    held = max(launch["TILE"] // block, 1) * max(launch["PACK_BITS"] // (8 * size), 1)
    grid = (programs_for(x, triton.cdiv(rows.shape[0], held), PROGRAMS_PER_SM),)
    _permute_fwd_kernel[grid](*arguments, BLOCK_C=block, BITS=8 * size, **launch)
    return y


def _launch(config: Config, block: int, size: int, rows: int) -> dict[str, int]:
    launch = config.arguments()
    launch["num_warps"] = warps_for(config, max(block, launch["TILE"]))
    if size == 8 and launch["num_warps"] < MAX_WARPS:
        launch["num_warps"] *= 2
    if rows < PACKED_ROWS:
        launch["PACK_BITS"] = 8
    return launch


def permute_backward_triton(grad: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    """Returns the gradient of x: the gather of ``grad`` by the inverse index."""
    return permute_triton(grad, inverse(index.long()), dim)


def builds() -> Iterator[Build]:
    """Yields the kernels in every configuration, for the values of each size and rows of each kind."""
    for config in CONFIGS:
        for size, block in ((1, 4096), (2, 64), (2, 4096), (2, STAGED), (4, 4096), (4, STAGED), (8, STAGED // 2)):
            launch = _launch(config, block, size, PACKED_ROWS)
            tuned = Config({name: launch[name] for name in config.constants}, launch["num_warps"], config.num_stages)
            pointer = f"*u{8 * size}"
            signature = {"x": pointer, "index": "*i16", "y": pointer, "rows": "i32", "C": "i32", "stride_row": "i32"}
            constants = {"stride_channel": 1, "BLOCK_C": block, "BITS": 8 * size, **tuned.constants}
            name = f"permute {8 * size}-bit x {block}, {dict(config.constants)}, {tuned.num_warps} warps"
            signature |= dict.fromkeys(constants, "constexpr")
            yield Build(name, _permute_fwd_kernel, signature, constants, tuned, config == CONFIGS[0])
    signature = {"x": "*u16", "index": "*i32", "y": "*u16", "rows": "i32", "C": "i32", "stride_row": "i32"}
    constants = {"stride_channel": 1, "BLOCK_C": DIRECT_TILE}
    signature |= dict.fromkeys(constants, "constexpr")
    yield Build("permute direct 16-bit", _permute_direct_kernel, signature, constants, Config(), True)


@torch.library.custom_op("permtriton::permute", mutates_args=())
def _permute(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    check_shapes("permute", x, index, dim)
    return permute_reference(x, index, dim)


if triton is not None:

    @_permute.register_kernel("cuda")
    def _(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
        return permute_triton(x, index, dim)


@_permute.register_fake
def _(x: Tensor, index: Tensor, dim: int = -1) -> Tensor:
    check_shapes("permute", x, index, dim)
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, index, ctx.dim = inputs
    ctx.save_for_backward(index)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    (index,) = ctx.saved_tensors
    return torch.ops.permtriton.permute(grad, inverse(index.long()), ctx.dim), None, None


_permute.register_autograd(_backward, setup_context=_setup_context)
