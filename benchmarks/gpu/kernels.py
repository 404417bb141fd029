"""The rows of single kernels: permute, norm, sinkhorn, assignment, masks."""

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import rms_norm

from benchmarks.gpu.bench import COPY, OURS, Bench, Goal, Prepare, ratio
from benchmarks.gpu.norm_alone import rms_norm_alone
from permtriton.kernels import cases
from permtriton.kernels.assignment import assignment_reference
from permtriton.kernels.cases import Case, Inputs
from permtriton.kernels.nm_mask import nm_mask_backward_reference, nm_mask_reference
from permtriton.kernels.sinkhorn import sinkhorn_backward_reference, sinkhorn_reference
from permtriton.kernels.timing import Timing, measure

BLOCKS_7B = 32 * (3 * 4096 + 11008) // 64  # of one step on LLaMA-2-7B shapes: q/k/v, o, gate/up and down, 32 layers


def permute(bench: Bench) -> None:
    """The gather against a copy of the same bytes, index_select and the CUDA kernel."""
    for rows, channels in bench.pick([(16384, 11008), (2048, 4096)], [(8, 256)]):
        for in_blocks in (True, False):
            case = cases.permute_case(
                rows, channels, bench.pick(torch.bfloat16, torch.float32), bench.device, in_blocks
            )
            peers = {
                COPY: bench.copy_peer(case),
                "index_select": _index_select,
                "CUDA kernel": partial(_cuda_permute, block_size=cases.BLOCK if in_blocks else None),
            }
            large = rows * channels > 1 << 26

            def goals(times: Mapping[str, Timing], large: bool = large) -> list[Goal]:
                return [
                    Goal("of copy bandwidth", ratio(times, COPY), 0.95 if large else None),
                    Goal("times faster than index_select", ratio(times, "index_select")),
                    Goal("times faster than the CUDA kernel", ratio(times, "CUDA kernel"), 0.95, 1.05),
                ]

            bench.compare("permute", case, peers, goals)


def norm(bench: Bench) -> None:
    """RMSNorm with the permutation against the norm alone, ours and torch's."""
    for rows, channels in bench.pick([(16384, 4096), (2048, 4096)], [(8, 256)]):
        case = cases.norm_permute_case(rows, channels, bench.pick(torch.bfloat16, torch.float32), bench.device)
        peers: dict[str, Prepare] = {
            "our RMSNorm alone": _norm_alone,
            "torch RMSNorm": lambda inputs: lambda: rms_norm(inputs[0], inputs[1].shape, inputs[1], 1e-5),
            "torch RMSNorm, index_select": _torch_norm_and_select,
            COPY: bench.copy_peer(case),
        }
        bench.compare("RMSNorm + permute", case, peers, lambda times: [
            Goal("times the norm alone", 1 / ratio(times, "our RMSNorm alone"), most=1.03),
            Goal("times torch's RMSNorm alone", 1 / ratio(times, "torch RMSNorm")),
            Goal("of copy bandwidth", ratio(times, COPY)),
        ])  # fmt: skip


def sinkhorn(bench: Bench) -> None:
    """The relaxation of all permutations of a step, forward, and forward with backward."""
    blocks, size = bench.pick((BLOCKS_7B, 64), (4, 16))
    forward = cases.sinkhorn_case(blocks, size, bench.device)
    bench.compare("sinkhorn forward", forward, {
        COPY: bench.copy_peer(forward),
        "eager": lambda inputs: lambda: forward_eager(*inputs),
        "torch.compile": _compiled(bench, forward_eager),
    }, lambda times: [
        Goal("of copy bandwidth", ratio(times, COPY), 0.8),
        Goal("times faster than eager", ratio(times, "eager")),
        Goal("times faster than torch.compile", ratio(times, "torch.compile")),
    ])  # fmt: skip
    backward = cases.sinkhorn_backward_case(blocks, size, bench.device)
    bench.compare("sinkhorn backward", backward, {COPY: bench.copy_peer(backward)}, lambda times: [
        Goal("of copy bandwidth", ratio(times, COPY)),
    ])  # fmt: skip
    both = _forward_and_backward(forward, backward)
    bench.compare("sinkhorn forward + backward", both, {
        "eager": lambda inputs: lambda: both_eager(*inputs),
        "torch.compile": _compiled(bench, both_eager),
    }, lambda times: [
        Goal("times faster than eager", ratio(times, "eager"), 20.0),
        Goal("times faster than torch.compile", ratio(times, "torch.compile"), 5.0),
    ], note="the peers' backward pass is the analytic one of the reference, faster than autograd's")  # fmt: skip


def forward_eager(logits: Tensor) -> Tensor:
    """The peers' forward pass."""
    return sinkhorn_reference(logits, 0.5, 5)[0]


def both_eager(grad: Tensor, logits: Tensor) -> Tensor:
    """The peers' forward and backward pass."""
    _, rows, columns = sinkhorn_reference(logits, 0.5, 5)
    return sinkhorn_backward_reference(grad, logits, rows, columns, 0.5)


def assignment(bench: Bench) -> None:
    """Hard permutations of a step against scipy on the host, the copy to the host not counted."""
    blocks, size = bench.pick((BLOCKS_7B, 64), (4, 16))
    case = cases.assignment_case(blocks, size, bench.device)
    wrong = case.check()
    if wrong is not None:
        raise AssertionError(f"a block's total is not scipy's: {wrong}")
    inputs = [case.make(seed) for seed in range(bench.pick(3, 1))]
    times = measure({OURS: [lambda one=one: case.run(*one) for one in inputs]}, bench.device, 3.0)  # type: ignore[misc]
    host = inputs[0][0].cpu()
    times["scipy serial"] = _host_timing(lambda: _scipy_serial(host), bench.pick(3, 1))
    times["scipy threaded"] = _host_timing(lambda: assignment_reference(host), bench.pick(3, 1))
    goals = [
        Goal("milliseconds", times[OURS].quantile(0.5) * 1e3, most=5.0),
        Goal("times faster than serial scipy", ratio(times, "scipy serial"), 200.0),
        Goal("times faster than threaded scipy", ratio(times, "scipy threaded")),
    ]
    note = "totals equal on every block; torch-linear-assignment is not part of this command"
    floor = bench.floor(case) * 1e6
    bench.add("assignment", case.name, times, goals, note=note, bytes=case.bytes, floor_us=floor)


def masks(bench: Bench) -> None:
    """The masked weight of the largest linear and the gradient of its permutation."""
    rows, channels = bench.pick((11008, 4096), (96, 128))
    dtype = bench.pick(torch.bfloat16, torch.float32)
    forward = cases.nm_mask_case(rows, channels, dtype, bench.device)
    bench.compare("nm_mask forward", forward, {
        COPY: bench.copy_peer(forward),
        "eager": lambda inputs: lambda: nm_mask_reference(
            inputs[0], inputs[1], None, None, 1, inputs[2], inputs[3], 2, 4
        ),
    }, lambda times: _mask_goals(times, 0.8))  # fmt: skip
    backward = cases.nm_mask_backward_case(rows, channels, dtype, bench.device)
    bench.compare("nm_mask backward", backward, {
        COPY: bench.copy_peer(backward),
        "eager": lambda inputs: lambda: nm_mask_backward_reference(
            inputs[4], inputs[0], inputs[1], None, None, 1, inputs[2], inputs[3], 4, True
        ),
    }, lambda times: _mask_goals(times, 0.5))  # fmt: skip


def _mask_goals(times: Mapping[str, Timing], least: float) -> list[Goal]:
    return [
        Goal("of copy bandwidth", ratio(times, COPY), least),
        Goal("times faster than eager", ratio(times, "eager")),
    ]


def _forward_and_backward(forward: Case, backward: Case) -> Case:
    """Both passes as one case; the backward pass takes the scales that the forward pass has just written."""

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


def _scipy_serial(host: Tensor) -> None:
    for block in host.double().numpy():
        linear_sum_assignment(block, maximize=True)


def _host_timing(run: Callable[[], object], repeats: int) -> Timing:
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        samples.append(time.perf_counter() - started)
    return Timing(tuple(samples), "host")
