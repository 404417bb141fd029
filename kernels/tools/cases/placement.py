from collections.abc import Sequence

import torch

from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.placement import CONFIGS, placement, placement_reference
from permtriton.kernels.swap_gains import RankOneCurvature
from permtriton.kernels.tools.case import BLOCK, PATTERN, Arguments, Case, Random, Shapes, in_float64


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    return [placement_case(o, c, dtype, device) for o, c in shapes]


def placement_case(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The gradient of a linear's block permutations, 2:4 by Wanda; the weight is stored input-major, as in learning."""
    sizes = [BLOCK] * (in_features // BLOCK) + ([in_features % BLOCK] if in_features % BLOCK else [])

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        grad, weight = (random.normal(in_features, out_features, dtype=dtype).t() for _ in range(2))
        factors = ImportanceFactors(1, random.uniform(in_features) + 0.5)
        curvature = RankOneCurvature(random.uniform(out_features), random.uniform(in_features))
        return grad, weight, factors, random.order(in_features, True), sizes, PATTERN, curvature

    moved = 2 * out_features * in_features * dtype.itemsize + in_features * BLOCK * 4
    # Where scores tie in float32 but not in float64, another weight may be kept, as happens to a handful.
    return Case(
        "placement", f"{out_features}x{in_features}", dtype, make, placement, in_float64(placement_reference), 2e-2,
        moved, {"placement": CONFIGS}, 3 * out_features * in_features * BLOCK,
    )  # fmt: skip
