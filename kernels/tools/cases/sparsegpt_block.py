from collections.abc import Sequence

import torch

from permtriton.kernels.sparsegpt_block import CONFIGS, sparsegpt_block, sparsegpt_block_reference
from permtriton.kernels.tools.case import PATTERN, Arguments, Case, Random, Shapes, in_float64

CHANNELS = 128


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Returns the case of each number of output features; the mask is given, as the last bit might decide a choice."""
    return [sparsegpt_block_case(rows, device) for rows in dict.fromkeys(rows for rows, _ in shapes)]


def sparsegpt_block_case(out_features: int, device: torch.device) -> Case:
    """A block of 128 channels whose mask is given."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        block, factor = random.normal(CHANNELS, out_features), random.normal(CHANNELS, CHANNELS).triu_() / CHANNELS
        factor.diagonal().abs_().add_(0.5)
        keep = random.two_of_four(out_features, CHANNELS, torch.float32).t() != 0
        return block, factor, keep, PATTERN

    weights = out_features * CHANNELS
    return Case(
        "sparsegpt_block", f"{CHANNELS}x{out_features}", torch.float32, make, sparsegpt_block,
        in_float64(sparsegpt_block_reference), 1e-5, 13 * weights, {"sparsegpt_block": CONFIGS}, CHANNELS * weights,
    )  # fmt: skip
