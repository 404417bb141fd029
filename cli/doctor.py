"""The command ``permtriton doctor``: describes and tests this machine."""

import dataclasses
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from permtriton.cli.console import fail, print_json, show
from permtriton.cli.self_test import FAILS, self_test
from permtriton.kernels import autotune
from permtriton.kernels.launch import triton
from permtriton.util.machine import versions


def run(*, test: bool, json: bool) -> None:
    """Describes this machine and tests permtriton on it."""
    checks = self_test() if test else []
    if json:
        print_json({**machine(), "self_test": [dataclasses.asdict(check) for check in checks]})
    else:
        about = machine().items()
        show("This machine", ((name, "\n".join(value) if isinstance(value, list) else value) for name, value in about))
        if checks:
            rows = ((check.name, check.outcome, check.detail, f"{check.seconds:.1f}") for check in checks)
            show("Self-test", rows, "what", "outcome", "detail", "seconds")
    if failed := [check for check in checks if check.outcome == FAILS]:
        fail(f"the self-test failed: {failed[0].name}: {failed[0].detail}", 2)


def machine() -> dict[str, Any]:
    """Returns a description, in words, of this machine and of where permtriton's kernels run on it."""
    gpus = [_gpu(number) for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "GPU": gpus or ["none that torch can use" + ("" if torch.version.cuda else " (torch is a build without CUDA)")],
        "triton": _triton(),
        "CUDA compiler": _compiler(("nvcc",), "nothing needs it"),
        "C compiler": _compiler((os.environ.get("CC", "gcc"), "clang"), "Triton needs one to launch kernels on a GPU"),
        "kernels run": _kernels_run(bool(gpus)),
        "measured configurations": _measured_configurations(bool(gpus)),
    }


def _gpu(number: int) -> str:
    about = torch.cuda.get_device_properties(number)
    return (
        f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory / 2**30:.0f} GiB, "
        f"{about.multi_processor_count} multiprocessors, {about.L2_cache_size / 2**20:.0f} MiB of L2"
    )


def _triton() -> str:
    if triton is None:
        return "not installed" + (" (there is none for macOS)" if sys.platform == "darwin" else ": pip install triton")
    return triton.__version__ + (", interpreting: TRITON_INTERPRET is set" if triton.knobs.runtime.interpret else "")


def _compiler(programs: Sequence[str], needed: str) -> str:
    """Returns the path and the version line of the first program that is installed.

    Args:
        programs: names of the programs.
        needed: what needs one of them, for the case that there is none.
    """
    path = next(filter(None, map(shutil.which, programs)), None)
    if path is None:
        return f"none ({' or '.join(programs)} is not on the PATH); {needed}"
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}, which does not answer: {error}"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    release = next((line for line in lines if "release" in line), lines[0] if lines else "it says nothing")
    return f"{path}: {release}"


def _kernels_run(gpu: bool) -> str:
    if gpu and triton is not None:
        return "tensors on the GPU: Triton kernels; tensors on the CPU: plain torch"
    if gpu:
        return "plain torch on CPU and GPU: the GPU kernels need triton"
    return "plain torch on the CPU"


def _measured_configurations(gpu: bool) -> str:
    path = autotune.cache_file()
    if not gpu or triton is None:
        return "none: permtriton autotune measures them on a GPU"
    entries = autotune.read_entries(path, autotune.machine_key())
    if not entries:
        return f"none in {path} for this GPU and these versions: the defaults run until permtriton autotune measures"
    return f"{len(entries)} in {path}"
