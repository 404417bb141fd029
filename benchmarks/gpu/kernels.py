"""The rows of single kernels: permute, norm, sinkhorn, assignment, masks, swaps."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import rms_norm

from benchmarks.gpu.bench import Bench, Prepare, brief, of_copy, ratio
from benchmarks.gpu.goals import Goal, goal
from benchmarks.gpu.norm_alone import rms_norm_alone
from benchmarks.gpu.table import OURS
from permtriton.kernels.assignment import assignment_reference
from permtriton.kernels.nm_mask import nm_mask_backward_reference, nm_mask_reference
from permtriton.kernels.sinkhorn import sinkhorn_backward_reference, sinkhorn_reference
from permtriton.kernels.tools.case import BLOCK, Case, Inputs
from permtriton.kernels.tools.cases.assignment import assignment_case
from permtriton.kernels.tools.cases.nm_mask import nm_mask_backward_case, nm_mask_case
from permtriton.kernels.tools.cases.norm_permute import norm_permute_case
from permtriton.kernels.tools.cases.permute import permute_case
from permtriton.kernels.tools.cases.sinkhorn import sinkhorn_backward_case, sinkhorn_case
from permtriton.kernels.tools.cases.swap_gains import swap_gains_case
from permtriton.kernels.tools.timing import Timing, measure, relative_error, sets_of_inputs
from permtriton.sparsity import NMPattern

LINEAR_ASSIGNMENT = "torch-linear-assignment"
BLOCKS_7B = 32 * (3 * 4096 + 11008) // 64  # of one step on LLaMA-2-7B shapes: q/k/v, o, gate/up and down, 32 layers


def permute(bench: Bench) -> None:
    """The gather against a copy of the same bytes, index_select and the CUDA kernel."""
    for rows, channels in bench.pick([(16384, 11008), (2048, 4096)], [(8, 256)]):
        for in_blocks in (True, False):
            case = permute_case(rows, channels, bench.pick(torch.bfloat16, torch.float32), bench.device, in_blocks)
            peers = {
                **bench.copies(case),
                "index_select": _index_select,
                "CUDA kernel": partial(_cuda_permute, block_size=BLOCK if in_blocks else None),
            }
            copied = partial(goal, "permute 16384x11008") if rows == 16384 else Goal

            def goals(times: Mapping[str, Timing], copied: Callable[[str, float], Goal] = copied) -> list[Goal]:
                return [
                    copied("of copy bandwidth", of_copy(times)),
                    Goal("times faster than index_select", ratio(times, "index_select")),
                    goal("permute", "times faster than the CUDA kernel", ratio(times, "CUDA kernel")),
                ]

            bench.compare("permute", case, peers, goals, alike=("index_select", "CUDA kernel"))


def norm(bench: Bench) -> None:
    """RMSNorm with the permutation against RMSNorm alone, ours and torch's."""
    for rows, channels in bench.pick([(16384, 4096), (2048, 4096)], [(8, 256)]):
        case = norm_permute_case(rows, channels, bench.pick(torch.bfloat16, torch.float32), bench.device)
        peers: dict[str, Prepare] = {
            "our RMSNorm alone": _norm_alone,
            "torch RMSNorm": lambda inputs: lambda: rms_norm(inputs[0], inputs[1].shape, inputs[1], 1e-5),
            "torch RMSNorm, index_select": _torch_norm_and_select,
            **bench.copies(case),
        }
        bench.compare("RMSNorm + permute", case, peers, lambda times: [
            goal("RMSNorm + permute", "times the norm alone", 1 / ratio(times, "our RMSNorm alone")),
            Goal("times torch's RMSNorm alone", 1 / ratio(times, "torch RMSNorm")),
            Goal("of copy bandwidth", of_copy(times)),
        ], alike=["torch RMSNorm, index_select"])  # fmt: skip


def sinkhorn(bench: Bench) -> None:
    """The relaxation of one step's permutations: forward, backward, and both."""
    blocks, size = bench.pick((BLOCKS_7B, 64), (4, 16))
    forward = sinkhorn_case(blocks, size, bench.device)
    bench.compare("sinkhorn forward", forward, {
        **bench.copies(forward),
        "eager": lambda inputs: lambda: forward_eager(*inputs),
        "torch.compile": _compiled(bench, forward_eager),
    }, lambda times: [
        goal("sinkhorn forward", "of copy bandwidth", of_copy(times)),
        Goal("times faster than eager", ratio(times, "eager")),
        Goal("times faster than torch.compile", ratio(times, "torch.compile")),
    ], alike=("eager", "torch.compile"))  # fmt: skip
    backward = sinkhorn_backward_case(blocks, size, bench.device)
    bench.compare("sinkhorn backward", backward, bench.copies(backward), lambda times: [
        Goal("of copy bandwidth", of_copy(times)),
    ])  # fmt: skip
    both = _forward_and_backward(forward, backward)
    bench.compare("sinkhorn forward + backward", both, {
        "eager": lambda inputs: lambda: both_eager(*inputs),
        "torch.compile": _compiled(bench, both_eager),
    }, lambda times: [
        goal("sinkhorn forward + backward", "times faster than eager", ratio(times, "eager")),
        goal("sinkhorn forward + backward", "times faster than torch.compile", ratio(times, "torch.compile")),
    ], alike=("eager", "torch.compile"),
    note="the peers' backward pass is the analytic one of the reference, faster than autograd's")  # fmt: skip


def forward_eager(logits: Tensor, tau: float, rounds: int) -> Tensor:
    """The peers' forward pass."""
    return sinkhorn_reference(logits, tau, rounds)[0]


def both_eager(grad: Tensor, logits: Tensor) -> Tensor:
    """The peers' forward and backward pass."""
    _, rows, columns = sinkhorn_reference(logits, 0.5, 5)
    return sinkhorn_backward_reference(grad, logits, rows, columns, 0.5)


def assignment(bench: Bench) -> None:
    """One step's hard permutations against scipy on the host (without the copies to it) and torch-linear-assignment."""
    blocks, size = bench.pick((BLOCKS_7B, 64), (4, 16))
    case = assignment_case(blocks, size, bench.device)
    tuned = bench.tuned(case)
    wrong = case.check()
    if wrong is not None:
        raise AssertionError(f"a block's total is not scipy's: {wrong}")
    inputs = [case.make(seed) for seed in range(sets_of_inputs(bench.device, case.bytes))]
    times = measure({OURS: [partial(case.run, *one) for one in inputs]}, bench.device, 2.0)
    absent = {}
    try:
        times[LINEAR_ASSIGNMENT] = _linear_assignment(bench, case, inputs)
    except Exception as error:
        absent[LINEAR_ASSIGNMENT] = brief(error)
    times |= _scipy(inputs[0][0].cpu().double().numpy(), bench.pick(3, 1))
    goals = [
        goal("assignment", "milliseconds", times[OURS].quantile(0.5) * 1e3),
        goal("assignment", "times faster than serial scipy", ratio(times, "scipy serial")),
        Goal("times faster than threaded scipy", ratio(times, "scipy threaded")),
        Goal(f"times faster than {LINEAR_ASSIGNMENT}", ratio(times, LINEAR_ASSIGNMENT)),
    ]
    note = f"totals equal on every block; {LINEAR_ASSIGNMENT} waits for the GPU, so that no graph holds it"
    floor = bench.floor(case) * 1e6
    bench.add("assignment", case.name, times, goals, absent, note=note, bytes=case.bytes, floor_us=floor, **tuned)


def _linear_assignment(bench: Bench, case: Case, inputs: Sequence[Inputs]) -> Timing:
    """Times the package, which minimises and returns the column of each row; a wrong result gets no time."""
    from torch_linear_assignment import batch_linear_assignment

    costs = [-score for (score,) in inputs]
    score = inputs[0][0]
    found = (score, batch_linear_assignment(costs[0]).argsort(1))
    wrong = case.error(found, (score, assignment_reference(score)))
    if not wrong <= case.limit:
        raise AssertionError(f"wrong: a block's total is {wrong:.3g} from scipy's")
    runs = {LINEAR_ASSIGNMENT: [partial(batch_linear_assignment, cost) for cost in costs]}
    return measure(runs, bench.device, 2.0, streamed=runs)[LINEAR_ASSIGNMENT]


def _scipy(scores: np.ndarray[Any, np.dtype[np.float64]], repeats: int) -> dict[str, Timing]:
    """Times scipy in one thread, and in one thread per core."""
    parts = np.array_split(scores, os.cpu_count() or 1)

    def solve(blocks: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        for block in blocks:
            linear_sum_assignment(block, maximize=True)

    with ThreadPoolExecutor(len(parts)) as pool:
        return {
            "scipy serial": _host_timing(lambda: solve(scores), repeats),
            "scipy threaded": _host_timing(lambda: list(pool.map(solve, parts)), repeats),
        }


def masks(bench: Bench) -> None:
    """The masked weight of the largest linear, and the gradient of its permutation."""
    rows, channels = bench.pick((11008, 4096), (96, 128))
    dtype = bench.pick(torch.bfloat16, torch.float32)
    forward = nm_mask_case(rows, channels, dtype, bench.device)
    bench.compare("nm_mask forward", forward, {
        **bench.copies(forward),
        "eager": lambda inputs: lambda: nm_mask_reference(
            *inputs[:4], NMPattern(2, 4)
        ),
    }, lambda times: _mask_goals("nm_mask forward", times), alike=["eager"])  # fmt: skip
    backward = nm_mask_backward_case(rows, channels, dtype, bench.device)
    bench.compare("nm_mask backward", backward, {
        **bench.copies(backward),
        "eager": lambda inputs: lambda: nm_mask_backward_reference(
            inputs[4], *inputs[:4], 4, True
        ),
    }, lambda times: _mask_goals("nm_mask backward", times), alike=["eager"])  # fmt: skip


def _mask_goals(row: str, times: Mapping[str, Timing]) -> list[Goal]:
    return [
        goal(row, "of copy bandwidth", of_copy(times)),
        Goal("times faster than eager", ratio(times, "eager")),
    ]


def swaps(bench: Bench) -> None:
    """The gains of swaps between 1024 positions and all; nothing else computes them, so there is no peer."""
    rows, channels = bench.pick((11008, 4096), (24, 32))
    case = swap_gains_case(rows, channels, bench.device)
    bench.compare("swap_gains", case, {}, lambda times: [
        goal("swap_gains", "1e12 pairs and rows a second", case.flops / 6e12 / times[OURS].quantile(0.5)),
    ])  # fmt: skip


def _forward_and_backward(forward: Case, backward: Case) -> Case:
    """Both passes as one case; the backward pass reads the scales that the forward pass has just written."""

    def run(grad: Tensor, logits: Tensor) -> Tensor:
        _, rows, columns = torch.ops.permtriton.sinkhorn(logits, 0.5, 5)
        return torch.ops.permtriton.sinkhorn_backward(grad, logits, rows, columns, 0.5)

    return Case(
        "sinkhorn forward + backward", forward.shape, forward.dtype, lambda seed: backward.make(seed)[:2], run,
        lambda grad, logits: both_eager(grad.double(), logits.double()), backward.error, backward.limit,
        forward.bytes + backward.bytes,
    )  # fmt: skip


def _compiled(bench: Bench, function: Callable[..., Tensor]) -> Prepare:
    """The function under torch.compile; a rehearsal does not compile."""
    made: Callable[..., Tensor] = function if bench.rehearse else torch.compile(function, dynamic=False)
    return lambda inputs: lambda: made(*inputs)


def _norm_alone(inputs: Inputs) -> Callable[[], object]:
    x, weight, _, _ = inputs
    if not relative_error(rms_norm_alone(x, weight, 1e-5), rms_norm(x, weight.shape, weight, 1e-5)) < 2e-2:
        raise AssertionError("wrong: it is not torch's")
    return lambda: rms_norm_alone(x, weight, 1e-5)


def _torch_norm_and_select(inputs: Inputs) -> Callable[[], object]:
    x, weight, _, index = inputs
    wide = index.int()
    return lambda: rms_norm(x, weight.shape, weight, 1e-5).index_select(1, wide)


def _index_select(inputs: Inputs) -> Callable[[], object]:
    x, wide = inputs[0], inputs[1].int()
    return lambda: x.index_select(1, wide)


def _cuda_permute(inputs: Inputs, block_size: int | None) -> Callable[[], object]:
    from permtriton.kernels.cuda.build import permute_cuda

    x, index = inputs[0], inputs[1].int()
    return lambda: permute_cuda(x, index, block_size)


def _host_timing(run: Callable[[], object], repeats: int) -> Timing:
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        samples.append(time.perf_counter() - started)
    return Timing(tuple(samples), "host")
