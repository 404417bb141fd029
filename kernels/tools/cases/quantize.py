from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import silu

from permtriton.kernels import norm_permute as norms
from permtriton.kernels.permute import permute_reference
from permtriton.kernels.quantize import CONFIGS, quantize, quantize_tokens, silu_quantize
from permtriton.kernels.tools.case import Arguments, Case, Random, Shapes
from permtriton.kernels.tools.cases.norm_permute import norm_permute_case
from permtriton.kernels.tools.timing import relative_error

Quantized = tuple[Tensor, Tensor]
LIMIT = 1e-2  # a value halfway between two float8 values may be rounded to either


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    makers = (quantize_case, gathered_case, silu_quantize_case, norm_quantize_case)
    return [make(t, c, dtype, device) for t in tokens for _, c in shapes for make in makers]


def quantize_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Activations in their own order."""

    def make(seed: int) -> Arguments:
        return Random(seed, device).normal(rows, channels, dtype=dtype), None

    return _case("quantize", rows, channels, dtype, make, quantize, lambda x, _: x)


def gathered_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Activations in another order."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        return random.normal(rows, channels, dtype=dtype), random.stored_order(channels, False)

    return _case("quantize with gather", rows, channels, dtype, make, quantize, permute_reference)


def silu_quantize_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Case:
    """``silu(gate) * up`` quantized by `silu_quantize`: the input of a gated MLP's last linear."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        return tuple(random.normal(rows, channels, dtype=dtype) for _ in range(2))

    case = _case("quantize (silu)", rows, channels, dtype, make, silu_quantize, lambda gate, up: silu(gate) * up)
    return replace(case, bytes=case.bytes + rows * channels * dtype.itemsize)


def norm_quantize_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Case:
    """RMSNorm whose output is permuted and quantized."""

    def reference(x: Tensor, weight: Tensor, bias: None, index: Tensor, variant: norms.NormVariant) -> Tensor:
        return norms.norm_reference(x, weight, bias, variant, index.long())

    make = norm_permute_case(rows, channels, dtype, device).make
    case = _case("quantize (norm)", rows, channels, dtype, make, norms.norm_quantize, reference)
    return replace(case, tables={"norm_permute": norms.CONFIGS})


def _case(
    op: str,
    rows: int,
    channels: int,
    dtype: torch.dtype,
    make: Callable[[int], Arguments],
    run: Callable[..., Quantized],
    values: Callable[..., Tensor],
) -> Case:
    """The case of an operator that quantizes ``values(*inputs)``; counts the bytes of one input of that size."""

    def reference(*inputs: object) -> Quantized:
        return quantize_tokens(values(*inputs))

    moved = rows * channels * (dtype.itemsize + 1) + 4 * rows
    return Case(
        op, f"{rows}x{channels}", dtype, make, run, reference, LIMIT, moved, {"quantize": CONFIGS}, error=_error
    )


def _error(got: Quantized, expected: Quantized) -> float:
    """Returns the larger of two relative errors: of the dequantized values, and of the scales."""
    values = (q.float() * scale for q, scale in (got, expected))
    return max(relative_error(*values), relative_error(got[1], expected[1]))
