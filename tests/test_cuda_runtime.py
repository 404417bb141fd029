"""Compiling CUDA sources at run time: what torch is asked for, and what a user reads where it fails."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch.utils import cpp_extension

from permtriton.errors import PermTritonError
from permtriton.kernels import launch
from permtriton.kernels.cuda import runtime
from permtriton.kernels.cuda.runtime import CudaKernel, compiled

KERNEL = CudaKernel("sparse_linear_mma.cu", "scale", 256, 100 << 10, (("BF16", 1), ("ROWS", 64)))


class Torch:
    """Stands in for torch's compiler and for the kernel that it returns."""

    def __init__(self, monkeypatch) -> None:
        self.compiled, self.launched, self.error = [], [], None
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "_compile_kernel", self.compile)
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
        compiled.cache_clear()

    def compile(self, source, name, nvcc_options):
        assert "__global__" in source
        cpp_extension.include_paths("cuda")  # torch does so, and refuses where there is no toolkit
        if self.error is not None:
            raise self.error
        self.compiled.append((name, nvcc_options))
        return self

    def set_shared_memory_config(self, count):
        self.compiled.append(count)

    def __call__(self, **launch):
        if self.error is not None:
            raise self.error
        self.launched.append(launch)


def test_compiles_once_without_a_toolkit_and_launches(monkeypatch):
    fake, tensor = Torch(monkeypatch), torch.ones(2)
    for _ in range(2):
        KERNEL((2, 3, 1), tensor, count=7, rest=5)
    assert fake.compiled == [(KERNEL.name, list(runtime.OPTIONS)), 100 << 10]
    asked = {"grid": (2, 3, 1), "block": (256, 1, 1), "args": [tensor, 7, 5], "shared_mem": 100 << 10}
    assert fake.launched == [asked] * 2
    assert cpp_extension.CUDA_HOME is None
    compiled.cache_clear()


def test_two_threads_leave_torch_as_it_was(monkeypatch):
    """Compiling replaces a variable of torch's for a moment; the second to begin must not keep what the first set."""
    fake, both = Torch(monkeypatch), threading.Barrier(2)

    def compile_together(*arguments, **named):
        with suppress(threading.BrokenBarrierError):
            both.wait(0.1)
        return fake.compile(*arguments, **named)

    monkeypatch.setattr(torch.cuda, "_compile_kernel", compile_together)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda device: compiled(KERNEL, device), (0, 1)))
    assert cpp_extension.CUDA_HOME is None
    assert both.broken
    compiled.cache_clear()


def test_a_failure_names_the_kernel(monkeypatch):
    fake = Torch(monkeypatch)
    fake.error = RuntimeError("no such instruction")
    with pytest.raises(PermTritonError, match=r"scale<1, 64> could not be compiled with torch.*no such"):
        KERNEL((1, 1, 1))
    fake.error = None
    compiled(KERNEL, 1)
    fake.error = RuntimeError("too many blocks")
    with pytest.raises(PermTritonError, match=r"could not be launched on \(1, 1, 1\): too many blocks"):
        KERNEL((1, 1, 1))
    compiled.cache_clear()


def test_without_setuptools_which_torch_needs_it_says_so(monkeypatch):
    Torch(monkeypatch)
    monkeypatch.delattr(torch.utils, "cpp_extension")
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)
    with pytest.raises(PermTritonError, match=r"scale<1, 64> could not be compiled with torch.*cpp_extension"):
        KERNEL((1, 1, 1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so():
    with pytest.raises(PermTritonError, match="NVIDIA GPU"):
        KERNEL((1, 1, 1))


def test_launches_are_recorded():
    with launch.recorded() as launches:
        KERNEL((2, 3, 1), torch.ones(2), count=7)
    numbers = {"BF16": 1, "ROWS": 64, "count": 7}
    source = runtime.FOLDER / KERNEL.source
    assert launches == [launch.CudaLaunch(source, "scale<1, 64>", 256, 100 << 10, (2, 3, 1), numbers, runtime.OPTIONS)]
