"""Compiles the Triton kernels ahead of time, for GPUs that this machine need not have, and reads what they use.

Triton ships the assembler (ptxas) and the disassembler (cuobjdump), so neither a GPU nor a driver is needed. Pointers
count as aligned to 16 bytes, as torch allocates them. Sizes and strides are compiled as multiples of 16, the usual
case, in which Triton makes wide loads; the defaults also as unknown integers, for sm_90.
"""

import importlib
import io
import pkgutil
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from permtriton import kernels
from permtriton.errors import ConfigError
from permtriton.kernels.builds import Build, distinct
from permtriton.kernels.launch import Launch, triton

TENSOR_COLUMNS = 512  # of a multiprocessor's tensor memory, if it has any; a kernel that takes more compiles to a trap


@dataclass(frozen=True)
class Target:
    """A GPU architecture.

    Attributes:
        name: Common name.
        backend, arch: Triton's names.
        warp: Threads per warp.
        shared_limit: Bytes of shared memory available to a program.
        required: Whether every kernel must compile for it.
    """

    name: str
    backend: str
    arch: int | str
    warp: int
    shared_limit: int
    required: bool


TARGETS = (
    Target("sm_80", "cuda", 80, 32, 163 << 10, required=True),
    Target("sm_90", "cuda", 90, 32, 227 << 10, required=True),
    Target("sm_100", "cuda", 100, 32, 227 << 10, required=True),
    Target("gfx942", "hip", "gfx942", 64, 64 << 10, required=False),
)


@dataclass(frozen=True)
class Compiled:
    """Resources that one kernel in one configuration uses on one target.

    Attributes:
        name: Name of the build.
        target: Name of the target.
        multiples: Whether sizes and strides counted as multiples of 16.
        default: Whether the build runs without autotuning.
        registers: Registers per thread.
        shared_bytes: Bytes of shared memory per program.
        tensor_columns: Columns of tensor memory per program (sm_100).
        stack_bytes: Bytes of local memory per thread.
        spills: Instructions that store registers to local memory.
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
    seconds: float = 0.0
    error: str | None = None
    problem: str | None = None


def all_builds() -> list[Build]:
    """Returns the builds of every module of ``permtriton.kernels``, in the order of module names.

    Raises:
        ConfigError: Triton is not installed, or it interprets instead of compiling.
    """
    check_compiles()
    modules = [importlib.import_module(f"permtriton.kernels.{name}") for name in kernel_modules()]
    return distinct(build for module in modules if hasattr(module, "builds") for build in module.builds())


def kernel_modules() -> list[str]:
    """Returns the names of the modules of ``permtriton.kernels``, without its packages."""
    return sorted(module.name for module in pkgutil.iter_modules(kernels.__path__) if not module.ispkg)


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
    """Compiles each build for each target; with sizes as unknown integers only defaults, for one target."""
    for build in builds:
        for target in targets:
            for multiples in (True, False) if build.default and target.name == "sm_90" else (True,):
                yield compile_one(build, target, multiples)


def compile_one(build: Build, target: Target, multiples: bool = True) -> Compiled:
    """Compiles one build; a failure is part of the result."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    about: dict[str, Any] = {
        "name": build.name, "target": target.name, "multiples": multiples, "default": build.default,
    }  # fmt: skip
    launch = build.launch
    attributes, options = _attributes(launch, multiples), {**launch.options, "enable_fp_fusion": True}
    source = ASTSource(launch.kernel, dict(launch.signature), dict(launch.constants), attributes)
    started = time.perf_counter()
    try:
        with redirect_stdout(io.StringIO()):  # where assembling fails, Triton prints all of the assembly
            gpu = GPUTarget(target.backend, target.arch, target.warp)
            binary = triton.compile(source, target=gpu, options=options)
        used = _cuda_usage(binary.asm["cubin"]) if target.backend == "cuda" else _amd_usage(binary.asm["amdgcn"])
    except Exception as error:  # Triton and its assemblers raise many kinds
        seconds = time.perf_counter() - started
        problem = "does not compile" if target.required else None
        return Compiled(**about, seconds=seconds, error=_reason(error), problem=problem)
    used["shared_bytes"] = max(used.get("shared_bytes", 0), int(binary.metadata.shared))
    used["tensor_columns"] = getattr(binary.metadata, "tmem_size", None) or 0
    return Compiled(
        **about,
        **dict[str, Any](used),
        seconds=time.perf_counter() - started,
        problem=_problem(build.default, target, used),
    )


def _attributes(launch: Launch, multiples: bool) -> dict[tuple[int, ...], list[list[Any]]]:
    """Returns Triton's attributes of arguments that are multiples of 16: pointers, and integers if ``multiples``."""
    kinds = ("*", "i", "u") if multiples else ("*",)
    return {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(launch.signature.values())
        if kind.startswith(kinds) and kind != "i1"
    }


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


def _cuda_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = _cuobjdump("--dump-resource-usage", file.name)
        found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", report)
        if not found:
            raise ConfigError(f"cuobjdump reports no registers: {report[:200]!r}")
        registers, stack, shared, local = (max(map(int, column)) for column in zip(*found, strict=True))
        # Spilled registers live in the stack frame: where there is none, there is no spill.
        spills = len(re.findall(r"\bSTL\b", _cuobjdump("--dump-sass", file.name))) if stack or local else 0
    return {"registers": registers, "shared_bytes": shared, "stack_bytes": stack + local, "spills": spills}


def _cuobjdump(option: str, file: str) -> str:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([program, option, file], capture_output=True, text=True, check=True).stdout


def _amd_usage(assembly: str) -> dict[str, int]:
    def read(name: str) -> int:
        return sum(int(number) for number in re.findall(rf"\.{name}:\s+(\d+)", assembly))

    spills = read("vgpr_spill_count") + read("sgpr_spill_count")
    return {"registers": read("vgpr_count"), "stack_bytes": read("private_segment_fixed_size"), "spills": spills}


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    cause = next((line for line in lines if "fatal" in line or "error" in line.lower().split(":")[0]), lines[-1])
    return f"{type(error).__name__}: {cause}"[:300]
