"""Compiles the Triton kernels ahead of time, for GPUs that this machine need not have, and reads what they use.

Triton ships the assembler (ptxas) and the disassembler (cuobjdump), so neither a GPU nor a driver is needed. Pointers
count as aligned to 16 bytes, as torch allocates them. Sizes and strides that are multiples of 16 are compiled as such,
the usual case, in which Triton makes wide loads; the defaults also as unknown integers, for sm_90.

    python -m benchmarks.gpu.compile_check      every configuration; minutes the first time; --defaults-only
"""

import argparse
import functools
import io
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.builds import MODULES, Build, distinct
from benchmarks.gpu.recording import Launch
from permtriton.errors import ConfigError
from permtriton.kernels.launch import triton

REGISTERS = 65536  # of a multiprocessor
RESERVED_SHARED = 1024  # bytes per program that the system takes
TENSOR_COLUMNS = 512  # of a multiprocessor's tensor memory, if it has any; a kernel that takes more compiles to a trap


@dataclass(frozen=True)
class Target:
    """A GPU architecture.

    Attributes:
        arch: Compute capability, as a number of two or three digits.
        shared_limit: Bytes of shared memory available to a program.
        required: Whether every kernel must compile for it, and defaults without a spill; else they are listed only.
        warps, programs: How many a multiprocessor takes at a time.
    """

    arch: int
    shared_limit: int
    required: bool
    warps: int = 64
    programs: int = 32

    @property
    def name(self) -> str:
        return f"sm_{self.arch}"


TARGETS = (
    Target(80, 163 << 10, required=True),
    Target(89, 99 << 10, required=False, warps=48, programs=24),
    Target(90, 227 << 10, required=True),
    Target(100, 227 << 10, required=True),
)


@dataclass(frozen=True)
class Compiled:
    """Resources that one kernel in one configuration uses on one target.

    Attributes:
        name: Name of the build.
        target: Name of the target.
        multiples: Whether sizes and strides that are multiples of 16 counted as such.
        default: Whether the build runs without autotuning.
        registers: Registers per thread.
        shared_bytes: Bytes of shared memory per program.
        tensor_columns: Columns of tensor memory per program (sm_100).
        stack_bytes: Bytes of local memory per thread.
        spills: Instructions that store registers to local memory.
        resident: Programs per multiprocessor, see `resident`.
        seconds: Compilation time; short if Triton's cache had the kernel.
        error: Why it did not compile, or None.
        problem: Why it fails the resource check, or None.
    """

    name: str
    target: str
    multiples: bool
    default: bool
    registers: int = 0
    shared_bytes: int = 0
    tensor_columns: int = 0
    stack_bytes: int = 0
    spills: int = 0
    resident: int = 0
    seconds: float = 0.0
    error: str | None = None
    problem: str | None = None


def all_builds() -> list[Build]:
    """Returns the builds of every kernel.

    Raises:
        ConfigError: Triton is not installed, or it interprets instead of compiling.
    """
    check_compiles()
    return distinct(build for builds in MODULES for build in builds())


def check_compiles() -> None:
    """Refuses to go on if nothing can be compiled here.

    Raises:
        ConfigError: with the reason.
    """
    if triton is None:
        raise ConfigError("kernels cannot be compiled: triton is not installed (on Linux: pip install triton)")
    if triton.knobs.runtime.interpret:
        raise ConfigError("kernels cannot be compiled while TRITON_INTERPRET is set: unset it")


def compile_all(builds: Sequence[Build], targets: Sequence[Target] = TARGETS) -> Iterator[Compiled]:
    """Compiles each build for each target that runs it; with sizes as unknown integers only defaults, for one."""
    for build in builds:
        for target in targets:
            if build.has_float8 and target.arch < 89:
                continue
            both = build.default and not build.aligned and target.arch == 90
            for multiples in (True, False) if both else (True,):
                yield compile_one(build, target, multiples)


def compile_one(build: Build, target: Target, multiples: bool = True) -> Compiled:
    """Compiles one build; a failure is part of the result."""
    started = time.perf_counter()
    found: dict[str, Any]
    try:
        used = _usage(build.launch, target, multiples)
        found = {**used, "problem": _problem(build.default, target, used)}
    except Exception as error:  # Triton and its assemblers raise many kinds
        found = {"error": _reason(error), "problem": "does not compile" if target.required else None}
    seconds = time.perf_counter() - started
    return Compiled(build.name, target.name, multiples, build.default, **found, seconds=seconds)


def _usage(launch: Launch, target: Target, multiples: bool) -> dict[str, int]:
    binary = binary_of(launch, target, multiples)
    used = cuda_usage(binary.asm["cubin"])
    shared = int(binary.metadata.shared)
    used["shared_bytes"] = max(used["shared_bytes"], shared)
    used["tensor_columns"] = getattr(binary.metadata, "tmem_size", None) or 0
    warps = launch.options.get("num_warps", 4)
    used["resident"] = resident(target, warps, used["registers"], shared, used["tensor_columns"])
    return used


def binary_of(launch: Launch, target: Target, multiples: bool = True) -> Any:
    """Returns what Triton compiles for a launch.

    Args:
        launch: A recorded launch.
        target: The architecture.
        multiples: Whether integers that are multiples of 16 count as such; pointers always do.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(launch.signature.items())
        if kind.startswith("*") or (multiples and kind != "i1" and launch.numbers.get(name, 1) % 16 == 0)
    }
    source = ASTSource(launch.kernel, dict(launch.signature), dict(launch.constants), attributes)
    gpu = GPUTarget("cuda", target.arch, 32)
    with redirect_stdout(io.StringIO()):  # where assembling fails, Triton prints all of the assembly
        return triton.compile(source, target=gpu, options={**launch.options, "enable_fp_fusion": True})


def _problem(default: bool, target: Target, used: dict[str, int]) -> str | None:
    if not default or not target.required:
        return None
    if used["spills"] or used["stack_bytes"]:
        return f"{used['spills']} spills, {used['stack_bytes']} bytes of stack"
    if used["shared_bytes"] > target.shared_limit:
        return f"{used['shared_bytes']:,} bytes of shared memory, more than {target.shared_limit:,}"
    if used["tensor_columns"] > TENSOR_COLUMNS:
        return f"{used['tensor_columns']} columns of tensor memory, more than {TENSOR_COLUMNS}"
    return None


def cuda_usage(cubin: bytes) -> dict[str, int]:
    """Returns the registers, shared memory, stack and spills of machine code, each the most of its functions."""
    report = disassembled(cubin, "cuobjdump", "--dump-resource-usage")
    usages = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", report)
    if not usages:
        raise ConfigError(f"cuobjdump reports no registers: {report[:200]!r}")
    registers, stack, shared, local = (max(map(int, column)) for column in zip(*usages, strict=True))
    # Spilled registers live in the stack frame: where there is none, there is no spill.
    spills = len(re.findall(r"\bSTL\b", disassembled(cubin, "nvdisasm", "-c", "-ndf"))) if stack or local else 0
    return {"registers": registers, "shared_bytes": shared, "stack_bytes": stack + local, "spills": spills}


def resident(target: Target, warps: int, registers: int, shared_bytes: int, tensor_columns: int = 0) -> int:
    """Returns how many programs fit on a multiprocessor, by registers, shared memory, warps and tensor memory.

    Args:
        target: The architecture.
        warps: Warps per program.
        registers: Registers per thread; they are given to warps in units of 8 per thread, to 4 warps at a time.
        shared_bytes: Bytes of shared memory per program, without what the system takes.
        tensor_columns: Columns of tensor memory per program.
    """
    by_registers = REGISTERS // (256 * math.ceil(max(registers, 1) / 8)) // 4 * 4 // warps
    by_shared = (target.shared_limit + RESERVED_SHARED) // (math.ceil(shared_bytes / 128) * 128 + RESERVED_SHARED)
    by_columns = TENSOR_COLUMNS // tensor_columns if tensor_columns else target.programs
    return min(by_registers, by_shared, by_columns, target.warps // warps, target.programs)


@functools.lru_cache(maxsize=16)
def disassembled(cubin: bytes, program: str, *options: str) -> str:
    """Returns what a program of the triton package, cuobjdump or nvdisasm, prints of machine code."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / program
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    cause = next((line for line in lines if "fatal" in line or "error" in line.lower().split(":")[0]), lines[-1])
    return f"{type(error).__name__}: {cause}"[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--defaults-only", action="store_true", help="the default configurations only")
    defaults_only = parser.parse_args().defaults_only
    builds = [build for build in all_builds() if build.default or not defaults_only]
    width = max(len(build.name) for build in builds)
    print(f"{'kernel':<{width}}  target  registers  shared bytes  stack bytes  spills  programs per SM")
    problems = 0
    for found in compile_all(builds):
        used = found.error or (
            f"{found.registers:>9}  {found.shared_bytes:>12,}  {found.stack_bytes:>11,}  {found.spills:>6}  "
            f"{found.resident:>15}"
        )
        mark = found.problem or ("default" if found.default else "")
        print(f"{found.name:<{width}}  {found.target:<6}  {used}  {mark}".rstrip(), flush=True)
        problems += found.problem is not None
    if problems:
        sys.exit(f"{problems} builds failed the resource check")


if __name__ == "__main__":
    main()
