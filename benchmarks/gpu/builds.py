"""What is compiled ahead of time: the launches of every kernel in every configuration, recorded on the meta device.

A function per module of kernels yields its builds: it calls the launcher for each dtype and shape that matters. Nothing
runs, so that sizes other than 1, which Triton makes a constant, are all that counts. If a launcher reads what the
kernel wrote, as `assignment`'s does, the launch is a function of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.recording import Launch, recorded
from permtriton.kernels import (
    assignment,
    nm_mask,
    packing,
    placement_gradient,
    quantize,
    sinkhorn,
    sparsegpt_block,
    swap_gains,
)
from permtriton.kernels import norm_permute as norms
from permtriton.kernels.autotune import forced
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.launch import Config
from permtriton.kernels.permute import CONFIGS, PACKED_ROWS, STAGED, WORDS, permute_triton
from permtriton.kernels.tools.case import PATTERN
from permtriton.util.permutation import index_dtype


@dataclass(frozen=True)
class Build:
    """One kernel to compile ahead of time.

    Attributes:
        name: Kernel, input and configuration, for people; unique.
        launch: What is compiled.
        default: Whether it runs without autotuning.
        aligned: Whether it is launched only where sizes and strides are multiples of 16.
    """

    name: str
    launch: Launch
    default: bool
    aligned: bool = False

    @property
    def has_float8(self) -> bool:
        """Whether it converts to float8 e4m3, which GPUs before sm_89 cannot."""
        return "*fp8e4nv" in self.launch.signature.values()


def builds_of(
    about: str,
    call: Callable[[], object],
    table: str = "",
    configs: Sequence[Config] = (),
    aligned: bool = False,
) -> Iterator[Build]:
    """Yields a build for each kernel that ``call()`` launches, in every configuration of a table.

    Args:
        about: The input: dtype and shape, for the name.
        call: Makes its tensors and calls a launcher; runs with the meta device as the default one. Numbers that the
            kernels should not take as constants must differ from 1.
        table: Name that the launcher gives to `config_for`; none where it has no table.
        configs: The table; the first configuration is the default one.
        aligned: Whether the launcher chooses these kernels only where sizes and strides are multiples of 16.
    """
    for number, config in enumerate(configs or (None,)):
        with forced({table: config}) if config else nullcontext(), torch.device("meta"), recorded() as launches:
            call()
        constants = "".join(f" {name}={value}" for name, value in config.constants.items()) if config else ""
        for launch in launches:
            options = " ".join(f"{value} {name.removeprefix('num_')}" for name, value in launch.options.items())
            name = launch.kernel.__name__.strip("_").removesuffix("_kernel")
            yield Build(f"{name} {about}{constants} {options}", launch, number == 0, aligned)


def distinct(builds: Iterable[Build]) -> list[Build]:
    """Returns each launch once, as the strictest of its builds: some configurations differ in their grid alone."""
    strictest: dict[Any, Build] = {}
    for build in builds:
        before = strictest.setdefault(build.launch.key, build)
        if (build.default, not build.aligned) > (before.default, not before.aligned):
            strictest[build.launch.key] = build
    return list(strictest.values())


def name_of(dtype: torch.dtype) -> str:
    """Returns Triton's name of a floating-point dtype: ``bf16``."""
    return {torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _permute() -> Iterator[Build]:
    """Yields the kernels for values of each size and rows of each kind."""

    def gather(size: int, channels: int) -> object:
        x = torch.empty(PACKED_ROWS, channels, dtype=WORDS[size])
        return permute_triton(x, torch.empty(channels, dtype=index_dtype(channels)))

    for size, channels in (
        (1, 4096), (2, 64), (2, 4096), (2, STAGED), (4, STAGED), (2, STAGED // 2 - 1), (4, 4095),
    ):  # fmt: skip
        call = partial(gather, size, channels)
        yield from builds_of(f"{8 * size}-bit x {channels}", call, "permute", CONFIGS, aligned=channels % 16 == 0)
    yield from builds_of("16-bit", partial(gather, 2, 2 * STAGED))


def _norm_permute() -> Iterator[Build]:
    """Yields the kernels for bfloat16 and float32 and each kind."""

    def run(kind: str, dtype: torch.dtype, channels: int) -> object:
        x, vector = torch.empty(1024, channels, dtype=dtype), torch.empty(channels, dtype=dtype)
        index = torch.empty(channels, dtype=index_dtype(channels))
        bias = vector if kind == "layer" else None
        return norms.norm_permute_triton(x, vector, bias, index, norms.NormVariant(kind, 0.0))

    def add(dtype: torch.dtype, channels: int) -> object:
        x, vector = torch.empty(1024, channels, dtype=dtype), torch.empty(channels, dtype=dtype)
        index = torch.empty(channels, dtype=index_dtype(channels))
        return norms.add_norm_permute_triton(x, x, vector, index, 0.0)

    for dtype in (torch.bfloat16, torch.float32):
        about = f"of a sum {name_of(dtype)} x 4096"
        yield from builds_of(about, partial(add, dtype, 4096), "norm_permute", norms.CONFIGS)
    short, long = (128, 4096, norms.HELD), (4096, quantize.LONGEST)
    for kind, dtype in (*product(norms.KINDS, (torch.bfloat16,)), ("rms", torch.float32), ("layer", torch.float32)):
        for block in short if dtype == torch.bfloat16 else long:
            call, aligned = partial(run, kind, dtype, block), block == quantize.LONGEST
            about = f"{kind} {name_of(dtype)} x {block}"
            yield from builds_of(about, call, "norm_permute", norms.CONFIGS, aligned=aligned)


def _quantize() -> Iterator[Build]:
    """Yields the kernels alone and with a gather; short and long rows."""

    def run(dtype: torch.dtype, channels: int, gather: bool) -> object:
        x, index = torch.empty(1024, channels, dtype=dtype), torch.empty(channels, dtype=index_dtype(channels))
        return quantize.quantize_triton(x, index if gather else None)

    longest = quantize.LONGEST
    for dtype, channels, gather in (
        *product((torch.bfloat16,), (128, 4096, longest), (False, True)),
        (torch.float32, 4096, False), (torch.bfloat16, 2 * longest, False),
    ):  # fmt: skip
        about = f"{name_of(dtype)} x {channels}" + ", gathered" * gather
        table = ("quantize", quantize.CONFIGS) if channels <= longest else ()
        yield from builds_of(about, partial(run, dtype, channels, gather), *table, aligned=channels == longest)


def _sinkhorn() -> Iterator[Build]:
    """Yields both kernels for blocks of 32, 64 and 128, and one that is padded."""

    def forward(size: int) -> object:
        return sinkhorn.sinkhorn_triton(torch.empty(64, size, size), 0.5, 5)

    def backward(size: int) -> object:
        logits, scales = torch.empty(64, size, size), torch.empty(5, 64, size)
        return sinkhorn.sinkhorn_backward_triton(logits, logits, scales, scales, 0.5)

    for size in (32, 64, 128, 48):
        about = f"{size}x{size}"
        yield from builds_of(about, partial(forward, size), "sinkhorn", sinkhorn.CONFIGS)
        yield from builds_of(about, partial(backward, size), "sinkhorn_backward", sinkhorn.BACKWARD_CONFIGS)


def _assignment() -> Iterator[Build]:
    """Yields the kernel for blocks of 64 and 256 and one that is padded."""

    def solve(size: int) -> object:
        return assignment.launched(torch.empty(8, size, size))

    for size in (64, 256, 48):
        yield from builds_of(f"{size}x{size}", partial(solve, size), "assignment", assignment.CONFIGS)


def _nm_mask() -> Iterator[Build]:
    """Yields the forward kernel at 2:4; the backward kernel in every tile at 2:4, and at 8:16."""

    def masked(dtype: torch.dtype, row_major: bool) -> object:
        rows, channels = 4096, 1024
        weight = torch.empty(rows, channels, dtype=dtype) if row_major else torch.empty(channels, rows, dtype=dtype).t()
        factors = ImportanceFactors(1, torch.empty(channels), torch.empty(rows), torch.empty(channels))
        index = torch.empty(channels, dtype=torch.int64)
        return nm_mask.nm_mask_triton(weight, factors, index, [channels], PATTERN)

    for dtype, row_major in product((torch.bfloat16, torch.float32), (False, True)):
        about = f"{name_of(dtype)}{' row-major' if row_major else ''}"
        table = () if row_major else ("nm_mask", nm_mask.CONFIGS)
        yield from builds_of(about, partial(masked, dtype, row_major), *table)


def _placement_gradient() -> Iterator[Build]:
    """Yields the kernel for blocks whose sizes are multiples of `ALIGN` or not."""

    def learned(size: int) -> object:
        parts = (torch.empty(4096, 8 * size).t() for _ in range(4))
        terms = swap_gains.SwapTerms(*parts, torch.empty(8 * size))
        return placement_gradient.launched(terms, torch.empty(8 * size).long(), size)

    for size, sizes in ((64, "aligned"), (12, "any sizes")):
        yield from builds_of(f"fp32 {sizes}", partial(learned, size), "placement_gradient", placement_gradient.CONFIGS)


def _swap_gains() -> Iterator[Build]:
    """Yields the kernel for sizes that are multiples of `ALIGN` or not."""

    def searched(odd: int) -> object:
        def side(positions: int) -> swap_gains.SwapTerms:
            return swap_gains.SwapTerms(*(torch.empty(4096, positions).t() for _ in range(4)), torch.empty(positions))

        return swap_gains.swap_gains_triton(side(256 + odd), side(512))

    for odd, sizes in ((0, "aligned"), (8, "any sizes")):
        yield from builds_of(f"fp32 {sizes}", partial(searched, odd), "swap_gains", swap_gains.CONFIGS)


def _sparsegpt_block() -> Iterator[Build]:
    """Yields the kernel that chooses the mask, and the one that is given it."""

    def pruned(chooses: bool) -> object:
        block, factor = torch.empty(128, 4096), torch.empty(128, 128)
        keep = None if chooses else torch.empty(128, 4096, dtype=torch.bool)
        return sparsegpt_block.sparsegpt_block_triton(block, factor, keep, PATTERN)

    for chooses in (True, False):
        name = "choosing" if chooses else "with a mask"
        yield from builds_of(name, partial(pruned, chooses), "sparsegpt_block", sparsegpt_block.CONFIGS)


def _packing() -> Iterator[Build]:
    """Yields the kernel for float8, bfloat16 and float32."""

    def unpacked(dtype: torch.dtype) -> object:
        positions = torch.empty(4096, 512, dtype=torch.uint8)
        return packing.unpack_triton(torch.empty(4096, 2048, dtype=dtype), positions, 4096, PATTERN)

    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        yield from builds_of(name_of(dtype), partial(unpacked, dtype), "packing", packing.CONFIGS)


MODULES = (
    _permute, _norm_permute, _quantize, _sinkhorn, _assignment, _nm_mask, _placement_gradient, _swap_gains,
    _sparsegpt_block, _packing,
)  # fmt: skip
