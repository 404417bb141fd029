"""What kernels are checked and tuned on: a function for each of their calls, and `cases_by_kernel`, the list of all."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from permtriton.errors import ConfigError
from permtriton.kernels import (
    assignment,
    cusparselt,
    distances,
    nm_mask,
    packing,
    permute,
    placement_gradient,
    quantize,
    sinkhorn,
    sparse_linear,
    sparse_linear_fp8,
    sparsegpt_block,
    swap_gains,
)
from permtriton.kernels import norm_permute as norms
from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.tools.case import (
    BLOCK,
    PATTERN,
    Arguments,
    Case,
    Random,
    Shapes,
    in_float64,
    relative_error,
    rounding,
    unequal,
)

TAU, ROUNDS = 0.5, 5
EPS = 1e-5
RMS = norms.NormVariant("rms", EPS)
POSITIONS = 1024  # most positions of the left side of swaps: a search also computes an order's gains in parts
CHANNELS = 128  # of a block of SparseGPT
FP8_LIMIT = 1e-2  # a value halfway between two float8 values may be rounded to either
CPU = torch.device("cpu")  # `Case.tables` does not depend on the GPU: it lists the kernels by mma.sp


def assignment_case(blocks: int, size: int) -> Case:
    """Hard permutations of soft ones, as in a learning step; correct if every block's total is the largest one."""

    def total(score: Tensor, index: Tensor) -> Tensor:
        return score.double().gather(1, index.long().unsqueeze(1)).sum((1, 2))

    def error(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
        (score, index), (_, best) = actual, expected
        inside = bool((index.long().sort(1).values == torch.arange(size, device=index.device)).all())
        return float((total(score, best) - total(score, index)).abs().max()) if inside else float("inf")

    return Case(
        "assignment", f"{blocks}x{size}x{size}", torch.float32,
        lambda random: (sinkhorn.sinkhorn_reference(random.near_identity(blocks, size), TAU, ROUNDS)[0],),
        lambda score: (score, assignment.assignment(score)),
        lambda score: (score, assignment.assignment_reference(score)), 1e-4, blocks * size * (size * 4 + 4),
        {"assignment": assignment.CONFIGS}, error=error,
    )  # fmt: skip


def distances_case(out_features: int, blocks: int) -> Case:
    """Distances between the columns of the same block in two weights, as the heuristic order compares them."""
    return Case(
        "distances", f"{blocks}x{BLOCK}x{out_features}", torch.float32,
        lambda random: tuple(random.normal(blocks, BLOCK, out_features) for _ in range(2)),
        distances.distances, in_float64(distances.distances_reference), 1e-4,
        4 * blocks * BLOCK * (2 * out_features + BLOCK), {"placement_gradient": placement_gradient.CONFIGS},
        3 * blocks * BLOCK * BLOCK * out_features,
    )  # fmt: skip


def _of_learning(random: Random, out_features: int, in_features: int, dtype: torch.dtype) -> Arguments:
    """Returns gradient, weight, Wanda's factors, order and sizes of blocks; a weight is stored input-major."""
    grad, weight = (random.normal(in_features, out_features, dtype=dtype).t() for _ in range(2))
    factors, order = ImportanceFactors(1, random.uniform(in_features) + 0.5), random.order(in_features, True)
    return grad, weight, factors, order, [min(BLOCK, in_features - start) for start in range(0, in_features, BLOCK)]


def nm_mask_case(out_features: int, in_features: int, dtype: torch.dtype) -> Case:
    """The masked weight of a linear at 2:4."""

    def inputs(random: Random) -> Arguments:
        _, weight, factors, index, sizes = _of_learning(random, out_features, in_features, dtype)
        return weight, factors, index, sizes, PATTERN

    # Where scores tie under another rounding, another weight may be kept: a handful in 45 million.
    return Case(
        "nm_mask", f"{out_features}x{in_features}", dtype, inputs, nm_mask.nm_mask, nm_mask.nm_mask_reference, 1e-3,
        2 * out_features * in_features * dtype.itemsize, {"nm_mask": nm_mask.CONFIGS},
    )  # fmt: skip


def placement_gradient_case(out_features: int, in_features: int, dtype: torch.dtype) -> Case:
    """The gradient of a linear's block permutations at 2:4."""

    def inputs(random: Random) -> Arguments:
        curvature = swap_gains.RankOneCurvature(random.uniform(out_features), random.uniform(in_features))
        return *_of_learning(random, out_features, in_features, dtype), PATTERN, curvature

    # Where scores tie in float32 but not in float64, another weight may be kept, as happens to a handful.
    return Case(
        "placement_gradient", f"{out_features}x{in_features}", dtype, inputs, placement_gradient.placement_gradient,
        in_float64(placement_gradient.placement_gradient_reference), 2e-2,
        2 * out_features * in_features * dtype.itemsize + in_features * BLOCK * 4,
        {"placement_gradient": placement_gradient.CONFIGS}, 3 * out_features * in_features * BLOCK,
    )  # fmt: skip


def norm_permute_case(rows: int, channels: int, dtype: torch.dtype, kind: str = "rms") -> Case:
    """RMSNorm, or LayerNorm, that writes a permuted order."""

    def inputs(random: Random) -> Arguments:
        x, weight = random.normal(rows, channels, dtype=dtype), random.normal(channels, dtype=dtype)
        bias = random.normal(channels, dtype=dtype) if kind == "layer" else None
        return x, weight, bias, random.stored_order(channels, False), norms.NormVariant(kind, EPS)

    return Case(
        f"norm_permute ({kind})", f"{rows}x{channels}", dtype, inputs, norms.norm_permute, _wide_norm, rounding(dtype),
        2 * rows * channels * dtype.itemsize, {"norm_permute": norms.CONFIGS},
    )  # fmt: skip


@in_float64
def _wide_norm(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, variant: norms.NormVariant) -> Tensor:
    return norms.norm_reference(x, weight, bias, variant, index.long(), torch.float64)


def add_norm_permute_case(rows: int, channels: int, dtype: torch.dtype) -> Case:
    """RMSNorm of a sum, which also writes the sum: moves 4 times the bytes of the input."""

    def inputs(random: Random) -> Arguments:
        x, residual = (random.normal(rows, channels, dtype=dtype) for _ in range(2))
        return x, residual, random.normal(channels, dtype=dtype), random.stored_order(channels, False), EPS

    def reference(x: Tensor, residual: Tensor, weight: Tensor, index: Tensor, _eps: float) -> tuple[Tensor, Tensor]:
        total = x.double() + residual.double()
        return _wide_norm(total, weight, None, index, RMS), total

    return Case(
        "norm_permute of a sum", f"{rows}x{channels}", dtype, inputs, norms.add_norm_permute, reference,
        rounding(dtype), 4 * rows * channels * dtype.itemsize, {"norm_permute": norms.CONFIGS},
    )  # fmt: skip


def unpack_case(out_features: int, in_features: int, dtype: torch.dtype) -> Case:
    """Unpacking a 2:4 weight."""

    def inputs(random: Random) -> Arguments:
        return *packing.pack(random.two_of_four(out_features, in_features, dtype), PATTERN), in_features, PATTERN

    weights = out_features * in_features
    return Case(
        "packing", f"{out_features}x{in_features}", dtype, inputs, packing.unpack, packing.unpack_reference, 0,
        weights * dtype.itemsize * 3 // 2 + weights // 8, {"packing": packing.CONFIGS}, error=unequal,
    )  # fmt: skip


def permute_case(rows: int, channels: int, dtype: torch.dtype, in_blocks: bool = True) -> Case:
    """A gather of channels inside blocks of 64, or anywhere."""
    return Case(
        "permute", f"{rows}x{channels} {'in blocks' if in_blocks else 'global'}", dtype,
        lambda random: (random.normal(rows, channels, dtype=dtype), random.stored_order(channels, in_blocks)),
        permute.permute, permute.permute_reference, 0, 2 * rows * channels * dtype.itemsize,
        {"permute": permute.CONFIGS}, error=unequal,
    )  # fmt: skip


def quantize_case(rows: int, channels: int, dtype: torch.dtype, gather: bool = False) -> Case:
    """Activations in their own order, or in another one."""

    def inputs(random: Random) -> Arguments:
        x = random.normal(rows, channels, dtype=dtype)
        return x, random.stored_order(channels, False) if gather else None

    def reference(x: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        return quantize.quantize_tokens(x if index is None else permute.permute_reference(x, index))

    def error(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
        dequantized = (q.float() * scale for q, scale in (actual, expected))
        return max(relative_error(*dequantized), relative_error(actual[1], expected[1]))

    return Case(
        "quantize" + (" with gather" if gather else ""), f"{rows}x{channels}", dtype, inputs, quantize.quantize,
        reference, FP8_LIMIT, rows * channels * (dtype.itemsize + 1) + 4 * rows, {"quantize": quantize.CONFIGS},
        error=error,
    )  # fmt: skip


def sinkhorn_case(blocks: int, size: int) -> Case:
    """The soft permutations of one learning step."""
    return Case(
        "sinkhorn", f"{blocks}x{size}x{size}", torch.float32,
        lambda random: (random.near_identity(blocks, size), TAU, ROUNDS), sinkhorn.sinkhorn,
        in_float64(lambda *inputs: sinkhorn.sinkhorn_reference(*inputs)[0]), 1e-4, 2 * blocks * size * size * 4,
        {"sinkhorn": sinkhorn.CONFIGS},
    )  # fmt: skip


def sinkhorn_backward_case(blocks: int, size: int) -> Case:
    """The backward pass: reads gradient, logits and scales, writes a gradient."""

    def inputs(random: Random) -> Arguments:
        logits = random.near_identity(blocks, size)
        scales = sinkhorn.sinkhorn_reference(logits, TAU, ROUNDS)[1:]
        return random.normal(blocks, size, size), logits, *scales, TAU

    @in_float64
    def reference(grad: Tensor, logits: Tensor, _rows: Tensor, _columns: Tensor, tau: float) -> Tensor:
        scales = sinkhorn.sinkhorn_reference(logits, tau, ROUNDS)[1:]
        return sinkhorn.sinkhorn_backward_reference(grad, logits, *scales, tau)

    return Case(
        "sinkhorn backward", f"{blocks}x{size}x{size}", torch.float32, inputs, sinkhorn.sinkhorn_backward, reference,
        1e-3, (3 * size + 2 * ROUNDS) * blocks * size * 4, {"sinkhorn_backward": sinkhorn.BACKWARD_CONFIGS},
    )  # fmt: skip


def sparse_linear_case(
    tokens: int, out_features: int, in_features: int, dtype: torch.dtype, gather: bool = False
) -> Case:
    """A linear with a packed 2:4 weight, optionally with a gather of its input; on every route that the GPU has."""

    def inputs(random: Random) -> Arguments:
        weight = random.two_of_four(out_features, in_features, dtype)
        index = random.stored_order(in_features, True) if gather else None
        there = cusparselt.supports(dtype, out_features, in_features, random.device)
        compressed = cusparselt.compress(weight) if there else None
        x, packed = random.normal(tokens, in_features, dtype=dtype), packing.pack(weight, PATTERN)
        return x, *packed, None, index, in_features, PATTERN, compressed

    def reference(x: Tensor, values: Tensor, positions: Tensor, *others: Any) -> Tensor:
        x = permute.permute_reference(x, others[1]) if gather else x
        return x.double() @ packing.unpack_reference(values, positions, in_features, PATTERN).double().t()

    weights = out_features * in_features
    moved = weights * dtype.itemsize // 2 + weights // 8 + tokens * (in_features + out_features) * dtype.itemsize
    tables = {"sparse_linear_route": sparse_linear.ROUTE_CONFIGS}
    if mma.takes(product := mma.Product(tokens, out_features, in_features, dtype), PATTERN, CPU):
        tables["sparse_linear_mma"] = mma.configs_for(product, mma.limits_of(CPU))
    if cusparselt.takes(dtype, out_features, in_features):
        tables["cusparselt"] = cusparselt.CONFIGS
    return Case(
        "sparse_linear" + (" with gather" if gather else ""), f"{tokens} tokens {out_features}x{in_features}", dtype,
        inputs, sparse_linear.sparse_linear, reference, rounding(dtype), moved, tables,
        tokens * weights,  # 2 operations per kept weight
    )  # fmt: skip


def sparse_linear_fp8_case(tokens: int, out_features: int, in_features: int, dtype: torch.dtype) -> Case:
    """A linear with a packed 2:4 weight in FP8, and its input quantized; on every route that the GPU has."""

    def inputs(random: Random) -> Arguments:
        weight = random.two_of_four(out_features, in_features, dtype)
        x, packed = random.normal(tokens, in_features, dtype=dtype), sparse_linear_fp8.pack_fp8(weight, PATTERN)
        return x, *packed, None, None, in_features, PATTERN

    def reference(x: Tensor, values: Tensor, positions: Tensor, scale: Tensor, *_: object) -> Tensor:
        quantized, token_scale = quantize.quantize_tokens(x)
        weight = sparse_linear_fp8.unpack_fp8(values, positions, scale, in_features, PATTERN)
        return (quantized.double() * token_scale) @ weight.double().t()

    weights = out_features * in_features
    tables = {"sparse_linear_fp8_route": sparse_linear_fp8.ROUTE_CONFIGS}
    if mma.takes(mma.Product(tokens, out_features, in_features, dtype, fp8=True), PATTERN, CPU):
        tables["sparse_linear_fp8"] = mma.WIDE_CONFIGS
    return Case(
        "sparse_linear_fp8", f"{tokens} tokens {out_features}x{in_features}", dtype, inputs,
        sparse_linear_fp8.sparse_linear_fp8, reference, FP8_LIMIT,
        weights * 5 // 8 + 4 * out_features + tokens * (in_features + out_features) * dtype.itemsize, tables,
        tokens * weights // 2,  # 2 operations per kept weight, at twice the rate of 16 bits
    )  # fmt: skip


def sparsegpt_block_case(out_features: int) -> Case:
    """A block of 128 channels with its mask given: rounding might change a chosen mask."""

    def inputs(random: Random) -> Arguments:
        block, factor = random.normal(CHANNELS, out_features), random.normal(CHANNELS, CHANNELS).triu_() / CHANNELS
        factor.diagonal().abs_().add_(0.5)
        return block, factor, random.two_of_four(out_features, CHANNELS, torch.float32).t() != 0, PATTERN

    weights = out_features * CHANNELS
    return Case(
        "sparsegpt_block", f"{CHANNELS}x{out_features}", torch.float32, inputs, sparsegpt_block.sparsegpt_block,
        in_float64(sparsegpt_block.sparsegpt_block_reference), 1e-5, 13 * weights,
        {"sparsegpt_block": sparsegpt_block.CONFIGS}, CHANNELS * weights,
    )  # fmt: skip


def swap_gains_case(out_features: int, in_features: int) -> Case:
    """Swaps of each of a linear's first positions with each of its positions, at 2:4 by Wanda's scores."""
    positions = min(in_features, POSITIONS)

    def inputs(random: Random) -> Arguments:
        weight, gradient = (random.normal(out_features, in_features) for _ in range(2))
        factors, order = ImportanceFactors(1, random.uniform(in_features) + 0.5), random.order(in_features, False)
        curvature = swap_gains.RankOneCurvature(random.uniform(out_features), random.uniform(in_features))
        terms = swap_gains.swap_terms(weight, factors, gradient, order, PATTERN, curvature)
        return terms.of_positions(slice(0, positions)), terms

    return Case(
        "swap_gains", f"{positions}x{in_features}x{out_features}", torch.float32, inputs, swap_gains.swap_gains,
        in_float64(swap_gains.swap_gains_reference), 1e-4,
        (positions + in_features) * out_features * 16 + positions * in_features * 4,
        {"swap_gains": swap_gains.CONFIGS}, 6 * positions * in_features * out_features,
    )  # fmt: skip


def cases_by_kernel(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype) -> dict[str, list[Case]]:
    """Returns the cases of every kernel for linears of some shapes (out, in), and for some numbers of tokens."""
    blocks = (sum(max(in_features // BLOCK, 1) for _, in_features in shapes), BLOCK)  # of all linears together
    weights = [(o, c, dtype) for o, c in shapes]
    rows = [(t, c, dtype) for t in tokens for _, c in shapes]
    products = [(t, *weight) for t in tokens for weight in weights]
    of_norms = (norm_permute_case, add_norm_permute_case)
    return {
        "assignment": [assignment_case(*blocks)],
        "distances": [distances_case(o, c // BLOCK) for o, c in shapes if c >= BLOCK],
        "nm_mask": [nm_mask_case(*weight) for weight in weights],
        "norm_permute": [make(*size) for size in rows for make in of_norms],
        "packing": [unpack_case(*weight) for weight in weights],
        "permute": [permute_case(*size) for size in rows],
        "placement_gradient": [placement_gradient_case(*weight) for weight in weights],
        "quantize": [quantize_case(*size, gather) for size in rows for gather in (False, True)],
        "sinkhorn": [sinkhorn_case(*blocks), sinkhorn_backward_case(*blocks)],
        "sparse_linear": [sparse_linear_case(*product) for product in products],
        "sparse_linear_fp8": [sparse_linear_fp8_case(*product) for product in products],
        "sparsegpt_block": [sparsegpt_block_case(o) for o, _ in shapes],
        "swap_gains": [swap_gains_case(o, c) for o, c in shapes],
    }


def cases_for(shapes: Shapes, tokens: Sequence[int], dtype: torch.dtype, kernel: str | None = None) -> list[Case]:
    """Returns the cases for linears of these shapes (out, in), each once; ``kernel`` names the only one to tune."""
    for out_features, in_features in shapes:
        if in_features % 4:
            raise ConfigError(f"shape {out_features}x{in_features}: expected input features that are a multiple of 4")
        if out_features < 4:
            raise ConfigError(f"shape {out_features}x{in_features}: expected 4 output features or more")
    cases = cases_by_kernel(shapes, tokens, dtype)
    if kernel not in (None, *cases):
        raise ConfigError(f"kernel {kernel!r} is unknown: choose one of {', '.join(cases)}")
    chosen = cases.values() if kernel is None else [cases[kernel]]
    return list({case.name: case for of_kernel in chosen for case in of_kernel}.values())
