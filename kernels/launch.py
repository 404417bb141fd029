"""What the Triton kernels share: Triton itself, where it can be installed, and the description of a launch."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS has none: the references run everywhere
    triton = tl = None


def jit(function: Callable[..., Any]) -> Any:
    """Returns a Triton kernel; the function itself, never called, where there is no Triton."""
    return triton.jit(function) if triton is not None else function


def on_gpu(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator: the function is what a custom operator runs on a GPU, where there is Triton.

    Triton launches on the current GPU, whatever its arguments are on: that of the first argument, a tensor, is made it.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            with torch.cuda.device(arguments[0].device):
                return function(*arguments)

        if triton is not None:
            op.register_kernel("cuda")(run)
        return run

    return register


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run there: an NVIDIA GPU of compute capability 8.0 or newer, or one of AMD's."""
    if triton is None or device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True)
class Config:
    """One way to launch a kernel.

    Attributes:
        constants: ``tl.constexpr`` arguments that may be tuned, such as tile sizes.
        num_warps: warps in a program.
        num_stages: software pipeline depth of its loops.
    """

    constants: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    def arguments(self) -> dict[str, int]:
        """Returns the keyword arguments of a launch."""
        return {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Build:
    """What compiling one kernel ahead of time needs.

    Attributes:
        name: op, direction and configuration, for people.
        kernel: the jitted function.
        signature: argument -> Triton type (``*bf16``, ``*i64``, ``i32``, ``fp32``), or ``constexpr``, in order.
        constants: value of every ``constexpr`` argument.
        config: warps and stages; its constants are in ``constants`` too.
        default: whether it is the configuration that runs without autotuning.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    config: Config
    default: bool
