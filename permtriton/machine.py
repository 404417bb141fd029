"""Facts about this machine and this installation: versions, device, memory."""

import os
import platform
import resource
import sys
from importlib import metadata

import torch


def versions() -> dict[str, str]:
    """Returns the version of each package that a result may depend on, by name."""
    return {
        "permtriton": metadata.version("permtriton"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }


def device_name(device: torch.device) -> str:
    """Returns the GPU's name, or ``cpu`` with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads, {platform.machine()}"


def available_memory(device: torch.device) -> int | None:
    """Returns the number of free bytes on ``device``; None if the system does not report it.

    A system without ``/proc/meminfo`` (macOS) reports its whole memory instead.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return None


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory in bytes: of torch on the GPU, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def format_bytes(count: int) -> str:
    """Returns a number of bytes in readable form, such as ``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
