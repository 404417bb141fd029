"""Small Triton kernels for the tests of the ahead-of-time compiler.

One fits, one spills and fails at odd sizes, one needs tensor memory.
"""

from typing import Any

import torch

from benchmarks.gpu.builds import Build
from benchmarks.gpu.floors import Floor
from benchmarks.gpu.recording import recorded
from permtriton.kernels.launch import jit, tl
from permtriton.kernels.tools.case import Case


@jit
def _copy(source_ptr, target_ptr, rows, row_stride, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = row * row_stride + tl.arange(0, SIZE)
    tl.store(target_ptr + places, tl.load(source_ptr + places, mask=row < rows), mask=row < rows)


@jit
def _hold(source_ptr, target_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    values = tl.load(source_ptr + places)
    tl.store(target_ptr + places, values * tl.sum(values, 0))


@jit
def _multiply(left_ptr, right_ptr, target_ptr, SIZE: tl.constexpr):
    i, k = tl.arange(0, SIZE), tl.arange(0, 16)
    product = tl.dot(
        tl.load(left_ptr + i[:, None] * 16 + k[None, :]), tl.load(right_ptr + k[:, None] * SIZE + i[None, :])
    )
    tl.store(target_ptr + i[:, None] * SIZE + i[None, :], product)


def copy_build(default: bool = True) -> Build:
    """A build that passes every check."""
    source = torch.empty(8, dtype=torch.bfloat16)
    return _build("copy", default, _copy, source, source, 8, 1 << 40, SIZE=1024, num_warps=4)


def copy_floor() -> Floor:
    """A call of 64 programs, each of which copies 2 KiB."""
    case = Case("copy", "64x1024", torch.bfloat16, lambda random: (), None, None, 0, 64 * 2048 * 2)

    def call() -> None:
        source = torch.empty(64, 1024, dtype=torch.bfloat16)
        _copy[(64,)](source, source, 64, 1024, SIZE=1024, num_warps=4)

    return Floor(case, call, 64 * 1024, "element", lambda launch: ())


def hold_build(size: int, default: bool = True) -> Build:
    """A build whose only warp keeps ``size`` numbers in registers."""
    source = torch.empty(8)
    return _build(f"hold {size}", default, _hold, source, source, SIZE=size, num_warps=1)


def multiply_build() -> Build:
    """A build that multiplies ``[128, 16]`` by ``[16, 128]`` on tensor cores."""
    left = torch.empty(8, dtype=torch.bfloat16)
    return _build("multiply", True, _multiply, left, left, left.float(), SIZE=128, num_warps=4)


def _build(name: str, default: bool, kernel: Any, *arguments: Any, **options: int) -> Build:
    with recorded() as launches:
        kernel[(1,)](*arguments, **options)
    return Build(name, launches[0], default)
