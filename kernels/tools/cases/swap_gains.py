from collections.abc import Sequence

import torch

from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.swap_gains import CONFIGS, swap_gains, swap_gains_reference, swap_terms
from permtriton.kernels.tools.case import PATTERN, Arguments, Case, Random, Shapes, in_float64

POSITIONS = 1024  # most positions of the left side: a search also computes an order's gains in parts


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    return [swap_gains_case(o, c, device) for o, c in shapes]


def swap_gains_case(out_features: int, in_features: int, device: torch.device) -> Case:
    """Swaps of each of a linear's first positions with each of its positions, at 2:4 by Wanda's scores."""
    positions = min(in_features, POSITIONS)

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        weight, gradient = (random.normal(out_features, in_features) for _ in range(2))
        factors = ImportanceFactors(1, random.uniform(in_features) + 0.5)
        terms = swap_terms(weight, factors, gradient, random.order(in_features, False), PATTERN)
        return terms.of_positions(slice(0, positions)), terms

    moved = (positions + in_features) * out_features * 16 + positions * in_features * 4
    return Case(
        "swap_gains", f"{positions}x{in_features}x{out_features}", torch.float32, make, swap_gains,
        in_float64(swap_gains_reference), 1e-4, moved, {"swap_gains": CONFIGS},
        6 * positions * in_features * out_features,
    )  # fmt: skip
