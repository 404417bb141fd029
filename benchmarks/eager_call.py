"""What a call of a packed linear costs the host, in microseconds: everything but the GPU, whose driver is a stand-in.

    python -m benchmarks.eager_call

Prints a line of JSON with the medians of a packed call in three parts, each of which holds the one before: choosing the
route and launching it, the operator, and the module; of the module in FP8, beside the launch that quantizes its input;
and of an ``nn.Linear`` whose product is as small as can be.
"""

import argparse
import json
import platform
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

from permtriton.kernels import operator, sparse_linear, sparse_linear_fp8
from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.cuda import runtime
from permtriton.kernels.packing import PATTERN
from permtriton.kernels.quantize import quantize_tokens
from permtriton.model.modules import SparseLinear, SparseLinearFp8
from permtriton.util.machine import device_name, versions

H200 = mma.GpuLimits(132, has_wgmma=True)
CHANNELS = 4096


@contextmanager
def stand_in() -> Iterator[None]:
    """Inside the ``with`` block, tensors on the CPU are on a GPU whose driver answers at once and does nothing."""
    driver = SimpleNamespace(cuCtxSetCurrent=lambda *_: 0, cuLaunchKernelEx=lambda *_: 0)
    loaded = runtime.Loaded(runtime.CudaKernel("", "", 32), None, None, (runtime._Attribute * 0)())
    cuda = {"is_available": True, "current_device": 0, "current_stream": SimpleNamespace(cuda_stream=0),
            "is_current_stream_capturing": False}  # fmt: skip
    with ExitStack() as stack:
        for name, answer in cuda.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", lambda *_, answer=answer: answer))
        stack.enter_context(mock.patch("torch.cuda.device", nullcontext))
        for owner, name, answer in (
            (mma, "limits_of", H200), (mma, "is_trusted", True), (runtime, "_driver", driver),
            (runtime, "compiled", loaded), (operator, "_has_kernels", True), (operator, "_on_gpu", True),
            (sparse_linear_fp8, "_multiplies_float8", True),
            (sparse_linear_fp8, "quantize", quantize_tokens(torch.ones(1, CHANNELS))),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, lambda *_, answer=answer: answer))
        yield


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Returns the median over repeats of ``calls`` calls, after one repeat that does not count, of CPU time."""
    return 1e6 * statistics.median(timeit.repeat(call, number=calls, repeat=12, timer=time.process_time)[1:]) / calls


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--calls", type=int, default=200, help="in each of 12 repeats, of which the first does not count"
    )
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    x = torch.randn(1, CHANNELS, dtype=torch.bfloat16)
    linear, in_fp8 = (kind(CHANNELS, CHANNELS, bias=False, dtype=x.dtype) for kind in (SparseLinear, SparseLinearFp8))
    for module in (linear, in_fp8):
        nn.init.zeros_(module.weight)
        module.pack(PATTERN)
    arguments = (x, linear.weight_values, linear.weight_positions, None, None, CHANNELS, PATTERN, None)
    small = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    with stand_in():
        found = {
            "route and launch": microseconds(lambda: sparse_linear.routed(*arguments), calls),
            "operator": microseconds(lambda: sparse_linear.sparse_linear(*arguments), calls),
            "module": microseconds(lambda: linear(x), calls),
            "module in FP8, but for quantizing": microseconds(lambda: in_fp8(x), calls),
            "nn.Linear": microseconds(lambda: small(x[:, :16]), calls),
        }
    print(json.dumps({"microseconds": {name: round(value, 1) for name, value in found.items()},
                      "device": device_name(torch.device("cpu")), "system": platform.platform(),
                      "versions": versions()}))  # fmt: skip


if __name__ == "__main__":
    main()
