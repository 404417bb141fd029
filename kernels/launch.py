"""What the Triton kernels share: Triton itself, where it can be installed, and launches, run or recorded."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS has none: the references run everywhere
    triton = tl = None


DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that most kernels compute


def jit(function: Callable[..., Any]) -> Any:
    """Returns the function as Triton compiles it; itself, never called, where there is no Triton."""
    return triton.jit(function) if triton is not None else function


def builtin(function: Callable[..., Any]) -> Any:
    """Returns a function that runs while a kernel that calls it is compiled: its last argument is ``_semantic``."""
    return tl.core.builtin(function) if triton is not None else function


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: NVIDIA GPUs of compute capability 8.0 or newer, and AMD GPUs."""
    if triton is None or device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True)
class Config:
    """One way to launch a kernel.

    Attributes:
        constants: ``tl.constexpr`` arguments that may be tuned, such as tile sizes.
        num_warps: Warps per program.
        num_stages: Software pipeline depth of the kernel's loops.
    """

    constants: Mapping[str, int] = field(default_factory=dict, hash=False)
    num_warps: int = 4
    num_stages: int = 2

    def arguments(self) -> dict[str, int]:
        """Returns the keyword arguments of a launch."""
        return {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Launch:
    """What Triton compiles for one launch.

    Attributes:
        kernel: The jitted function.
        signature: Argument -> Triton's type (``*bf16``, ``*i64``, ``i32``, ``fp32``) or ``constexpr``, in order.
        constants: Value of every ``constexpr`` argument; those that are 1 or None are among them.
        options: ``num_warps``, and ``num_stages`` if the launch sets it.
        grid: Programs along each axis.
        numbers: Value of every integer argument that is no constant.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int]
    grid: tuple[int, ...]
    numbers: Mapping[str, int]

    @property
    def key(self) -> tuple[Any, ...]:
        """Returns a key: launches with equal keys compile to the same code."""
        parts = (self.signature, self.constants, self.options)
        return self.kernel, *(tuple(part.items()) for part in parts)


@dataclass(frozen=True)
class GpuLimits:
    """What a launch on a GPU depends on; by default, beside their number, that of an H200.

    Attributes:
        multiprocessors: Their number.
        shared_bytes: Shared memory of one multiprocessor.
        block_bytes: Shared memory that one block may have.
        has_clusters: Whether blocks of a cluster read each other's shared memory (sm_90 and newer).
        has_wgmma: Whether four warps multiply matrices in shared memory (sm_90 alone).
    """

    multiprocessors: int
    shared_bytes: int = 228 << 10
    block_bytes: int = 227 << 10
    has_clusters: bool = True
    has_wgmma: bool = False


@dataclass(frozen=True)
class _Recording:
    launches: list[Any]
    gpu: GpuLimits | None


_recording: _Recording | None = None


@contextmanager
def recorded(gpu: GpuLimits | None = None) -> Iterator[list[Any]]:
    """Records launches instead of running them: no output is written, and tensors may be on the meta device.

    Yields the list that each `Launch`, or `permtriton.kernels.cuda.runtime.CudaLaunch`, is appended to.

    Args:
        gpu: What the meta device counts as; None for no GPU.
    """
    global _recording
    before, _recording = _recording, _Recording([], gpu)
    try:
        yield _recording.launches
    finally:
        _recording = before


def record(launch: Any) -> bool:
    """Records a launch that is not Triton's; returns whether launches are recorded, that is, must not run."""
    if _recording is not None:
        _recording.launches.append(launch)
    return _recording is not None


def multiprocessors(device: torch.device) -> int | None:
    """Returns how many multiprocessors a GPU has, a meta device those given to `recorded`, a CPU None."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return None if (limits := recorded_limits(device)) is None else limits.multiprocessors


def recorded_limits(device: torch.device) -> GpuLimits | None:
    """Returns what was given to `recorded`, for a meta device; None for every other one."""
    return _recording.gpu if _recording is not None and device.type == "meta" else None


class Kernel:
    """A Triton kernel that is launched as ``kernel[grid](...)``; functions that kernels call take `jit`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.jitted = jit(function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return self.jitted[grid] if _recording is None else functools.partial(self._record, grid)

    def _record(self, grid: tuple[int, ...], /, *arguments: Any, **named: Any) -> None:
        """Records the launch as Triton would specialise it: integers that are 1, and None, are constants."""
        from triton.runtime.jit import mangle_type

        assert _recording is not None
        parameters = {parameter.name: parameter for parameter in self.jitted.params}
        values = dict(zip(parameters, arguments, strict=False))
        values |= {name: value for name, value in named.items() if name in parameters}
        signature = {
            name: "constexpr" if parameter.is_constexpr else mangle_type(values[name], specialize=True)
            for name, parameter in parameters.items()
        }
        constants = {name: values[name] for name, kind in signature.items() if kind == "constexpr"}
        options = {name: value for name, value in named.items() if name not in parameters}
        numbers = {name: values[name] for name, kind in signature.items() if kind.startswith(("i", "u"))}
        _recording.launches.append(Launch(self.jitted, signature, constants, options, grid, numbers))
