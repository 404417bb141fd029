"""Cases, builds and resources of `permtriton.kernels.assignment`."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from permtriton.kernels.assignment import CONFIGS, assignment, assignment_reference, launched
from permtriton.kernels.sinkhorn import sinkhorn_reference
from permtriton.kernels.tools.builds import Build, builds_of, name_of
from permtriton.kernels.tools.case import BLOCK, Arguments, Case, Random, blocks_of


def cases(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Case]:
    """Returns the case of all blocks at once."""
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
        lambda score: (score, assignment_reference(score)), error, 1e-4, blocks * size * (size * 4 + 4),
        tables={"assignment": CONFIGS},
    )  # fmt: skip


def builds() -> Iterator[Build]:
    """Yields the kernel cold and warm, for blocks of 64 and 256 and one that is padded."""

    def solve(size: int, dtype: torch.dtype, warm: bool) -> object:
        return launched(torch.empty(8, size, size, dtype=dtype), torch.empty(8, size) if warm else None)

    for dtype, size, warm in product((torch.float32, torch.bfloat16), (64, 256, 48), (False, True)):
        about = f"{size}x{size} {name_of(dtype)}{' warm' if warm else ''}"
        yield from builds_of(about, partial(solve, size, dtype, warm), "assignment", CONFIGS)
