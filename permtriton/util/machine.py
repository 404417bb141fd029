"""Facts about this machine and this installation: versions, device, memory."""

import ctypes
import gc
import platform
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from permtriton.util import ranks

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@contextmanager
def as_torch_starts() -> Iterator[None]:
    """Inside the context, torch has its defaults: float32, the CPU, no inference mode."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        # A default device, even the CPU, slows down every call of torch.
        device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
        with device, torch.inference_mode(False):
            yield
    finally:
        torch.set_default_dtype(dtype)


def versions() -> dict[str, str]:
    """Returns the versions of permtriton, Python, torch and transformers, on which a result may depend, by name."""
    return {
        "permtriton": _version("permtriton"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a folder that was copied, not installed
        return "not installed"


def device_name(device: torch.device) -> str:
    """Returns the GPU's name, or ``cpu`` with the number of threads and the architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads, {platform.machine()}"


def processor() -> Mapping[str, Any]:
    """Returns what torch knows of the processor: ``cpu_name``, and whether it has units such as ``avx512_bf16``."""
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # missing in some versions from 2.11 on
    return known


def determinism() -> dict[str, Any]:
    """Returns the settings, apart from the seed, on which the last bits of sums depend.

    On a CPU, the same seed, versions, machine and numbers of threads and ranks give the same bytes. On a GPU the bytes
    may differ, because atomic sums have no fixed order.
    """
    return {
        "threads": torch.get_num_threads(),
        "ranks": ranks.count(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "float32_matmul": torch.get_float32_matmul_precision(),
    }


def available_memory(device: torch.device, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Returns the number of free bytes on ``device``.

    On a CPU this is the smallest of what the system says is available and, on Linux, what each control group (the
    limits of containers and batch systems) leaves. File cache counts as free, because the kernel gives it up.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # the driver counts memory that torch keeps for its next tensors as used
        return torch.cuda.mem_get_info(device)[0]
    import psutil  # the GPU benchmark runs without psutil

    return max(min([psutil.virtual_memory().available, *_left_in_groups(proc, cgroups)]), 0)


def _fields(path: Path) -> dict[str, int]:
    """Returns name -> number for each line of a file of the kernel that starts with a name and a number."""
    lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yields the bytes that each limited control group of this process, and each of its ancestors, leaves free."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if not line.startswith("0::"):  # version 1 of control groups
            continue
        inside = PurePosixPath(line.removeprefix("0::")).relative_to("/")
        for group in (cgroups / path for path in (inside, *inside.parents)):
            # Inside a container the path may be the host's, whose folders are not there; "max" is no limit.
            with suppress(OSError, ValueError):
                left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
                cache = _fields(group / "memory.stat")
                yield left + cache.get("inactive_file", 0) + cache.get("active_file", 0)


def resident_memory() -> tuple[int, int]:
    """Returns how many bytes of this process are in memory, and how many of these are pages of files.

    Where the system does not count pages of files (macOS), the second number is 0.
    """
    import psutil

    memory = psutil.Process().memory_info()
    return memory.rss, getattr(memory, "shared", 0)


def release_memory() -> None:
    """Gives freed memory back to the system: glibc would keep fragments that later stages cannot reuse."""
    _call_glibc("malloc_trim", 0)


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory until `release_memory`: new pages for large tensors would take a tenth of the time.

    The setting applies to the whole process: call this function in commands only.
    """
    for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        _call_glibc("mallopt", option, 1 << 30)


def _call_glibc(name: str, *arguments: int) -> None:
    """Calls a function of glibc; does nothing on systems with another C library."""
    if sys.platform == "linux" and (function := getattr(ctypes.CDLL(None), name, None)) is not None:
        function(*arguments)


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory in bytes: of torch on the GPU, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError, KeyError):
        return _fields(PROC / "self" / "status")["VmHWM:"] * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def format_bytes(count: int) -> str:
    """Returns a number of bytes in readable form, such as ``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
