"""What the Triton kernels share: Triton itself, where it can be installed, and how they are launched."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # there is no Triton for macOS; the references run without it
    triton = tl = None


DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # dtypes that most kernels support


def jit(function: Callable[..., Any]) -> Any:
    """Returns the function compiled by Triton; without Triton, the function itself, which is then never called."""
    return triton.jit(function) if triton is not None else function


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels run on a device: NVIDIA GPUs of compute capability 8.0 or newer, if Triton is installed."""
    if triton is None or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def number_of(gpu: torch.device) -> int:
    return torch.cuda.current_device() if gpu.index is None else gpu.index


@cache
def warn_once(words: str) -> None:
    warnings.warn(words, UserWarning, stacklevel=3)


@dataclass(frozen=True)
class Config:
    """One way to launch a kernel."""

    # ``tl.constexpr`` arguments that may be tuned, such as tile sizes
    constants: Mapping[str, int] = field(default_factory=dict, hash=False)
    num_warps: int = 4  # warps per program
    num_stages: int = 2  # software pipeline depth of the kernel's loops

    def arguments(self) -> dict[str, int]:
        return {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}


def multiprocessors(device: torch.device) -> int | None:
    """Returns how many multiprocessors a GPU has; None for the CPU, where kernels are interpreted."""
    return None if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
