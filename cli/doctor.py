"""The command ``permtriton doctor``: describes and tests this machine, or compiles the kernels without a GPU."""

import dataclasses
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from permtriton.cli.console import echo, fail, print_json, show
from permtriton.cli.self_test import FAILS, self_test
from permtriton.kernels import autotune
from permtriton.kernels.launch import triton
from permtriton.kernels.tools import compile_check
from permtriton.kernels.tools.compile_check import Compiled
from permtriton.util.bars import BarProgress
from permtriton.util.machine import versions


def run(*, compile_kernels: bool, defaults_only: bool, test: bool, json: bool) -> None:
    """Describes this machine and tests permtriton on it, or compiles the kernels and prints the resources of each.

    Raises:
        ConfigError: the kernels cannot be compiled here.
    """
    if compile_kernels:
        _compile_kernels(defaults_only, json)
        return
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
    return "plain torch on the CPU; permtriton doctor --compile-kernels checks the GPU kernels without a GPU"


def _measured_configurations(gpu: bool) -> str:
    path = autotune.cache_file()
    if not gpu or triton is None:
        return "none: permtriton autotune measures them on a GPU"
    entries = autotune.read_entries(path, autotune.machine_key())
    if not entries:
        return f"none in {path} for this GPU and these versions: the defaults run until permtriton autotune measures"
    return f"{len(entries)} in {path}"


def _compile_kernels(defaults_only: bool, json: bool) -> None:
    builds = [build for build in compile_check.all_builds() if build.default or not defaults_only]
    progress = BarProgress()
    with progress.stage("compile", len(builds)) as advance:
        results: list[Compiled] = []
        for build in builds:
            results += compile_check.compile_all([build])
            advance(1, build.name)
    if json:
        kernels = [dataclasses.asdict(result) for result in results]
        print_json({"triton": triton.__version__, "kernels": kernels})
    else:
        _print(results)
    if problems := [result for result in results if result.problem]:
        first = problems[0]
        fail(
            f"{len(problems)} of {len(results)} kernel builds failed the resource check: {first.name} for "
            f"{first.target}: {first.problem}" + (f" ({first.error})" if first.error else ""),
            2,
        )
    if not results:
        fail("there is no kernel to compile: the builds() of permtriton.kernels are missing", 2)


def _print(results: list[Compiled]) -> None:
    """Prints one line per kernel, configuration and target, with the largest numbers of its builds."""
    rows: dict[tuple[str, str], list[Compiled]] = {}
    for result in results:
        rows.setdefault((result.name, result.target), []).append(result)
    width = max((len(name) for name, _ in rows), default=0)
    echo(f"{'kernel':<{width}}  target  registers  shared bytes  stack bytes  spills  programs per SM")
    for (name, target), same in rows.items():
        error = next((result.error for result in same if result.error), None)
        mark = next((result.problem for result in same if result.problem), "default" if same[0].default else "")
        if error:
            echo(f"{name:<{width}}  {target:<6}  {error}")
            continue
        registers, shared, stack, spills = (
            max(getattr(result, field) for result in same)
            for field in ("registers", "shared_bytes", "stack_bytes", "spills")
        )
        resident = min(result.resident for result in same) or "-"
        line = (
            f"{name:<{width}}  {target:<6}  {registers:>9}  {shared:>12,}  {stack:>11,}  {spills:>6}  {resident:>15}  "
            f"{mark}"
        )
        echo(line.rstrip())
    seconds = sum(result.seconds for result in results)
    echo(f"{len(results)} kernel builds in {seconds:.0f} s with triton {triton.__version__}; no GPU was used")
