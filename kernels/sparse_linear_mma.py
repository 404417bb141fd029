"""The CUDA kernels of `sparse_linear` and `sparse_linear_fp8` on the sparse tensor cores: 1 to 256 tokens.

A packed 2:4 weight has the form that these instructions expect of operand A, so that nothing is decompressed: the
values in order and, as the metadata of 16 channels at 16 bits, a 16-bit word of a row's positions (the first group in
the lowest four bits, in a group the first position in the lower two). x is operand B, a token per column.

    mma.sp.m16n8k32   (sm_80 on; PTX ISA, version 9, section 9.7.14.6) 16 rows of W by 8 tokens, 32 channels, by a warp
        values      an 8 x 8 matrix of `ldmatrix` is 16 channels of 8 rows; four of them are the fragment A
        positions   the first thread of a pair holds those of channels 0 to 15, the second those of 16 to 31: of row g
                    in the lower half of a register, of row g + 8 in the upper half (g is the thread's number / 4). The
                    sparsity selector says which pair of every four threads holds them
        x           `ldmatrix` reads it as it lies in memory
    wgmma.sp.m64nNk32 (sm_90 alone; section 9.7.15) 64 rows of W by 8 to 128 tokens, by four warps, asynchronously
        values, x   read from shared memory, in rows of 128 bytes with swizzled units of 16 bytes
        positions   of each warp's 16 rows, as those of mma.sp
    wgmma.sp.m64nNk64 (sm_90 alone) the same in float8 e4m3, 64 channels at once, which are as many bytes
        positions   a 32-bit word holds those of one row and 32 channels; bit 0 of a thread's number selects row g or
                    g + 8, bit 1 the half of the channels (CUTLASS's ELayout_64x64)

The sum does not depend on the order of the channels, so a product by mma.sp takes two 16-bit words that are not
adjacent: then the positions that a thread loads as one 32-bit word serve two products as they are. See
cuda/sparse_linear_mma.cu.

Bytes moved: 9/16 of the dense weight's, in float8 10/16 (from the L2 cache again for each 64 tokens, by wgmma for each
128), x once per ROWS rows (from the L2 cache), y. On Hopper wgmma is the default: by mma.sp a warp fetches both
operands itself and waits for each, so that 64 tokens took twice as long there (benchmarks/NOTES.md).

The layouts are those that the PTX manual and CUTLASS's atoms state, and an emulation written from the manual agrees
(tests/test_sparse_linear_mma.py). All variants of 16 bits were right on an H200; no GPU has run those of float8. Each
compiled kernel first computes a product whose exact result is known (`is_right`). If that fails, or the kernel cannot
be compiled, a warning says so and another route takes its place for the rest of the process.

An infinite or NaN input affects only output features that keep its channel; the reference makes the others NaN, too.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from permtriton.errors import PermTritonError
from permtriton.kernels.autotune import config_for, note
from permtriton.kernels.cuda.runtime import CudaKernel
from permtriton.kernels.launch import Config, has_kernels, number_of
from permtriton.kernels.packing import PATTERN, pack
from permtriton.util.sparsity import NMPattern

DTYPES, FP8 = (torch.bfloat16, torch.float16), torch.float8_e4m3fn
CHANNELS = 32  # in_features must be a multiple of it: then a row's positions are whole 32-bit words
MIN_ROWS = 64  # 16, the rows of one product, for each of up to 4 warps
MAX_SUMS = 64 * 64  # rows x tokens that the registers of a warp hold
MAX_CLUSTER = 8  # blocks per cluster that every GPU with clusters supports
RESERVED = 1024  # bytes of shared memory per block that CUDA takes

MAX_TOKENS = 256
ROOM = 64  # tokens of a block at most
FEW_TOKENS = 16  # most tokens for which a CHUNK of 128 channels, rows of 128 bytes, is the default
WIDE_CHUNK, WIDE_ROOM, WIDE_ROWS = 128, 128, 256  # by wgmma: channels of a stage; tokens and rows of a block at most
WIDE_ALIGNMENT = 1024  # bytes of which the addresses of wgmma's matrices in shared memory are multiples
FP8_CHUNK = 2 * WIDE_CHUNK  # channels of a stage in float8
FP8_SUMS = 256 * 64  # rows x tokens of a block at most in float8, which keeps each sum twice

# ROWS per block, shared by ROW_WARPS warps; CHUNK channels at once (32 to 128); BLOCKS per multiprocessor to aim at;
# EARLY: whether a launch may begin while the kernel before it ends.
CONFIGS: tuple[Config, ...] = (
    Config({"ROWS": 256, "ROW_WARPS": 4, "CHUNK": 64, "BLOCKS": 2, "EARLY": 1}, num_warps=4, num_stages=4),
    Config({"ROWS": 128, "ROW_WARPS": 4, "CHUNK": 128, "BLOCKS": 2, "EARLY": 1}, num_warps=4, num_stages=4),
    Config({"ROWS": 128, "ROW_WARPS": 4, "CHUNK": 128, "BLOCKS": 2, "EARLY": 0}, num_warps=4, num_stages=4),
    Config({"ROWS": 256, "ROW_WARPS": 4, "CHUNK": 64, "BLOCKS": 1, "EARLY": 1}, num_warps=8, num_stages=4),
    Config({"ROWS": 128, "ROW_WARPS": 4, "CHUNK": 64, "BLOCKS": 3, "EARLY": 1}, num_warps=4, num_stages=6),
    Config({"ROWS": 64, "ROW_WARPS": 1, "CHUNK": 64, "BLOCKS": 2, "EARLY": 1}, num_warps=4, num_stages=4),
    Config({"ROWS": 32, "ROW_WARPS": 1, "CHUNK": 128, "BLOCKS": 2, "EARLY": 1}, num_warps=4, num_stages=3),
)
# For wgmma: ROWS per block, 16 of them per warp, and stages of 128 channels (256 in float8).
WIDE_CONFIGS: tuple[Config, ...] = tuple(
    Config({"ROWS": rows, "BLOCKS": blocks, "EARLY": early}, num_warps=rows // 16, num_stages=stages)
    for rows, blocks, early, stages in ((128, 1, 1, 6), (64, 2, 1, 6), (128, 2, 1, 4), (256, 1, 1, 4), (128, 1, 0, 6))
)


@dataclass(frozen=True)
class GpuLimits:
    """The properties of a GPU that a launch depends on; by default those of an H200, but without wgmma."""

    multiprocessors: int
    shared_bytes: int = 228 << 10  # shared memory of one multiprocessor
    block_bytes: int = 227 << 10  # shared memory that one block may have
    has_clusters: bool = True  # whether blocks of a cluster read each other's shared memory (sm_90 and newer)
    has_wgmma: bool = False  # whether four warps multiply matrices in shared memory (sm_90 alone)

    def is_wide(self, in_features: int) -> bool:
        """Whether wgmma is the default: on GPUs with wgmma, if ``in_features`` is a multiple of a stage's channels."""
        return self.has_wgmma and in_features % WIDE_CHUNK == 0


class Product(NamedTuple):
    """A product of ``x [tokens, in_features]`` with a packed weight ``[out_features, in_features]``."""

    tokens: int
    out_features: int
    in_features: int
    dtype: torch.dtype  # of x
    fp8: bool = False  # whether the weight is in float8, and x is quantized to it

    @property
    def name(self) -> str:
        return f"{self.tokens}x{self.out_features}x{self.in_features}"


def configs_for(product: Product, gpu: GpuLimits) -> tuple[Config, ...]:
    """Returns the configurations for a product, the default first."""
    if product.fp8:
        return WIDE_CONFIGS
    configs = (CONFIGS[1], CONFIGS[0], *CONFIGS[2:]) if product.tokens <= FEW_TOKENS else CONFIGS
    return (*WIDE_CONFIGS, configs[0]) if gpu.is_wide(product.in_features) else configs


def limits_of(device: torch.device) -> GpuLimits:
    """Returns the limits of a GPU; the defaults where no kernels run."""
    if not has_kernels(device):
        return GpuLimits(132)
    return _limits_of_gpu(number_of(device))


@functools.cache
def _limits_of_gpu(number: int) -> GpuLimits:
    properties: Any = torch.cuda.get_device_properties(number)
    return GpuLimits(
        properties.multi_processor_count, properties.shared_memory_per_multiprocessor,
        properties.shared_memory_per_block_optin, properties.major >= 9, properties.major == 9,
    )  # fmt: skip


def takes(product: Product, pattern: NMPattern, device: torch.device) -> bool:
    """Whether kernels support a product: 2:4, 16 bits, 1 to 256 tokens, a multiple of 32 channels, 64 rows or more.

    In float8 there is only the kernel of wgmma, on Hopper, for a multiple of 256 channels.
    """
    tokens, out_features, in_features, dtype, fp8 = product
    fits = in_features > 0 and in_features % (FP8_CHUNK if fp8 else CHANNELS) == 0 and out_features >= MIN_ROWS
    fits = fits and 0 < tokens <= MAX_TOKENS and dtype in DTYPES and pattern == PATTERN
    return fits and (not fp8 or limits_of(device).has_wgmma)


@dataclass(frozen=True)
class Variant:
    """The kernel's template arguments."""

    dtype: torch.dtype  # of the result and, unless ``fp8``, of what is multiplied: bfloat16 or float16
    rows: int  # output features per block
    tokens: int  # tokens that a block has room for: 8, 16, 32 or 64, by wgmma also 128
    chunk: int  # channels that are copied and multiplied at once
    stages: int  # chunks of a team in shared memory
    warps: int  # warps per block
    row_warps: int  # warps per team: they split the rows; the teams split the channels
    splits: int  # blocks per cluster; they split the channels too
    early: bool = False  # whether a launch may begin while the kernel before it ends; no template argument
    wide: bool = False  # whether the kernel multiplies by Hopper's wgmma; then its warps are one team, ``chunk`` is 128
    fp8: bool = False  # whether the kernel multiplies float8 e4m3, with scales; then it is wide, and ``chunk`` is 256

    @property
    def teams(self) -> int:
        return self.warps // self.row_warps

    @property
    def operands(self) -> torch.dtype:
        return FP8 if self.fp8 else self.dtype

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of all teams."""
        width = self.operands.itemsize
        return self.teams * self.chunk * (self.rows * (4 * width + 1) + self.tokens * width * 8) // 8

    def of_rows(self, rows: int) -> Variant:
        """Returns this variant of wgmma with other ``rows`` per block, 16 of them per warp."""
        return replace(self, rows=rows, warps=rows // 16, row_warps=rows // 16)

    @functools.cached_property
    def kernel(self) -> CudaKernel:
        """The kernel; shared memory holds the stages and, at the end, the sums of all teams."""
        shared_bytes = max(self.stages * self.stage_bytes, 4 * self.teams * self.tokens * (self.rows + 4))
        constants = {
            "FP8": int(self.fp8), "BF16": int(self.dtype == torch.bfloat16), "ROWS": self.rows, "TOKENS": self.tokens,
            "CHUNK": self.chunk, "STAGES": self.stages, "WARPS": self.warps, "ROW_WARPS": self.row_warps,
            "SPLITS": self.splits,
        }  # fmt: skip
        function, unused = "sparse_linear_mma", {"FP8"}
        if self.wide:
            function, unused = "sparse_linear_wgmma", {"CHUNK", "WARPS", "ROW_WARPS"}
            shared_bytes += WIDE_ALIGNMENT
        threads, named = 32 * self.warps, tuple((name, of) for name, of in constants.items() if name not in unused)
        return CudaKernel("sparse_linear_mma.cu", function, threads, shared_bytes, named, self.early)

    def grid(self, tokens: int, out_features: int) -> tuple[int, int, int]:
        """Returns the blocks in each direction: rows, the splits of a cluster, tokens."""
        return -(-out_features // self.rows), self.splits, -(-tokens // self.tokens)

    def launch(
        self,
        x: Tensor,
        values: Tensor,
        positions: Tensor,
        bias: Tensor | None,
        scales: tuple[Tensor, Tensor] | None = None,
        y: Tensor | None = None,
    ) -> Tensor:
        """Returns the product, `dtype` ``[..., O]``, contiguous; copies what is not contiguous or not aligned.

        Args:
            x: ``[..., C]`` in `operands`, its channels in the weight's order, of a shape that `takes` accepts.
            values, positions, bias: as `sparse_linear` takes them.
            scales: In float8, those of the weight's rows and those of the tokens, float32 and contiguous.
            y: The result's memory; by default new.
        """
        out_features, in_features = values.shape[0], x.shape[-1]
        tokens = x.numel() // in_features
        if y is None:
            y = torch.empty((*x.shape[:-1], out_features), dtype=self.dtype, device=x.device)
        unread = (values, values) if self.wide else ()
        self.kernel(
            self.grid(tokens, out_features), _aligned(x), _aligned(values), _aligned(positions),
            values if bias is None else bias.contiguous(), *(scales or unread), y,
            tokens=tokens, out_features=out_features, in_features=in_features, has_bias=int(bias is not None),
        )  # fmt: skip
        return y


@functools.cache
def variant_of(config: Config, product: Product, gpu: GpuLimits) -> Variant:
    """Returns the variant that a configuration leads to for a product and a GPU.

    ROWS is halved until the sums fit into registers, two stages into shared memory, and the blocks fill the GPU; CHUNK
    is halved until at least three stages fit where BLOCKS blocks share a multiprocessor; and the channels are split
    over a cluster as far as all blocks still run at once and every team has a chunk.

    For wgmma, ROWS is doubled where the blocks would not run all at once, and halved where they would fill at most half
    of the GPU even in clusters of eight.
    """
    tokens, out_features, in_features, dtype, fp8 = product
    settings = config.arguments()
    wide, blocks, warps = "ROW_WARPS" not in settings, settings["BLOCKS"], settings["num_warps"]
    room = min(max(1 << (tokens - 1).bit_length(), 8), WIDE_ROOM if wide else ROOM)
    early = bool(settings["EARLY"]) and gpu.has_clusters  # early launches and clusters came with sm_90
    row_warps, chunk = settings.get("ROW_WARPS", warps), settings.get("CHUNK", FP8_CHUNK if fp8 else WIDE_CHUNK)
    variant = Variant(dtype, settings["ROWS"], room, chunk, 2, warps, row_warps, 1, early, wide, fp8)
    layers = -(-tokens // room)
    most = MAX_CLUSTER if gpu.has_clusters else 1

    def blocks_of(variant: Variant) -> int:
        return -(-out_features // variant.rows) * layers

    def fits(variant: Variant) -> bool:
        sums = variant.rows // variant.row_warps * room
        fits = sums <= MAX_SUMS and not (fp8 and variant.rows * room > FP8_SUMS)
        return fits and variant.kernel.shared_bytes <= gpu.block_bytes and variant.rows <= out_features

    def stages(variant: Variant) -> int:
        allowed = min(gpu.shared_bytes // blocks - RESERVED, gpu.block_bytes) - WIDE_ALIGNMENT * wide
        return allowed // variant.stage_bytes

    if wide:
        larger = variant.of_rows(2 * variant.rows)
        if larger.rows <= WIDE_ROWS and blocks_of(variant) > blocks * gpu.multiprocessors and fits(larger):
            variant = larger
        while variant.rows > MIN_ROWS and (not fits(variant) or 2 * blocks_of(variant) * most <= gpu.multiprocessors):
            variant = variant.of_rows(variant.rows // 2)
    else:
        least = 16 * variant.row_warps
        while variant.rows > least and (not fits(variant) or blocks_of(variant) * most < gpu.multiprocessors):
            variant = replace(variant, rows=variant.rows // 2)
        while variant.chunk > 32 and stages(variant) < 3:
            variant = replace(variant, chunk=variant.chunk // 2)
    at_once = blocks * gpu.multiprocessors // blocks_of(variant)
    splits = max(min(at_once, in_features // (variant.chunk * variant.teams), most), 1)
    return replace(variant, stages=max(min(stages(variant), settings["num_stages"]), 2), splits=splits)


_CHOSEN: dict[tuple[Variant, tuple[int, int, int], torch.device], Variant | None] = {}


def chosen(product: Product, device: torch.device) -> Variant | None:
    """Returns the variant for a product that `takes` accepts; None if none passes its check.

    Where the clusters of a launch would not run all at once, they get fewer blocks; where a variant that begins early
    fails its check, the same one without ``early`` is tried. While a CUDA graph is captured nothing can be tried: None
    if the launch was not tried before, and a warning says so.
    """
    gpu, table = limits_of(device), "sparse_linear_fp8" if product.fp8 else "sparse_linear_mma"
    variant = variant_of(config_for(table, configs_for(product, gpu), product[:3], product.dtype), product, gpu)
    key = variant, variant.grid(product.tokens, product.out_features), device
    if key not in _CHOSEN:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            _warn(variant, "it was not run before this CUDA graph is captured: run each number of tokens once before")
            return None
        fitting = _in_clusters_that_fit(*key)
        ways = dict.fromkeys((fitting, replace(fitting, early=False)))
        _CHOSEN[key] = next((one for one in ways if is_trusted(one, device)), None)
    what, usable = product.name + " in float8" * product.fp8, _CHOSEN[key]
    if usable is None:
        note(f"rejected {what}", variant.kernel.name)
    else:
        note(f"variant {what}", usable.kernel.name + ", early" * usable.early)
    return usable


def _in_clusters_that_fit(variant: Variant, grid: tuple[int, int, int], device: torch.device) -> Variant:
    """Returns the variant with the largest cluster size that the GPU supports and at which all clusters run at once."""
    if variant.splits == 1 or device.type != "cuda":
        return variant
    for splits in range(variant.splits, 1, -1):
        smaller = replace(variant, splits=splits)
        # An error says that clusters of this size cannot be scheduled; a kernel that fails is reported later.
        with suppress(PermTritonError), torch.cuda.device(device):
            if smaller.kernel.active_clusters((grid[0], splits, grid[2])) >= grid[0] * grid[2]:
                return smaller
    return replace(variant, splits=1)


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@functools.cache
def is_trusted(variant: Variant, device: torch.device) -> bool:
    """Whether the kernel computes a known product correctly on this GPU; tried once, with a warning if it does not."""
    problem = "its results are wrong on this GPU"
    try:
        if is_right(variant, device):
            return True
    except PermTritonError as error:
        problem = str(error)
    _warn(variant, problem)
    return False


def _warn(variant: Variant, problem: str) -> None:
    early = " that begins early" * variant.early
    warnings.warn(f"sparse_linear: {variant.kernel.name}{early} is not used: {problem}", UserWarning, stacklevel=4)


def is_right(variant: Variant, device: torch.device) -> bool:
    """Whether the kernel computes one product of small integers exactly; only the result is rounded.

    In that product, every pair of positions occurs in every place of a word, stages are filled again, the channels end
    in the middle of a round of chunks, and for mma.sp in the middle of a chunk, the last blocks overlap, and there is
    one token less than two blocks have room for. Scales are powers of 2.

    Raises:
        PermTritonError: the kernel could not be compiled or launched.
    """
    out_features = 2 * variant.rows + 5
    in_features = variant.chunk * variant.teams * variant.splits * (variant.stages + 1)
    in_features += variant.chunk if variant.wide else CHANNELS
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator, device="cpu")

    order = torch.rand(out_features, in_features // 4, 4, generator=generator, device="cpu").argsort(-1)
    weight = (integers(out_features, in_features // 4, 4) * (order < 2)).flatten(1)
    x, bias = integers(2 * variant.tokens - 1, in_features), integers(out_features)
    sides = (out_features, len(x))
    rows, tokens = (2.0 ** integers(side) if variant.fp8 else torch.ones(side, device="cpu") for side in sides)
    expected = (x.double() @ weight.double().t() * rows * tokens.view(-1, 1) + bias).to(variant.dtype)
    values, positions = pack(weight.to(variant.dtype), PATTERN)
    y = torch.full(expected.shape, torch.nan, dtype=variant.dtype, device=device)
    x, values = (tensor.to(device, variant.operands) for tensor in (x, values))
    scales = (rows.to(device, torch.float32), tokens.to(device, torch.float32)) if variant.fp8 else None
    variant.launch(x, values, positions.to(device), bias.to(device, y.dtype), scales, y)
    return torch.equal(y.cpu(), expected)
