"""Cases and builds of `permtriton.kernels.nm_mask`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from permtriton.kernels import nm_mask as forward
from permtriton.kernels import nm_mask_backward_triton as backward
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import (
    nm_mask,
    nm_mask_backward,
    nm_mask_backward_reference,
    nm_mask_reference,
)
from permtriton.kernels.tools.builds import Build, builds_of, name_of
from permtriton.kernels.tools.case import BLOCK, PATTERN, Arguments, Case, Random
from permtriton.kernels.tools.timing import relative_error
from permtriton.util.sparsity import NMPattern


def cases(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Case]:
    """Returns the cases of each linear, forward and backward."""
    return [make(o, c, dtype, device) for o, c in shapes for make in (nm_mask_case, nm_mask_backward_case)]


def nm_mask_case(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The masked weight of a linear, stored input-major as in learning, 2:4, Wanda."""

    def run(weight: Tensor, factors: ImportanceFactors, index: Tensor, sizes: list[int], _grad: Tensor) -> Tensor:
        return nm_mask(weight, factors, index, factors.scale.new_empty(0), sizes, PATTERN, True)

    def reference(weight: Tensor, factors: ImportanceFactors, index: Tensor, sizes: list[int], _grad: Tensor) -> Tensor:
        return nm_mask_reference(weight, factors, index, sizes, PATTERN)

    moved = 2 * out_features * in_features * dtype.itemsize
    make = _mask_inputs(out_features, in_features, dtype, device)
    # A score that another rounding ties with its neighbour may choose otherwise; a handful in 45 million do.
    return Case(
        "nm_mask", f"{out_features}x{in_features}", dtype, make, run, reference, relative_error, 1e-3, moved,
        tables={"nm_mask": forward.CONFIGS},
    )  # fmt: skip


def nm_mask_backward_case(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The gradient of the soft permutation."""

    def run(weight: Tensor, factors: ImportanceFactors, index: Tensor, sizes: list[int], grad: Tensor) -> Tensor:
        return nm_mask_backward(grad, weight, factors, index, sizes, PATTERN.group, True)

    def reference(weight: Tensor, factors: ImportanceFactors, index: Tensor, sizes: list[int], grad: Tensor) -> Tensor:
        wide = ImportanceFactors(1, factors.scale.double())
        return nm_mask_backward_reference(grad.double(), weight.double(), wide, index, sizes, PATTERN.group, True)

    moved = 2 * out_features * in_features * dtype.itemsize + in_features * BLOCK * 4
    return Case(
        "nm_mask backward", f"{out_features}x{in_features}", dtype,
        _mask_inputs(out_features, in_features, dtype, device), run, reference, relative_error, 2e-2, moved,
        flops=2 * 2 * out_features * in_features * BLOCK, tables={"nm_mask_backward": backward.CONFIGS},
    )  # fmt: skip


def _mask_inputs(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> Callable[[int], Arguments]:
    sizes = [BLOCK] * (in_features // BLOCK) + ([in_features % BLOCK] if in_features % BLOCK else [])

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        weight, grad = (random.normal(in_features, out_features, dtype=dtype).t() for _ in range(2))
        factors = ImportanceFactors(1, random.uniform(in_features) + 0.5)
        return weight, factors, random.order(in_features, True), sizes, grad

    return make


def builds() -> Iterator[Build]:
    """Yields the forward kernels at 2:4, 4:8, 8:16 and 16:32; the backward kernel in every tile at 2:4.

    The backward kernel at 8:16 too where registers are short.
    """

    def masked(dtype: torch.dtype, pattern: NMPattern, row_major: bool) -> object:
        rows, channels = 4096, 1024
        weight = torch.empty(rows, channels, dtype=dtype) if row_major else torch.empty(channels, rows, dtype=dtype).t()
        factors = ImportanceFactors(1, torch.empty(channels), torch.empty(rows), torch.empty(channels))
        index = torch.empty(channels, dtype=torch.int64)
        return forward.nm_mask_triton(weight, factors, index, [channels], pattern)

    for dtype, group, row_major in product((torch.bfloat16, torch.float32), (4, 8, 16, 32), (False, True)):
        pattern = NMPattern(group // 2, group)
        about = f"{pattern} {name_of(dtype)}{' row-major' if row_major else ''}"
        table = ("nm_mask", forward.CONFIGS) if group == 4 and not row_major else ()
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
