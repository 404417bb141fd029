"""Compiles and launches the CUDA sources of this folder with NVRTC, which comes with torch: users need no nvcc.

A source includes no headers, and its kernels take pointers, then 32-bit integers.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from permtriton.errors import PermTritonError
from permtriton.kernels.launch import CudaLaunch, record

FOLDER = Path(__file__).parent
OPTIONS = ("--std=c++17",)
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class CudaKernel:
    """A kernel of a source in this folder, as it is launched.

    Attributes:
        source: Name of the file: ``sparse_linear_mma.cu``.
        function: Name of the kernel in it.
        threads: Threads per block.
        shared_bytes: Bytes of dynamic shared memory per block.
        constants: Name and value of each template argument, in order; none if the kernel is no template.
    """

    source: str
    function: str
    threads: int
    shared_bytes: int = 0
    constants: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """The kernel with its template arguments: ``sparse_linear_mma<1, 256, 16>``."""
        values = ", ".join(str(value) for _, value in self.constants)
        return f"{self.function}<{values}>" if self.constants else self.function

    def __call__(self, grid: tuple[int, int, int], *tensors: Tensor, **numbers: int) -> None:
        """Launches the kernel on the current GPU and stream; compiles it first, once per process and GPU.

        Where launches are recorded, it is recorded instead (`permtriton.kernels.launch.recorded`).

        Args:
            grid: Blocks in each direction.
            tensors: The kernel's pointers, in its order: contiguous tensors on the current GPU.
            numbers: Its 32-bit integers, which come after the pointers, in its order.

        Raises:
            PermTritonError: no NVIDIA GPU, or the kernel could not be compiled, loaded or launched.
        """
        known = {**dict(self.constants), **numbers}
        if record(CudaLaunch(FOLDER / self.source, self.name, self.threads, self.shared_bytes, grid, known, OPTIONS)):
            return
        launch = compiled(self, torch.cuda.current_device() if torch.cuda.is_available() else -1)
        given = [*tensors, *numbers.values()]
        try:
            launch(grid=grid, block=(self.threads, 1, 1), args=given, shared_mem=self.shared_bytes)
        except (RuntimeError, ValueError, TypeError) as error:
            raise PermTritonError(f"{self.source}: {self.name} could not be launched on {grid}: {error}") from error


@functools.cache
def compiled(kernel: CudaKernel, device: int) -> Any:
    """Returns the kernel as torch's launcher, compiled for the current GPU; ``device``, its number, is a key only.

    Raises:
        PermTritonError: see `CudaKernel.__call__`.
    """
    if device < 0 or torch.version.cuda is None:
        raise PermTritonError(f"{kernel.source}: it runs on an NVIDIA GPU, and torch sees none on this machine")
    source = (FOLDER / kernel.source).read_text(encoding="utf-8")
    try:
        from torch.utils import cpp_extension  # which needs setuptools

        # torch adds the CUDA toolkit's headers to the search path and raises an error where there is no toolkit.
        with _ONE_AT_A_TIME, mock.patch.object(cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME or str(FOLDER)):
            launch = torch.cuda._compile_kernel(source, kernel.name, nvcc_options=list(OPTIONS))
        launch.set_shared_memory_config(kernel.shared_bytes)
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError) as error:
        raise PermTritonError(
            f"{kernel.source}: {kernel.name} could not be compiled with torch {torch.__version__}: {error}"
        ) from error
    return launch
