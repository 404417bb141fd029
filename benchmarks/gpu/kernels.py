"""The rows of single kernels: permute, norm, sinkhorn, assignment, masks, swaps."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import rms_norm

from benchmarks.gpu.bench import Bench, Prepare
from benchmarks.gpu.table import PAIRS
from permtriton.kernels.distances import distances_reference
from permtriton.kernels.launch import jit, multiprocessors, tl, triton
from permtriton.kernels.nm_mask import nm_mask_reference
from permtriton.kernels.placement_gradient import placement_gradient_reference
from permtriton.kernels.sinkhorn import sinkhorn_backward_reference, sinkhorn_reference
from permtriton.kernels.sparsegpt_block import sparsegpt_block_reference
from permtriton.kernels.tools.case import BLOCK, Arguments, Case, relative_error
from permtriton.kernels.tools.cases import (
    assignment_case,
    distances_case,
    nm_mask_case,
    norm_permute_case,
    permute_case,
    placement_gradient_case,
    sinkhorn_backward_case,
    sinkhorn_case,
    sparsegpt_block_case,
    swap_gains_case,
    unpack_case,
)

BLOCKS_7B = 32 * (3 * 4096 + 11008) // 64  # of one step on LLaMA-2-7B shapes: q/k/v, o, gate/up and down, 32 layers


def every(bench: Bench) -> None:
    """Every Triton kernel of pruning once, beside a copy of its bytes, without peers that take seconds."""
    permute(bench)
    norm(bench)
    masks(bench)
    relaxations(bench)
    assignment(bench, scipy=False)
    placement_gradients(bench)
    swaps(bench)
    distance(bench)
    sparsegpt_blocks(bench)


def permute(bench: Bench, sizes: Sequence[tuple[int, int]] = ((16384, 11008), (2048, 4096))) -> None:
    """The gather against a copy of the same bytes, index_select, the CUDA kernel and a product with a matrix."""
    for rows, channels in bench.pick(sizes, [(8, 256)]):
        for in_blocks in (True, False):
            case = permute_case(rows, channels, bench.dtype, in_blocks)
            in_cuda = partial(_cuda_permute, block_size=BLOCK if in_blocks else None)
            peers: dict[str, Prepare] = {"index_select": _index_select, "the kernel in CUDA": in_cuda}
            peers["a product with a permutation matrix"] = _matrix
            bench.compare(f"permute, {rows} rows", case, peers, copies=True)


def _index_select(inputs: Arguments) -> Callable[[], Tensor]:
    x, wide = inputs[0], inputs[1].int()
    return lambda: x.index_select(1, wide)


def _cuda_permute(inputs: Arguments, block_size: int | None) -> Callable[[], Tensor]:
    from benchmarks.gpu.permute_cuda import permute_cuda

    x, index = inputs[0], inputs[1].int()
    return lambda: permute_cuda(x, index, block_size)


def _matrix(inputs: Arguments) -> Callable[[], Tensor]:
    """The paper's own code in PyTorch multiplies by the matrix, as one dense product."""
    x, index = inputs
    matrix = torch.zeros(len(index), len(index), dtype=x.dtype, device=x.device)
    matrix[index.long(), torch.arange(len(index), device=x.device)] = 1
    return lambda: x @ matrix


def norm(bench: Bench) -> None:
    """RMSNorm with the permutation against RMSNorm alone, ours and torch's, and against torch's with index_select."""
    for rows, channels in bench.pick([(16384, 4096), (2048, 4096)], [(8, 256)]):
        case = norm_permute_case(rows, channels, bench.dtype)
        alone: dict[str, Prepare] = {
            "our RMSNorm alone": lambda inputs: partial(rms_norm_alone, inputs[0], inputs[1], 1e-5),
            "torch's RMSNorm alone": lambda inputs: partial(_torch_norm, inputs),
        }
        peers = {**alone, "torch's RMSNorm and index_select": _norm_and_select}
        bench.compare(f"RMSNorm + permute, {rows} rows", case, peers, unlike=alone, copies=True)
        x, weight = case.make(bench.device)[:2]
        wrong = relative_error(rms_norm_alone(x, weight, 1e-5), rms_norm(x, weight.shape, weight, 1e-5))
        bench.find(f"our RMSNorm alone, {rows} rows", f"{wrong:.2g} from torch's", wrong < 2e-2)


def _torch_norm(inputs: Arguments) -> Tensor:
    return rms_norm(inputs[0], inputs[1].shape, inputs[1], 1e-5)


def _norm_and_select(inputs: Arguments) -> Callable[[], Tensor]:
    wide = inputs[3].int()
    return lambda: _torch_norm(inputs).index_select(1, wide)


@jit
def _rms_norm_kernel(x_ptr, weight_ptr, y_ptr, rows, C, eps, BLOCK_C: tl.constexpr):
    channel = tl.arange(0, BLOCK_C)
    inside = channel < C
    scale = tl.load(weight_ptr + channel, mask=inside, other=0.0)
    for row in tl.range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0), num_stages=3):
        here = row * C + channel
        values = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(values * values, 0) / C + eps)
        hidden = (values * root).to(scale.dtype).to(tl.float32)  # rounded, as the modules do
        tl.store(y_ptr + here, (hidden * scale.to(tl.float32)).to(scale.dtype), mask=inside)


def rms_norm_alone(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the norm of contiguous rows ``[rows, C]``, by a kernel written like permtriton's; torch's on a CPU.

    It shows what the permutation costs: permtriton's with the identity would still gather.
    """
    if (processors := multiprocessors(x.device)) is None:
        return rms_norm(x, weight.shape, weight, eps)
    y = torch.empty_like(x)
    rows, channels = x.shape
    programs = min(rows, 4 * processors)
    block = triton.next_power_of_2(channels)
    _rms_norm_kernel[(programs,)](x, weight, y, rows, channels, eps, BLOCK_C=block, num_warps=8)
    return y


def relaxations(bench: Bench) -> None:
    """The relaxation of one step's permutations, forward and backward."""
    for name, make in (("forward", sinkhorn_case), ("backward", sinkhorn_backward_case)):
        case = make(*bench.pick((BLOCKS_7B, 64), (4, 16)))
        bench.compare(f"sinkhorn {name}", case, {}, copies=True)


def sinkhorn(bench: Bench) -> None:
    """The relaxation of one step's permutations, both passes, against torch, eager and compiled.

    The peers' backward pass is the analytic one of the reference, a stronger peer than autograd's.
    """
    blocks, size = bench.pick((BLOCKS_7B, 64), (4, 16))
    forward, backward = (make(blocks, size) for make in (sinkhorn_case, sinkhorn_backward_case))

    def both(grad: Tensor, logits: Tensor) -> Tensor:
        _, rows, columns = torch.ops.permtriton.sinkhorn(logits, 0.5, 5)
        return torch.ops.permtriton.sinkhorn_backward(grad, logits, rows, columns, 0.5)

    joined = Case(
        "sinkhorn both", forward.shape, forward.dtype, lambda random: backward.inputs(random)[:2], both,
        lambda grad, logits: _both_eager(grad.double(), logits.double()), backward.limit,
        forward.bytes + backward.bytes,
    )  # fmt: skip
    bench.compare("sinkhorn both", joined, eager_and_compiled(bench, _both_eager))


def _both_eager(grad: Tensor, logits: Tensor) -> Tensor:
    _, rows, columns = sinkhorn_reference(logits, 0.5, 5)
    return sinkhorn_backward_reference(grad, logits, rows, columns, 0.5)


def eager_and_compiled(bench: Bench, function: Callable[..., Any]) -> dict[str, Prepare]:
    """Returns a function as peers: as it is, and compiled."""
    compiled: Any = function if bench.tiny else torch.compile(function, dynamic=False)
    return {"eager torch": lambda inputs: partial(function, *inputs),
            "torch.compile": lambda inputs: partial(compiled, *inputs)}  # fmt: skip


def assignment(bench: Bench, scipy: bool = True) -> None:
    """One step's hard permutations, against scipy on the host, without copies, and torch-linear-assignment."""
    case = assignment_case(*bench.pick((BLOCKS_7B, 64), (4, 16)))
    figures: dict[str, Callable[[float], float]] = {"milliseconds": lambda s: s * 1e3}
    if not scipy:
        bench.compare("assignment, ours alone", case, {}, figures=figures)
        return
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        peers: dict[str, Prepare] = {
            "scipy in one thread": lambda inputs: partial(_solve, inputs[0].cpu().double().numpy()),
            f"scipy in {threads} threads": partial(_threaded, pool=pool, threads=threads),
            "torch-linear-assignment": _linear_assignment,
        }
        on_host = [name for name in peers if name.startswith("scipy")]  # totals equal theirs: the case checks that
        bench.compare("assignment", case, peers, unlike=on_host, streamed=peers, figures=figures)


def _solve(scores: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    for block in scores:
        linear_sum_assignment(block, maximize=True)


def _threaded(inputs: Arguments, pool: ThreadPoolExecutor, threads: int) -> Callable[[], None]:
    parts = np.array_split(inputs[0].cpu().double().numpy(), threads)

    def run() -> None:
        list(pool.map(_solve, parts))

    return run


def _linear_assignment(inputs: Arguments) -> Callable[[], tuple[Tensor, Tensor]]:
    """Minimises, and returns the column of each row: sorting those into an index is timed, too."""
    from torch_linear_assignment import batch_linear_assignment

    score, cost = inputs[0], -inputs[0]
    return lambda: (score, batch_linear_assignment(cost).argsort(1))


def masks(bench: Bench) -> None:
    """The masked weight of the largest linear, and unpacking it."""
    rows, channels = bench.pick((11008, 4096), (96, 128))
    peers: dict[str, Prepare] = {"eager torch": lambda inputs: partial(nm_mask_reference, *inputs)}
    bench.compare("nm_mask", nm_mask_case(rows, channels, bench.dtype), peers, copies=True)
    bench.compare("unpack", unpack_case(rows, channels, bench.dtype), {}, copies=True)


def placement_gradients(bench: Bench) -> None:
    """The gradient of the block permutations of the largest linear, with its terms."""
    case = placement_gradient_case(*bench.pick((11008, 4096), (96, 128)), bench.dtype)
    peers: dict[str, Prepare] = {"eager torch": lambda inputs: partial(placement_gradient_reference, *inputs)}
    figures: dict[str, Callable[[float], float]] = {PAIRS: lambda s: case.flops / 3e12 / s}
    bench.compare("placement_gradient", case, peers, figures=figures)


def swaps(bench: Bench) -> None:
    """The gains of swaps between 1024 positions and all; nothing else computes them, so there is no peer."""
    case = swap_gains_case(*bench.pick((11008, 4096), (24, 32)))
    figures: dict[str, Callable[[float], float]] = {PAIRS: lambda s: case.flops / 6e12 / s}
    bench.compare("swap_gains", case, {}, figures=figures)


def distance(bench: Bench) -> None:
    """The heuristic order's distances between columns, against `torch.cdist`."""
    case = distances_case(*bench.pick((11008, 64), (24, 1)))
    peers: dict[str, Prepare] = {"torch.cdist": lambda inputs: partial(distances_reference, *inputs)}
    figures: dict[str, Callable[[float], float]] = {PAIRS: lambda s: case.flops / 3e12 / s}
    bench.compare("distances", case, peers, figures=figures)


def sparsegpt_blocks(bench: Bench) -> None:
    """SparseGPT's pass over a block of channels of the largest linear, against plain torch."""
    case = sparsegpt_block_case(bench.pick(11008, 24))
    peers: dict[str, Prepare] = {"eager torch": lambda inputs: partial(sparsegpt_block_reference, *inputs)}
    bench.compare("sparsegpt_block", case, peers, streamed=peers, copies=True)
