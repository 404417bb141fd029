"""Launches of kernels, recorded instead of run: what is compiled ahead of time, and whose instructions are counted."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from permtriton.kernels.cuda.runtime import CudaKernel
from permtriton.kernels.launch import triton


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
        compile: Compiles it for the GPU that Triton sees, as the launch itself would, and launches nothing.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int]
    grid: tuple[int, ...]
    numbers: Mapping[str, int]
    compile: Callable[[], object]

    @property
    def key(self) -> tuple[Any, ...]:
        """Returns a key: launches with equal keys compile to the same code."""
        parts = (self.signature, self.constants, self.options)
        return self.kernel, *(tuple(part.items()) for part in parts)


@dataclass(frozen=True)
class CudaLaunch:
    """One launch of a CUDA kernel.

    Attributes:
        kernel: The kernel.
        grid: Blocks in each direction.
        numbers: Its template arguments and integers, by name.
    """

    kernel: CudaKernel
    grid: tuple[int, ...]
    numbers: Mapping[str, int]


@contextmanager
def recorded(multiprocessors: int = 132) -> Iterator[list[Any]]:
    """Records launches instead of running them: no output is written, and tensors may be on the meta device.

    Yields the list that each `Launch` or `CudaLaunch` is appended to.

    Args:
        multiprocessors: Of the GPU that the meta device counts as.
    """
    launches: list[Any] = []
    run = triton.runtime.JITFunction.run

    def by_triton(kernel: Any, *arguments: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> None:
        launch = partial(run, kernel, *arguments, grid=grid, warmup=True, **named)
        launches.append(_launch(kernel, grid, arguments, named, launch))

    def in_cuda(kernel: CudaKernel, grid: tuple[int, ...], *tensors: torch.Tensor, **numbers: int) -> None:
        launches.append(CudaLaunch(kernel, grid, {**dict(kernel.constants), **numbers}))

    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    with (
        patch.object(triton.runtime.JITFunction, "run", by_triton),
        patch.object(CudaKernel, "__call__", in_cuda),
        patch.object(torch.cuda, "get_device_properties", lambda device: properties),
    ):
        yield launches


def _launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], named: Mapping[str, Any], run: Callable[[], object]
) -> Launch:
    """Returns the launch as Triton would specialise it: integers that are 1, and None, are constants."""
    from triton.runtime.jit import mangle_type

    parameters = {parameter.name: parameter for parameter in kernel.params}
    values = dict(zip(parameters, arguments, strict=False))
    values |= {name: value for name, value in named.items() if name in parameters}
    signature = {
        name: "constexpr" if parameter.is_constexpr else mangle_type(values[name], specialize=True)
        for name, parameter in parameters.items()
    }
    constants = {name: values[name] for name, kind in signature.items() if kind == "constexpr"}
    options = {name: value for name, value in named.items() if name not in parameters}
    numbers = {name: values[name] for name, kind in signature.items() if kind.startswith(("i", "u"))}
    return Launch(kernel, signature, constants, options, grid, numbers, run)
