"""The named shapes whose issue floor is counted, and how often the loops of their machine code run."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.floors import Floor, Gpu
from benchmarks.gpu.recording import CudaLaunch, Launch
from permtriton.kernels import placement_gradient
from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.assignment import launched
from permtriton.kernels.nm_mask import nm_mask_triton
from permtriton.kernels.norm_permute import add_norm_permute_triton, norm_permute_triton
from permtriton.kernels.packing import unpack_triton
from permtriton.kernels.permute import permute_triton
from permtriton.kernels.sinkhorn import sinkhorn_backward_triton, sinkhorn_triton
from permtriton.kernels.swap_gains import SwapTerms, swap_gains_triton
from permtriton.kernels.tools.case import BLOCK
from permtriton.kernels.tools.cases import (
    POSITIONS,
    add_norm_permute_case,
    assignment_case,
    nm_mask_case,
    norm_permute_case,
    permute_case,
    placement_gradient_case,
    sinkhorn_backward_case,
    sinkhorn_case,
    sparse_linear_case,
    swap_gains_case,
    unpack_case,
)

BLOCKS = 11648  # of a model of 7 billion weights
ROWS, CHANNELS = 11008, 4096  # of its largest linear
TOKENS = 16384
META = torch.device("meta")


def floors(gpu: Gpu) -> Iterator[Floor]:
    """Yields the shapes of each kernel, of a model of 7 billion weights; ``gpu`` runs the kernels in CUDA."""
    case, elements = permute_case(TOKENS, ROWS, torch.bfloat16), TOKENS * ROWS
    yield Floor(case, permute_triton, elements, "element", _per_tile)
    case, elements = norm_permute_case(TOKENS, CHANNELS, torch.bfloat16), TOKENS * CHANNELS
    yield Floor(case, norm_permute_triton, elements, "element", _per_row)
    case = add_norm_permute_case(TOKENS, CHANNELS, torch.bfloat16)
    yield Floor(case, add_norm_permute_triton, elements, "element", _per_row)
    entries = BLOCKS * BLOCK * BLOCK
    for make, launch in ((sinkhorn_case, sinkhorn_triton), (sinkhorn_backward_case, sinkhorn_backward_triton)):
        yield Floor(make(BLOCKS, BLOCK), launch, entries, "entry", lambda launch: (launch.numbers["rounds"],))
    yield Floor(assignment_case(BLOCKS, BLOCK), launched, entries, "score", None)
    case = nm_mask_case(ROWS, CHANNELS, torch.bfloat16)
    yield Floor(case, nm_mask_triton, ROWS * CHANNELS, "weight", lambda launch: ())
    yield _of_placement_gradients()
    yield _of_swaps()
    case = unpack_case(ROWS, CHANNELS, torch.bfloat16)
    yield Floor(case, unpack_triton, ROWS * CHANNELS, "weight", lambda launch: ())
    for tokens in (16, 64):
        yield floor_of(tokens, ROWS, CHANNELS, gpu)


def _per_tile(launch: Launch) -> tuple[float, ...]:
    constants = launch.constants
    return (launch.numbers["rows"] / (constants.get("ROWS", 1) * constants.get("PACK", 1)) / launch.grid[0],)


def _per_row(launch: Launch) -> tuple[float, ...]:
    return (launch.numbers["rows"] / launch.grid[0],)


def _of_placement_gradients() -> Floor:
    def launch(*inputs: Any) -> Tensor:  # after the terms, which are made in torch
        parts = [torch.empty(ROWS, CHANNELS, device=META).t() for _ in range(4)]
        return placement_gradient.launched(SwapTerms(*parts, torch.empty(CHANNELS, device=META)), inputs[3], BLOCK)

    case, pairs = placement_gradient_case(ROWS, CHANNELS, torch.bfloat16), CHANNELS * BLOCK
    return Floor(case, launch, pairs * ROWS, "pair and row", lambda launch: (launch.numbers["steps"],))


def _of_swaps() -> Floor:
    pairs, case = POSITIONS * CHANNELS, swap_gains_case(ROWS, CHANNELS)
    return Floor(case, swap_gains_triton, pairs * ROWS, "pair and row", lambda launch: (launch.numbers["rows"],))


def floor_of(tokens: int, rows: int, channels: int, gpu: Gpu) -> Floor:
    """Returns a packed linear's default launch, by mma.sp."""
    product = mma.Product(tokens, rows, channels, torch.bfloat16)
    variant = mma.variant_of(mma.configs_for(product, gpu.limits)[0], product, gpu.limits)

    def launch(x: Tensor, values: Tensor, positions: Tensor, *_: object) -> Tensor:
        return variant.launch(x, values, positions, None)

    case = sparse_linear_case(tokens, rows, channels, torch.bfloat16)
    case = replace(case, op=f"{case.op} mma")
    return Floor(case, launch, rows * channels // 2, "kept value", _mma_loops)


def _mma_loops(launch: CudaLaunch) -> tuple[float, ...]:  # over a block's chunks, and over its results if they are many
    numbers = launch.numbers
    chunk = numbers["CHUNK"] * numbers["WARPS"] // numbers["ROW_WARPS"] * numbers["SPLITS"]
    each = -(-numbers["TOKENS"] * numbers["ROWS"] // (4 * launch.kernel.threads * numbers["SPLITS"]))
    return (numbers["in_features"] / chunk, *([-(-each // 4)] if each > 4 else []))
