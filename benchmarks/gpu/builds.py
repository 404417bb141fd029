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
from permtriton.kernels import nm_mask_backward_triton as backward
from permtriton.kernels import norm_permute as norms
from permtriton.kernels.autotune import forced
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.launch import Config
from permtriton.kernels.permute import CONFIGS, PACKED_ROWS, STAGED, WORDS, gather_rows
from permtriton.kernels.tools.case import PATTERN
from permtriton.util.permutation import index_dtype
from permtriton.util.sparsity import NMPattern


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
        return gather_rows(x, torch.empty(channels, dtype=index_dtype(channels)))

    for size, channels in (
        (1, 4096), (2, 64), (2, 4096), (2, STAGED), (4, STAGED), (8, STAGED // 2), (2, STAGED // 2 - 1), (4, 4095),
    ):  # fmt: skip
        call = partial(gather, size, channels)
        yield from builds_of(f"{8 * size}-bit x {channels}", call, "permute", CONFIGS, aligned=channels % 16 == 0)
    yield from builds_of("16-bit", partial(gather, 2, 2 * STAGED))


def _norm_permute() -> Iterator[Build]:
    """Yields the kernels for bfloat16 and float32, each kind, short and long rows."""

    def run(launcher: Callable[..., object], x_copies: int, kind: str, dtype: torch.dtype, channels: int) -> object:
        x, vector = torch.empty(1024, channels, dtype=dtype), torch.empty(channels, dtype=dtype)
        index = torch.empty(channels, dtype=index_dtype(channels))
        return launcher(
            *[x] * x_copies, vector, vector if kind == "layer" else None, index, norms.NormVariant(kind, 0.0)
        )

    def add(dtype: torch.dtype, channels: int) -> object:
        x, vector = torch.empty(1024, channels, dtype=dtype), torch.empty(channels, dtype=dtype)
        index = torch.empty(channels, dtype=index_dtype(channels))
        return norms.add_norm_permute_triton(x, x, vector, index, 0.0)

    for dtype in (torch.bfloat16, torch.float32):
        about = f"of a sum {name_of(dtype)} x 4096"
        yield from builds_of(about, partial(add, dtype, 4096), "norm_permute", norms.CONFIGS)
    there, back = partial(run, norms.norm_permute_triton, 1), partial(run, norms.norm_permute_backward_triton, 2)
    short, long = (128, 4096, norms.HELD), (4096, quantize.LONGEST)
    for kind, dtype in (*product(norms.KINDS, (torch.bfloat16,)), ("rms", torch.float32), ("layer", torch.float32)):
        for block in short if dtype == torch.bfloat16 else long:
            about, of = f"{kind} {name_of(dtype)} x {block}", (kind, dtype, block)
            aligned = block == quantize.LONGEST
            yield from builds_of(about, partial(there, *of), "norm_permute", norms.CONFIGS, aligned=aligned)
            if block <= norms.LONGEST_BACKWARD:
                yield from builds_of(about, partial(back, *of), "norm_permute_backward", norms.BACKWARD_CONFIGS)
        for either in (there, back):
            yield from builds_of(f"{kind} {name_of(dtype)}", partial(either, kind, dtype, 4 * quantize.LONGEST))


def _quantize() -> Iterator[Build]:
    """Yields the kernels alone, with a gather, after a gate and after each kind of norm; short and long rows."""

    def alone(dtype: torch.dtype, channels: int, gather: bool, gated: bool) -> object:
        x, index = torch.empty(1024, channels, dtype=dtype), torch.empty(channels, dtype=index_dtype(channels))
        return quantize.quantize_triton(x, index if gather else None, x if gated else None)

    def normed(kind: str, channels: int) -> object:
        x, vector = torch.empty(1024, channels, dtype=torch.bfloat16), torch.empty(channels, dtype=torch.bfloat16)
        index = torch.empty(channels, dtype=index_dtype(channels))
        return norms.norm_quantize_triton(
            x, vector, vector if kind == "layer" else None, index, norms.NormVariant(kind, 0.0)
        )

    longest = quantize.LONGEST
    for dtype, channels, gather, gated in (
        *((torch.bfloat16, channels, *how) for channels in (128, 4096, longest)
          for how in ((False, False), (True, False), (False, True))),
        (torch.float32, 4096, False, False), (torch.bfloat16, 2 * longest, False, False),
        (torch.bfloat16, 2 * longest, False, True),
    ):  # fmt: skip
        about = f"{name_of(dtype)} x {channels}" + ", gathered" * gather + ", gated" * gated
        table = ("quantize", quantize.CONFIGS) if channels <= longest else ()
        aligned = channels == longest
        yield from builds_of(about, partial(alone, dtype, channels, gather, gated), *table, aligned=aligned)
    for kind, channels in product(norms.KINDS, (4096, norms.HELD)):
        call = partial(normed, kind, channels)
        about = f"{kind} bf16 x {channels}, quantized"
        yield from builds_of(about, call, "norm_permute", norms.CONFIGS, aligned=True)


def _sinkhorn() -> Iterator[Build]:
    """Yields both kernels for blocks of 32, 64, 128 in float32 and a padded size in bfloat16.

    16-bit logits have the layout of float32 ones, so that one size of them is enough.
    """

    def forward(size: int, dtype: torch.dtype) -> object:
        return sinkhorn.sinkhorn_triton(torch.empty(64, size, size, dtype=dtype), 0.5, 5)

    def backward(size: int, dtype: torch.dtype) -> object:
        logits, scales = torch.empty(64, size, size, dtype=dtype), torch.empty(5, 64, size)
        return sinkhorn.sinkhorn_backward_triton(logits.float(), logits, scales, scales, 0.5)

    for size, dtype in ((32, torch.float32), (64, torch.float32), (128, torch.float32), (48, torch.bfloat16)):
        about = f"{size}x{size} {name_of(dtype)}"
        yield from builds_of(about, partial(forward, size, dtype), "sinkhorn", sinkhorn.CONFIGS)
        yield from builds_of(about, partial(backward, size, dtype), "sinkhorn_backward", sinkhorn.BACKWARD_CONFIGS)


def _assignment() -> Iterator[Build]:
    """Yields the kernel for blocks of 64 and 256 and one that is padded."""

    def solve(size: int, dtype: torch.dtype) -> object:
        return assignment.launched(torch.empty(8, size, size, dtype=dtype))

    for dtype, size in product((torch.float32, torch.bfloat16), (64, 256, 48)):
        about = f"{size}x{size} {name_of(dtype)}"
        yield from builds_of(about, partial(solve, size, dtype), "assignment", assignment.CONFIGS)


def _nm_mask() -> Iterator[Build]:
    """Yields the forward kernels at 2:4, 4:8, 8:16 and 16:32; the backward kernel in every tile at 2:4.

    The backward kernel at 8:16 too where registers are short.
    """

    def masked(dtype: torch.dtype, pattern: NMPattern, row_major: bool) -> object:
        rows, channels = 4096, 1024
        weight = torch.empty(rows, channels, dtype=dtype) if row_major else torch.empty(channels, rows, dtype=dtype).t()
        factors = ImportanceFactors(1, torch.empty(channels), torch.empty(rows), torch.empty(channels))
        index = torch.empty(channels, dtype=torch.int64)
        return nm_mask.nm_mask_triton(weight, factors, index, [channels], pattern)

    for dtype, group, row_major in product((torch.bfloat16, torch.float32), (4, 8, 16, 32), (False, True)):
        pattern = NMPattern(group // 2, group)
        about = f"{pattern} {name_of(dtype)}{' row-major' if row_major else ''}"
        table = ("nm_mask", nm_mask.CONFIGS) if group == 4 and not row_major else ()
        yield from builds_of(about, partial(masked, dtype, pattern, row_major), *table)

    def gradient(dtype: torch.dtype, size: int, group: int, layout: str, wanda: bool, group_scale: bool) -> object:
        channels, rows = 4 * size, {"any length": 4097, "masked": 4112}.get(layout, 4096)
        weight = torch.empty(channels, rows, dtype=dtype).t()
        if layout == "any strides":
            weight = torch.empty(2 * rows, 3 * channels, dtype=dtype)[::2, ::3]
        statistics = (None, None) if wanda else (torch.empty(rows), torch.empty(channels))
        factors, index = ImportanceFactors(1, torch.empty(channels), *statistics), torch.empty(channels).long()
        return backward.nm_mask_backward_triton(weight, weight, factors, index, [size] * 4, group, group_scale)

    shapes = [(size, 4, "aligned") for size in (64, 16, 32, 128)] + [(size, 16, "aligned") for size in (64, 128)]
    shapes += [(size, 4, "masked") for size in (16, 32, 64)] + [(size, 4, "any length") for size in (64, 128)]
    shapes += [(size, 4, "any strides") for size in (16, 32, 64, 128)]
    variants = [(dtype, *shape, False, True) for dtype, shape in product((torch.bfloat16, torch.float32), shapes)]
    variants += [(torch.bfloat16, *shapes[0], wanda, wanda) for wanda in (True, False)]
    for dtype, size, group, layout, wanda, group_scale in variants:
        about = f"{name_of(dtype)} blocks of {size} in groups of {group}, {layout}"
        about += (", Wanda" if wanda else "") + ("" if group_scale else ", scores not scaled")
        call = partial(gradient, dtype, size, group, layout, wanda, group_scale)
        yield from builds_of(about, call, "nm_mask_backward", backward.CONFIGS)


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
