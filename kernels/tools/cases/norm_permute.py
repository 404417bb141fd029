from collections.abc import Sequence

import torch
from torch import Tensor

from permtriton.kernels.norm_permute import (
    BACKWARD_CONFIGS,
    CONFIGS,
    NormVariant,
    add_norm_permute,
    norm_permute,
    norm_reference,
)
from permtriton.kernels.tools.case import Arguments, Case, Random, Shapes, in_float64, rounding

EPS = 1e-5
RMS = NormVariant("rms", EPS)


def cases(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Case]:
    makers = (norm_permute_case, add_norm_permute_case, norm_permute_backward_case)
    return [make(t, c, dtype, device) for t in tokens for _, c in shapes for make in makers]


def norm_permute_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device, kind: str = "rms") -> Case:
    """RMSNorm, or LayerNorm, that writes a permuted order."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        x, weight = random.normal(rows, channels, dtype=dtype), random.normal(channels, dtype=dtype)
        bias = random.normal(channels, dtype=dtype) if kind == "layer" else None
        return x, weight, bias, random.stored_order(channels, False), NormVariant(kind, EPS)

    moved = 2 * rows * channels * dtype.itemsize
    return Case(
        f"norm_permute ({kind})", f"{rows}x{channels}", dtype, make, norm_permute, _wide, rounding(dtype), moved,
        {"norm_permute": CONFIGS},
    )  # fmt: skip


@in_float64
def _wide(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, variant: NormVariant) -> Tensor:
    return norm_reference(x, weight, bias, variant, index.long(), torch.float64)


def add_norm_permute_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Case:
    """RMSNorm of a sum, which also writes the sum: moves 4 times the bytes of the input."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        x, residual = (random.normal(rows, channels, dtype=dtype) for _ in range(2))
        return x, residual, random.normal(channels, dtype=dtype), random.stored_order(channels, False), EPS

    def reference(x: Tensor, residual: Tensor, weight: Tensor, index: Tensor, _eps: float) -> tuple[Tensor, Tensor]:
        total = x.double() + residual.double()
        return _wide(total, weight, None, index, RMS), total

    moved = 4 * rows * channels * dtype.itemsize
    return Case(
        "norm_permute of a sum", f"{rows}x{channels}", dtype, make, add_norm_permute, reference, rounding(dtype),
        moved, {"norm_permute": CONFIGS},
    )  # fmt: skip


def norm_permute_backward_case(rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Case:
    """RMSNorm forward and backward, with the gradients of input and weight: moves 5 times the bytes of the input."""

    def make(seed: int) -> Arguments:
        random = Random(seed, device)
        x, grad = (random.normal(rows, channels, dtype=dtype) for _ in range(2))
        weight = random.normal(channels, dtype=dtype).requires_grad_()
        return x.requires_grad_(), weight, random.stored_order(channels, False), grad

    @torch.enable_grad()
    def run(x: Tensor, weight: Tensor, index: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(norm_permute(x, weight, None, index, RMS), (x, weight), grad)

    @torch.enable_grad()
    def reference(x: Tensor, weight: Tensor, index: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
        return torch.autograd.grad(_wide(wide[0], wide[1], None, index, RMS), wide, grad.double())

    moved = 5 * rows * channels * dtype.itemsize
    return Case(
        "norm_permute forward + backward", f"{rows}x{channels}", dtype, make, run, reference, rounding(dtype), moved,
        {"norm_permute": CONFIGS, "norm_permute_backward": BACKWARD_CONFIGS},
    )  # fmt: skip
