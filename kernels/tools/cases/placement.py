"""Cases of `permtriton.kernels.placement`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.placement import CONFIGS, placement, placement_reference
from permtriton.kernels.swap_gains import RankOneCurvature
from permtriton.kernels.tools.case import BLOCK, PATTERN, Arguments, Case, Random, Shapes


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Returns the case of each linear."""
    return [placement_case(o, c, dtype, device) for o, c in shapes]


def placement_case(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The gradient of a linear's block permutations, its weight stored input-major as in learning, 2:4, Wanda."""
    sizes = [BLOCK] * (in_features // BLOCK) + ([in_features % BLOCK] if in_features % BLOCK else [])

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        grad, weight = (random.normal(in_features, out_features, dtype=dtype).t() for _ in range(2))
        factors = ImportanceFactors(1, random.uniform(in_features) + 0.5)
        curvature = RankOneCurvature(random.uniform(out_features), random.uniform(in_features))
        return grad, weight, factors, random.order(in_features, True), sizes, PATTERN, curvature

    def reference(grad: Tensor, weight: Tensor, factors: ImportanceFactors, *others: object) -> Tensor:
        wide = ImportanceFactors(1, factors.scale.double())
        return placement_reference(grad.double(), weight.double(), wide, *others)  # type: ignore[arg-type]

    moved = 2 * out_features * in_features * dtype.itemsize + in_features * BLOCK * 4
    # Where scores tie in float32 but not in float64, another weight may be kept, as for a handful of weights.
    return Case(
        "placement", f"{out_features}x{in_features}", dtype, make, placement, reference, 2e-2, moved,
        {"placement": CONFIGS}, 3 * out_features * in_features * BLOCK,
    )  # fmt: skip
