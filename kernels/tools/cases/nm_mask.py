from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from permtriton.kernels import nm_mask as forward
from permtriton.kernels import nm_mask_backward_triton as backward
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import nm_mask, nm_mask_backward, nm_mask_backward_reference, nm_mask_reference
from permtriton.kernels.tools.case import BLOCK, PATTERN, Arguments, Case, Random, Shapes, in_float64


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    return [make(o, c, dtype, device) for o, c in shapes for make in (nm_mask_case, nm_mask_backward_case)]


def nm_mask_case(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The masked weight of a linear at 2:4 by Wanda's scores; the weight is stored input-major, as in learning."""

    def run(weight: Tensor, factors: ImportanceFactors, index: Tensor, sizes: list[int], _grad: Tensor) -> Tensor:
        return nm_mask(weight, factors, index, factors.scale.new_empty(0), sizes, PATTERN, True)

    make = _mask_inputs(out_features, in_features, dtype, device)
    # Where scores tie under another rounding, another weight may be kept: a handful in 45 million.
    return Case(
        "nm_mask", f"{out_features}x{in_features}", dtype, make, run,
        lambda weight, factors, index, sizes, _: nm_mask_reference(weight, factors, index, sizes, PATTERN), 1e-3,
        2 * out_features * in_features * dtype.itemsize, {"nm_mask": forward.CONFIGS},
    )  # fmt: skip


def nm_mask_backward_case(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The gradient of the soft permutation, with the inputs of `nm_mask_case`."""

    def run(weight: Tensor, factors: ImportanceFactors, index: Tensor, sizes: list[int], grad: Tensor) -> Tensor:
        return nm_mask_backward(grad, weight, factors, index, sizes, PATTERN.group, True)

    def reference(weight: Tensor, factors: ImportanceFactors, index: Tensor, sizes: list[int], grad: Tensor) -> Tensor:
        return nm_mask_backward_reference(grad, weight, factors, index, sizes, PATTERN.group, True)

    moved = 2 * out_features * in_features * dtype.itemsize + in_features * BLOCK * 4
    return Case(
        "nm_mask backward", f"{out_features}x{in_features}", dtype,
        _mask_inputs(out_features, in_features, dtype, device), run, in_float64(reference), 2e-2, moved,
        {"nm_mask_backward": backward.CONFIGS}, 2 * 2 * out_features * in_features * BLOCK,
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
