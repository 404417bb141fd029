"""Small Triton kernels for the tests of the ahead-of-time compiler.

One fits, one spills and fails at odd sizes, one needs tensor memory.
"""

from permtriton.kernels.launch import Build, Config, jit, tl


@jit
def _copy(source, target, rows, stride, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = row * stride + tl.arange(0, SIZE)
    tl.store(target + places, tl.load(source + places, mask=row < rows), mask=row < rows)


@jit
def _hold(source, target, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    values = tl.load(source + places)
    tl.store(target + places, values * tl.sum(values, 0))


@jit
def _multiply(left, right, target, SIZE: tl.constexpr):
    i, k = tl.arange(0, SIZE), tl.arange(0, 16)
    product = tl.dot(tl.load(left + i[:, None] * 16 + k[None, :]), tl.load(right + k[:, None] * SIZE + i[None, :]))
    tl.store(target + i[:, None] * SIZE + i[None, :], product)


def copy_build(default: bool = True) -> Build:
    """One that is fine."""
    signature = {"source": "*bf16", "target": "*bf16", "rows": "i32", "stride": "i64", "SIZE": "constexpr"}
    return Build("copy", _copy, signature, {"SIZE": 1024}, Config({"SIZE": 1024}, 4), default)


def hold_build(size: int, default: bool = True) -> Build:
    """One whose only warp keeps ``size`` numbers in registers."""
    signature = {"source": "*fp32", "target": "*fp32", "SIZE": "constexpr"}
    return Build(f"hold {size}", _hold, signature, {"SIZE": size}, Config({"SIZE": size}, 1), default)


def multiply_build() -> Build:
    """One that multiplies ``[128, 16]`` by ``[16, 128]`` on tensor cores."""
    signature = {"left": "*bf16", "right": "*bf16", "target": "*fp32", "SIZE": "constexpr"}
    return Build("multiply", _multiply, signature, {"SIZE": 128}, Config({"SIZE": 128}, 4), True)
