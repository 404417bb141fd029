"""Cases of `permtriton.kernels.distances`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from permtriton.kernels.distances import distances, distances_reference
from permtriton.kernels.placement import CONFIGS
from permtriton.kernels.tools.case import BLOCK, Arguments, Case, Random, Shapes


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Returns the case of each linear whose input has a whole block."""
    return [distances_case(o, c // BLOCK, device) for o, c in shapes if c >= BLOCK]


def distances_case(out_features: int, blocks: int, device: torch.device) -> Case:
    """Distances between the columns of the same block in two weights, as the heuristic order compares them."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        return random.normal(blocks, BLOCK, out_features), random.normal(blocks, BLOCK, out_features)

    def reference(left: Tensor, right: Tensor) -> Tensor:
        return distances_reference(left.double(), right.double())

    moved = 4 * blocks * BLOCK * (2 * out_features + BLOCK)
    return Case(
        "distances", f"{blocks}x{BLOCK}x{out_features}", torch.float32, make, distances, reference, 1e-4, moved,
        {"placement": CONFIGS}, 3 * blocks * BLOCK * BLOCK * out_features,
    )  # fmt: skip
