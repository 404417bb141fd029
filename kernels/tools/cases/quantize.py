"""Cases of `permtriton.kernels.quantize`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from permtriton.kernels.permute import permute_reference
from permtriton.kernels.quantize import CONFIGS, quantize, quantize_tokens
from permtriton.kernels.tools.case import Arguments, Case, Random
from permtriton.kernels.tools.timing import relative_error

Quantized = tuple[Tensor, Tensor]
LIMIT = 1e-2  # a value between two of float8 may be rounded to either


def cases(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Case]:
    """Returns the cases of each linear's input: as it is, and gathered."""
    return [make(t, c, dtype, device) for t in tokens for _, c in shapes for make in (quantize_case, gathered_case)]


def quantize_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Activations as they are."""

    def make(seed: int) -> Arguments:
        return Random(seed, device).normal(rows, channels, dtype=dtype), None

    return _case("quantize", rows, channels, dtype, make, lambda x, _: quantize_tokens(x))


def gathered_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Activations in another order."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        return random.normal(rows, channels, dtype=dtype), random.stored_order(channels, False)

    def reference(x: Tensor, index: Tensor) -> Quantized:
        return quantize_tokens(permute_reference(x, index))

    return _case("quantize with gather", rows, channels, dtype, make, reference)


def _case(
    op: str,
    rows: int,
    channels: int,
    dtype: torch.dtype,
    make: Callable[[int], Arguments],
    reference: Callable[..., Quantized],
) -> Case:
    moved = rows * channels * (dtype.itemsize + 1) + 4 * rows
    return Case(
        op, f"{rows}x{channels}", dtype, make, quantize, reference, _error, LIMIT, moved, tables={"quantize": CONFIGS}
    )


def _error(got: Quantized, expected: Quantized) -> float:
    """Returns the larger error of what was quantized and of the scales."""
    values = (q.float() * scale for q, scale in (got, expected))
    return max(relative_error(*values), relative_error(got[1], expected[1]))
