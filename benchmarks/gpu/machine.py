"""What a result was measured on: GPU, versions, commit, and the GPU's clocks and temperature at a moment."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

from permtriton.kernels.launch import triton
from permtriton.machine import device_name, versions

ROOT = Path(__file__).resolve().parent.parent.parent
FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "temperature.memory", "power.draw")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # of newer and of older drivers
LIMITS = {  # bits of the above; a GPU that is idle is not limited
    0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "temperature",
    0x40: "temperature, by hardware", 0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip
KNOWN_SLOW = {
    "0.8.0": "cuSPARSELt 0.8.0 has known regressions on Hopper: its times, and those of 2:4 prefill, may be of it"
}


def hardware(device: torch.device) -> dict[str, Any]:
    """Returns the machine for the result file."""
    found: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count()}
    if device.type != "cuda":
        return {**found, "device": device_name(device)}
    about = torch.cuda.get_device_properties(device)
    return {
        **found,
        "device": about.name,
        "capability": f"{about.major}.{about.minor}",
        "multiprocessors": about.multi_processor_count,
        "memory_bytes": about.total_memory,
        "l2_bytes": about.L2_cache_size,
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def all_versions() -> dict[str, str | None]:
    """Returns the versions for the result file, cuSPARSELt's among them: None where torch has none."""
    try:
        known = versions()
    except metadata.PackageNotFoundError:  # run from the checkout alone
        known = {"permtriton": "not installed", "python": platform.python_version(), "torch": torch.__version__,
                 "transformers": transformers.__version__}  # fmt: skip
    number = torch.backends.cusparselt.version() if torch.backends.cusparselt.is_available() else None
    cusparselt = number and ".".join(map(str, (number // 1000, number // 100 % 10, number % 100)))
    return {**known, "triton": getattr(triton, "__version__", None), "cuda": torch.version.cuda,
            "cusparselt": cusparselt}  # fmt: skip


def warnings(found: dict[str, str | None]) -> list[str]:
    """Returns what is known against these versions."""
    return [KNOWN_SLOW[version] for version in [found["cusparselt"]] if version in KNOWN_SLOW]


def state(device: torch.device) -> dict[str, Any] | None:
    """Returns clocks in MHz, temperatures in degrees, power in W, and what limits the clocks; None without a GPU.

    A value that this GPU does not report is None.
    """
    if device.type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    which = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    for reasons in REASONS:
        query = f"--query-gpu={','.join((*FIELDS, reasons))}"
        line = output("nvidia-smi", f"--id={which}", query, "--format=csv,noheader,nounits")
        if line is not None:
            return parsed(line)
    return None


def parsed(line: str) -> dict[str, Any]:
    """Returns a line of nvidia-smi: a value per field of `FIELDS`, then the reasons for lower clocks as a bit mask."""
    *values, mask = (word.strip() for word in line.splitlines()[0].split(","))
    found: dict[str, Any] = {name: _number(value) for name, value in zip(FIELDS, values, strict=True)}
    try:
        bits = int(mask, 16)
    except ValueError:
        return {**found, "limited_by": None}
    return {**found, "limited_by": [name for bit, name in LIMITS.items() if bits & bit]}


def commit() -> str | None:
    """Returns the checkout's commit; None where git is not there to ask."""
    found = output("git", "rev-parse", "HEAD")
    changed = output("git", "status", "--porcelain", "--untracked-files=no")
    return found and found + (" with changes" if changed else "")


def output(*command: str) -> str | None:
    """Returns what a command prints; None where it fails or is not there."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def without_folders(text: str) -> str:
    """Returns text without folders of this machine: result files are published."""
    for folder in (ROOT, sys.prefix, sys.base_prefix, Path.home()):
        text = text.replace(f"{folder}/", "")
    return text


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None
