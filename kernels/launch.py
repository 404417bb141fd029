"""What the Triton kernels share: Triton itself, where it can be installed, and the description of a launch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS has none: the references run everywhere
    triton = tl = None


def jit(function: Callable[..., Any]) -> Any:
    """Returns a Triton kernel; the function itself, never called, where there is no Triton."""
    return triton.jit(function) if triton is not None else function


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
