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
from permtriton.kernels.tools.case import BLOCK, Arguments, Case, Random, Shapes, blocks_of, in_float64

TAU, ROUNDS = 0.5, 5


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    blocks = blocks_of(shapes)
    return [make(blocks, BLOCK, device) for make in (sinkhorn_case, sinkhorn_backward_case)]


def sinkhorn_case(blocks: int, size: int, device: torch.device) -> Case:
    """The soft permutations of one learning step."""

    def make(seed: int) -> Arguments:
        return Random(seed, device).near_identity(blocks, size), TAU, ROUNDS

    reference = in_float64(lambda *inputs: sinkhorn_reference(*inputs)[0])
    return Case(
        "sinkhorn", f"{blocks}x{size}x{size}", torch.float32, make, sinkhorn, reference, 1e-4,
        2 * blocks * size * size * 4, {"sinkhorn": CONFIGS},
    )  # fmt: skip


def sinkhorn_backward_case(blocks: int, size: int, device: torch.device) -> Case:
    """The backward pass: reads gradient, logits and scales, writes a gradient."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        logits = random.near_identity(blocks, size)
        _, rows, columns = sinkhorn_reference(logits, TAU, ROUNDS)
        return random.normal(blocks, size, size), logits, rows, columns, TAU

    def reference(grad: Tensor, logits: Tensor, _rows: Tensor, _columns: Tensor, tau: float) -> Tensor:
        return sinkhorn_backward_reference(grad, logits, *sinkhorn_reference(logits, tau, ROUNDS)[1:], tau)

    return Case(
        "sinkhorn backward", f"{blocks}x{size}x{size}", torch.float32, make, sinkhorn_backward, in_float64(reference),
        1e-3, (3 * size + 2 * ROUNDS) * blocks * size * 4, {"sinkhorn_backward": BACKWARD_CONFIGS},
    )  # fmt: skip
