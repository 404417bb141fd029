"""Compiles and launches the CUDA sources of this folder with NVRTC, which comes with torch: users need no nvcc.

A source includes no headers, and its kernels take pointers, then 32-bit integers. Machine code is kept in the user's
cache folder, so that each kernel is compiled once on a machine; it can also be compiled where there is no GPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from permtriton.errors import PermTritonError
from permtriton.kernels.autotune import cache_folder
from permtriton.util.durable import replace_file

FOLDER = Path(__file__).parent
OPTIONS = ("--std=c++17",)
MOST_DYNAMIC_SHARED, EARLY = 8, 6  # in the driver's enumerations of function attributes and of launch attributes


@dataclass(frozen=True)
class CudaKernel:
    """A kernel of a source in this folder, as it is launched."""

    source: str  # name of the file, which includes no headers: ``sparse_linear_mma.cu``
    function: str  # name of the kernel in it
    threads: int  # threads per block
    shared_bytes: int = 0  # bytes of dynamic shared memory per block
    # name and value of each template argument, in order; none if the kernel is no template
    constants: tuple[tuple[str, int], ...] = ()
    # whether it may begin while the kernel before it ends (sm_90 and newer); then its code waits for that kernel
    early: bool = False

    @property
    def name(self) -> str:
        """The kernel with its template arguments: ``sparse_linear_mma<1, 256, 16>``."""
        values = ", ".join(str(value) for _, value in self.constants)
        return f"{self.function}<{values}>" if self.constants else self.function

    def __call__(self, grid: tuple[int, int, int], *tensors: Tensor, **numbers: int) -> None:
        """Launches the kernel on the current GPU and stream; compiles it first, once per process and GPU.

        ``grid`` is the number of blocks in each direction. The arguments of the kernel are pointers to ``tensors``,
        contiguous and on this GPU, then ``numbers`` as 32-bit integers, both in the order of its parameters.
        """
        loaded = compiled(self, _current())
        # An argument takes 8 bytes, of which an integer is the lower half. Array types are cached by their length.
        count = len(tensors) + len(numbers)
        values = _words(count)(*[tensor.data_ptr() for tensor in tensors], *[n & 0xFFFFFFFF for n in numbers.values()])
        first = ctypes.addressof(values)
        arguments = _places(count)(*range(first, first + 8 * count, 8))
        setup, driver = _setup(loaded, grid, torch.cuda.current_stream().cuda_stream), _driver()
        driver.cuCtxSetCurrent(loaded.context)  # of this thread, which may be a new one
        if problem := _refusal(driver.cuLaunchKernelEx(ctypes.byref(setup), loaded.function, arguments, None)):
            raise PermTritonError(f"{self.source}: {self.name} could not be launched on {grid}: {problem}")

    def active_clusters(self, grid: tuple[int, int, int]) -> int:
        """Returns how many clusters of a launch with ``grid`` can run on the current GPU at once."""
        loaded, clusters = compiled(self, _current()), _Int()
        setup, driver = _setup(loaded, grid, 0), _driver()
        driver.cuCtxSetCurrent(loaded.context)  # of this thread, whose first call to CUDA it may be
        status = driver.cuOccupancyMaxActiveClusters(ctypes.byref(clusters), loaded.function, ctypes.byref(setup))
        if problem := _refusal(status):
            raise PermTritonError(f"{self.source}: {self.name} cannot run on {grid}: {problem}")
        return clusters.value


_Int, _UInt, _Pointer = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p
_words = functools.cache(lambda count: ctypes.c_uint64 * count)
_places = functools.cache(lambda count: _Pointer * count)


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", _UInt), ("pad", _UInt), ("value", _Int), ("rest", ctypes.c_char * 60))


class _Setup(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", _UInt * 3), ("block", _UInt * 3), ("shared_bytes", _UInt), ("stream", _Pointer),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", _UInt),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Loaded:
    """A kernel that is loaded on one GPU."""

    kernel: CudaKernel
    context: Any  # the driver's handle of the GPU's context
    function: Any  # the driver's handle of the kernel
    attributes: Any  # array of the driver's launch attributes


@functools.lru_cache(1 << 10)  # the driver only reads it, and to make it takes as long as the rest of a launch
def _setup(loaded: Loaded, grid: tuple[int, int, int], stream: int) -> _Setup:
    kernel, attributes, count = loaded.kernel, loaded.attributes, len(loaded.attributes)
    block = (kernel.threads, 1, 1)
    return _Setup(grid, block, kernel.shared_bytes, stream, attributes if count else None, count)


def _current() -> int:
    """Returns the number of the current GPU; -1 where torch sees none."""
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


@functools.cache
def compiled(kernel: CudaKernel, device: int) -> Loaded:
    """Returns a kernel loaded on the current GPU; ``device`` has to be the number of this GPU."""
    if device < 0 or torch.version.cuda is None:
        raise PermTritonError(f"{kernel.source}: it runs on an NVIDIA GPU, and torch sees none on this machine")
    major, minor = torch.cuda.get_device_capability(device)
    architecture = f"sm_{major}{minor}" + "a" * (major == 9)  # wgmma is sm_90a's alone
    code, symbol = machine_code(kernel, architecture)
    context, module, function, driver = _Pointer(), _Pointer(), _Pointer(), _driver()
    torch.cuda.current_stream().synchronize()  # makes the GPU's context the current one
    problem = (
        _refusal(driver.cuCtxGetCurrent(ctypes.byref(context)))
        or _refusal(driver.cuModuleLoadData(ctypes.byref(module), code))
        or _refusal(driver.cuModuleGetFunction(ctypes.byref(function), module, symbol))
        or _refusal(driver.cuFuncSetAttribute(function, MOST_DYNAMIC_SHARED, kernel.shared_bytes))
    )
    if problem:
        raise PermTritonError(
            f"{kernel.source}: {kernel.name} could not be loaded: {problem}. If its file in {cache_folder()}/cuda is "
            "damaged, delete it"
        )
    attributes = (_Attribute(EARLY, 0, 1),) if kernel.early and major >= 9 else ()
    return Loaded(kernel, context, function, (_Attribute * len(attributes))(*attributes))


def _nvrtc() -> Any:
    """Returns NVRTC: the system's, or the one that pip installed beside torch, which is on no search path."""
    name = f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}"
    installed = find_spec("nvidia")
    places = [] if installed is None else installed.submodule_search_locations or []
    files = [str(file) for place in places for file in sorted(Path(place).glob(f"*/lib/{name}"))]
    for path in (name, *files):
        with suppress(OSError):
            return ctypes.CDLL(path)
    raise PermTritonError(f"NVRTC, which comes with torch for CUDA, does not load: {', '.join((name, *files))}")


def machine_code(kernel: CudaKernel, architecture: str) -> tuple[bytes, bytes]:
    """Returns a kernel's machine code for an architecture, such as ``sm_90a``, and its mangled name; needs no GPU.

    The code is read from the cache folder, whose files may be deleted at any time, or else compiled and stored there.
    """
    library = _nvrtc()
    source, options = (FOLDER / kernel.source).read_bytes(), [f"--gpu-architecture={architecture}", *OPTIONS]
    number = _Int(), _Int()
    library.nvrtcVersion(*map(ctypes.byref, number))
    key = repr((kernel.name, options, [part.value for part in number])).encode() + source
    file = cache_folder() / "cuda" / f"{hashlib.sha256(key).hexdigest()}.cubin"
    with suppress(OSError):
        symbol, _, code = file.read_bytes().partition(b"\n")
        return code, symbol
    code, symbol = _by_nvrtc(library, kernel, source, options)
    with suppress(OSError):  # a cache that cannot be written costs time only
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, lambda temporary: temporary.write_bytes(symbol + b"\n" + code))
    return code, symbol


def _by_nvrtc(library: Any, kernel: CudaKernel, source: bytes, options: Sequence[str]) -> tuple[bytes, bytes]:
    program, name, symbol, size = _Pointer(), kernel.name.encode(), ctypes.c_char_p(), ctypes.c_size_t()
    option_array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    problem = (
        library.nvrtcCreateProgram(ctypes.byref(program), source, kernel.source.encode(), 0, None, None)
        or library.nvrtcAddNameExpression(program, name)
        or library.nvrtcCompileProgram(program, len(options), option_array)
        or library.nvrtcGetLoweredName(program, name, ctypes.byref(symbol))
        or library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    )
    if problem:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(max(size.value, 1))
        library.nvrtcGetProgramLog(program, log)
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        said = " ".join((log.value or library.nvrtcGetErrorString(problem)).decode(errors="replace").split())
        raise PermTritonError(f"{kernel.source}: {kernel.name} could not be compiled: {said[:400]}")
    code, lowered_name = ctypes.create_string_buffer(size.value), symbol.value or name
    library.nvrtcGetCUBIN(program, code)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw, lowered_name


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PermTritonError(f"the NVIDIA driver cannot be loaded: {error}") from error


def _refusal(code: int) -> str | None:
    """Returns why the driver refused a call, or None if it did not."""
    if code == 0:
        return None
    words = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(words))
    return f"CUDA error {code}, {(words.value or b'unknown').decode()}"
