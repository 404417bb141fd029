"""Cases of `permtriton.kernels.sinkhorn`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from permtriton.kernels.sinkhorn import (
    BACKWARD_CONFIGS,
    CONFIGS,
    sinkhorn,
    sinkhorn_backward,
    sinkhorn_backward_reference,
    sinkhorn_reference,
)
from permtriton.kernels.tools.case import BLOCK, Arguments, Case, Random, Shapes, blocks_of

TAU, ROUNDS = 0.5, 5


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Returns the cases of all blocks at once, forward and backward."""
    blocks = blocks_of(shapes)
    return [make(blocks, BLOCK, device) for make in (sinkhorn_case, sinkhorn_backward_case)]


def sinkhorn_case(blocks: int, size: int, device: torch.device) -> Case:
    """The soft permutations of one learning step."""

    def make(seed: int) -> Arguments:
        return Random(seed, device).near_identity(blocks, size), TAU, ROUNDS

    def reference(logits: Tensor, tau: float, rounds: int) -> Tensor:
        return sinkhorn_reference(logits.double(), tau, rounds)[0]

    shape, moved = f"{blocks}x{size}x{size}", 2 * blocks * size * size * 4
    return Case(
        "sinkhorn", shape, torch.float32, make, sinkhorn, reference, 1e-4, moved, {"sinkhorn": CONFIGS},
    )  # fmt: skip


def sinkhorn_backward_case(blocks: int, size: int, device: torch.device) -> Case:
    """The backward pass: reads gradient, logits and scales, writes a gradient."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        logits = random.near_identity(blocks, size)
        _, rows, columns = sinkhorn_reference(logits, TAU, ROUNDS)
        return random.normal(blocks, size, size), logits, rows, columns, TAU

    def reference(grad: Tensor, logits: Tensor, rows: Tensor, columns: Tensor, tau: float) -> Tensor:
        _, wide_rows, wide_columns = sinkhorn_reference(logits.double(), tau, ROUNDS)
        return sinkhorn_backward_reference(grad.double(), logits.double(), wide_rows, wide_columns, tau)

    shape, moved = f"{blocks}x{size}x{size}", (3 * size + 2 * ROUNDS) * blocks * size * 4
    return Case(
        "sinkhorn backward", shape, torch.float32, make, sinkhorn_backward, reference, 1e-3, moved,
        {"sinkhorn_backward": BACKWARD_CONFIGS},
    )  # fmt: skip
