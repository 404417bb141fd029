from collections.abc import Sequence

import torch
from torch import Tensor

from permtriton.kernels.assignment import CONFIGS, assignment, assignment_reference
from permtriton.kernels.sinkhorn import sinkhorn_reference
from permtriton.kernels.tools.case import BLOCK, Arguments, Case, Random, Shapes, blocks_of


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    return [assignment_case(blocks_of(shapes), BLOCK, device)]


def assignment_case(blocks: int, size: int, device: torch.device) -> Case:
    """Hard permutations of soft ones, as in a learning step; correct if every block's total is the largest one."""

    def make(seed: int) -> Arguments:
        return (sinkhorn_reference(Random(seed, device).near_identity(blocks, size), 0.5, 5)[0],)

    def total(score: Tensor, index: Tensor) -> Tensor:
        return score.double().gather(1, index.long().unsqueeze(1)).sum((1, 2))

    def error(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
        (score, index), (_, best) = actual, expected
        inside = bool((index.long().sort(1).values == torch.arange(size, device=index.device)).all())
        return float((total(score, best) - total(score, index)).abs().max()) if inside else float("inf")

    return Case(
        "assignment", f"{blocks}x{size}x{size}", torch.float32, make, lambda score: (score, assignment(score)),
        lambda score: (score, assignment_reference(score)), 1e-4, blocks * size * (size * 4 + 4),
        {"assignment": CONFIGS}, error=error,
    )  # fmt: skip
