"""Compiling CUDA sources at run time, against a driver and a compiler that note what they are asked for."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from permtriton.errors import PermTritonError
from permtriton.kernels.cuda import runtime
from permtriton.kernels.cuda.runtime import CudaKernel, compiled, machine_code

KERNEL = CudaKernel("sparse_linear_mma.cu", "scale", 256, 100 << 10, (("BF16", 1), ("ROWS", 64)), early=True)
CODE, SYMBOL = b"\x7fELF\0code", b"_Z5scaleILi1ELi64EEv"


class Libraries:
    """Stands in for libcuda and NVRTC: what is asked for, and the error code that a function returns."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.launched: list[dict] = []
        self.errors: dict[str, int] = {}
        self.missing = ""
        self.opened: list[str] = []

    def __call__(self, name: str) -> "Libraries":
        self.opened.append(name)
        if self.missing and name.startswith(self.missing):
            raise OSError(f"{name}: cannot open shared object file")
        return self

    def __getattr__(self, name: str):
        def call(*arguments) -> int:
            self.calls.append(name)
            said = getattr(type(self), f"_{name.lower()}", lambda *_: None)(self, *arguments)
            return said or self.errors.get(name, 0)

        return call

    def _nvrtccompileprogram(self, program, count, options) -> None:
        self.options = [options[i].decode() for i in range(count)]

    def _nvrtcgetloweredname(self, program, name, found) -> None:
        found._obj.value = SYMBOL

    def _nvrtcgetcubinsize(self, program, size) -> None:
        size._obj.value = len(CODE)

    def _nvrtcgetcubin(self, program, to) -> None:
        ctypes.memmove(to, CODE, len(CODE))

    def _nvrtcgetprogramlogsize(self, program, size) -> None:
        size._obj.value = 32

    def _nvrtcgetprogramlog(self, program, to) -> None:
        to.value = b"no such instruction"

    def _cumoduleloaddata(self, module, code) -> None:
        self.loaded = code

    def _cugeterrorstring(self, code, words) -> None:
        words._obj.value = b"too many blocks"

    def _cuoccupancymaxactiveclusters(self, found, function, setup) -> None:
        found._obj.value = 7

    def _culaunchkernelex(self, setup, function, arguments, extra) -> None:
        setup = setup._obj
        values = [ctypes.cast(arguments[i], ctypes.POINTER(ctypes.c_uint64 if i < 2 else ctypes.c_int32))[0]
                  for i in range(len(arguments))]  # fmt: skip
        early = [(setup.attributes[i].id, setup.attributes[i].value) for i in range(setup.count)]
        self.launched.append({"grid": (*setup.grid,), "block": (*setup.block,), "shared": setup.shared_bytes,
                              "stream": setup.stream, "early": early, "values": values})  # fmt: skip


class Stream:
    cuda_stream = 99

    def synchronize(self) -> None:
        pass


@pytest.fixture
def libraries(monkeypatch, tmp_path):
    fake = Libraries()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ctypes, "CDLL", fake)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in (("is_available", True), ("current_device", 1), ("current_stream", Stream())):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield fake
    compiled.cache_clear()
    runtime._driver.cache_clear()


@pytest.fixture(autouse=True)
def _forget():
    compiled.cache_clear()
    runtime._driver.cache_clear()


def test_compiles_once_and_launches(libraries):
    tensors = torch.ones(2), torch.zeros(3)
    for _ in range(2):
        KERNEL((2, 3, 1), *tensors, count=7, rest=-5)
    assert libraries.calls.count("nvrtcCompileProgram") == libraries.calls.count("cuModuleLoadData") == 1
    assert libraries.options == ["--gpu-architecture=sm_90a", *runtime.OPTIONS]
    assert libraries.loaded == CODE
    asked = {"grid": (2, 3, 1), "block": (256, 1, 1), "shared": 100 << 10, "stream": 99, "early": [(6, 1)],
             "values": [*(tensor.data_ptr() for tensor in tensors), 7, -5]}  # fmt: skip
    assert libraries.launched == [asked] * 2
    assert KERNEL.active_clusters((2, 4, 1)) == 7
    assert KERNEL.name == "scale<1, 64>"


def test_the_driver_is_asked_about_clusters_in_the_kernels_context(libraries):
    """The thread may be a new one, whose first call to CUDA it is."""
    KERNEL.active_clusters((2, 4, 1))
    assert libraries.calls.index("cuCtxSetCurrent") < libraries.calls.index("cuOccupancyMaxActiveClusters")


def test_nvrtc_is_found_where_pip_installs_it(libraries, monkeypatch, tmp_path):
    file = tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    file.parent.mkdir(parents=True)
    file.touch()
    libraries.missing = "libnvrtc"
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(runtime, "find_spec", {"nvidia": found}.get)
    assert machine_code(KERNEL, "sm_90") == (CODE, SYMBOL)
    assert libraries.opened[-1] == str(file)


def test_only_a_kernel_that_waits_itself_begins_early_and_only_on_a_gpu_that_can(libraries, monkeypatch):
    CudaKernel("sparse_linear_mma.cu", "scale", 32)((1, 1, 1), *(torch.ones(1),) * 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    KERNEL((1, 1, 1), *(torch.ones(1),) * 2)
    assert [one["early"] for one in libraries.launched] == [[], []]


def test_the_structures_are_those_of_the_driver():
    """Sizes and places as a C compiler finds them in cuda.h of CUDA 13.0."""
    assert (ctypes.sizeof(runtime._Attribute), runtime._Attribute.value.offset) == (72, 8)
    assert ctypes.sizeof(runtime._Setup) == 56
    assert (runtime._Setup.stream.offset, runtime._Setup.attributes.offset) == (32, 40)


@pytest.mark.parametrize(
    ("function", "message"),
    [("nvrtcCompileProgram", r"scale<1, 64> could not be compiled: no such instruction"),
     ("cuModuleLoadData", "could not be loaded: CUDA error 1, too many blocks"),
     ("cuFuncSetAttribute", "could not be loaded"),
     ("cuLaunchKernelEx", r"could not be launched on \(1, 1, 1\): CUDA error 1, too many blocks")],
)  # fmt: skip
def test_a_failure_names_the_kernel(libraries, function, message):
    libraries.errors[function] = 1
    with pytest.raises(PermTritonError, match=message):
        KERNEL((1, 1, 1), *(torch.ones(1),) * 2)


@pytest.mark.parametrize(("missing", "message"), [("libnvrtc", "NVRTC"), ("libcuda", "NVIDIA driver")])
def test_a_missing_library_is_named(libraries, missing, message):
    libraries.missing = missing
    with pytest.raises(PermTritonError, match=message):
        KERNEL((1, 1, 1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so():
    with pytest.raises(PermTritonError, match="NVIDIA GPU"):
        KERNEL((1, 1, 1))
