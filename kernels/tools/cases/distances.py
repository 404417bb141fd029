from collections.abc import Sequence

import torch

from permtriton.kernels.distances import distances, distances_reference
from permtriton.kernels.placement import CONFIGS
from permtriton.kernels.tools.case import BLOCK, Arguments, Case, Random, Shapes, in_float64


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    return [distances_case(o, c // BLOCK, device) for o, c in shapes if c >= BLOCK]


def distances_case(out_features: int, blocks: int, device: torch.device) -> Case:
    """Distances between the columns of the same block in two weights, as the heuristic order compares them."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        return random.normal(blocks, BLOCK, out_features), random.normal(blocks, BLOCK, out_features)

    moved = 4 * blocks * BLOCK * (2 * out_features + BLOCK)
    return Case(
        "distances", f"{blocks}x{BLOCK}x{out_features}", torch.float32, make, distances,
        in_float64(distances_reference), 1e-4, moved, {"placement": CONFIGS}, 3 * blocks * BLOCK * BLOCK * out_features,
    )  # fmt: skip
