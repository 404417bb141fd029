"""Compiles the Triton kernels ahead of time, for GPUs that this machine need not have, and reads what they use.

Triton carries the assembler (ptxas) and the reader (cuobjdump), so that neither a GPU nor a driver is needed. Pointers
count as aligned to 16 bytes, as torch allocates them; sizes and strides are compiled both ways, as multiples of 16 (the
usual case, in which Triton makes wide loads) and, for sm_90, as unknown numbers.
"""

import importlib
import io
import pkgutil
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from permtriton import kernels
from permtriton.errors import ConfigError
from permtriton.kernels.launch import Build, triton

TENSOR_COLUMNS = 512  # of a multiprocessor's tensor memory, where it has any; what takes more compiles to a trap


@dataclass(frozen=True)
class Target:
    """A GPU architecture.

    Attributes:
        name: as people write it.
        backend, arch, warp: what Triton calls it, threads in a warp.
        shared_limit: bytes of shared memory that a program may have.
        required: whether every kernel must compile for it.
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
    """What one kernel in one configuration uses on one target.

    Attributes:
        name: of the build.
        target: of the GPU.
        multiples: whether sizes and strides counted as multiples of 16.
        default: whether it is what runs without autotuning.
        registers: a thread.
        shared_bytes: a program.
        tensor_columns: of tensor memory, a program; sm_100 has such.
        stack_bytes: a thread, of local memory.
        spills: instructions that store registers to local memory.
        seconds: that compiling took; little where Triton's cache had it.
        error: why it did not compile, or None.
        problem: what is wrong with it for this project, or None.
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
    """Returns what every module of ``permtriton.kernels`` says that it builds, in the order of their names.

    Raises:
        ConfigError: there is no Triton here, or it interprets instead of compiling.
    """
    check_compiles()
    found, seen = [], set()
    for name in kernel_modules():
        builds = getattr(importlib.import_module(f"permtriton.kernels.{name}"), "builds", None)
        if builds is not None and builds not in seen:
            seen.add(builds)
            found += builds()
    return found


def kernel_modules() -> list[str]:
    """Returns the names of the modules beside this one."""
    return sorted(module.name for module in pkgutil.iter_modules(kernels.__path__) if not module.ispkg)


def check_compiles() -> None:
    """Refuses where nothing can be compiled.

    Raises:
        ConfigError: with the reason.
    """
    if triton is None:
        raise ConfigError("kernels cannot be compiled: triton is not installed (Linux has it: pip install triton)")
    if triton.knobs.runtime.interpret:
        raise ConfigError("kernels cannot be compiled while TRITON_INTERPRET is set: unset it")


def compile_all(
    builds: Sequence[Build], targets: Sequence[Target] = TARGETS, told: Callable[[Compiled], None] | None = None
) -> Iterator[Compiled]:
    """Compiles each build for each target; sizes as unknown numbers only for defaults and one target.

    Args:
        builds: see `all_builds`.
        targets: GPUs.
        told: called with each result as it comes, beside its being yielded.
    """
    for build in builds:
        for target in targets:
            for multiples in (True, False) if build.default and target.name == "sm_90" else (True,):
                result = compile_one(build, target, multiples)
                if told is not None:
                    told(result)
                yield result


def compile_one(build: Build, target: Target, multiples: bool = True) -> Compiled:
    """Compiles one build; a failure is part of the result."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    about: dict[str, Any] = {
        "name": build.name, "target": target.name, "multiples": multiples, "default": build.default,
    }  # fmt: skip
    source = ASTSource(build.kernel, dict(build.signature), dict(build.constants), _attributes(build, multiples))
    options = {"num_warps": build.config.num_warps, "num_stages": build.config.num_stages, "enable_fp_fusion": True}
    started = time.perf_counter()
    try:
        with redirect_stdout(io.StringIO()):  # where assembling fails, Triton prints all of the assembly
            binary = triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp), options=options)
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


def _attributes(build: Build, multiples: bool) -> dict[tuple[int, ...], list[list[Any]]]:
    """Says which arguments are multiples of 16: pointers, and whole numbers where asked."""
    kinds = ("*", "i", "u") if multiples else ("*",)
    return {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(build.signature.values())
        if kind.startswith(kinds) and kind != "i1"
    }


def _problem(default: bool, target: Target, used: dict[str, int]) -> str | None:
    if not default or not target.required:
        return None
    if used["spills"] or used["stack_bytes"]:
        return f"{used['spills']} spills, {used['stack_bytes']} bytes of stack"
    if used["shared_bytes"] > target.shared_limit:
        return f"{used['shared_bytes']:,} bytes of shared memory, {target.shared_limit:,} are there"
    if used["tensor_columns"] > TENSOR_COLUMNS:
        return f"{used['tensor_columns']} columns of tensor memory, {TENSOR_COLUMNS} are there"
    return None


def _cuda_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = _cuobjdump("--dump-resource-usage", file.name)
        found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", report)
        if not found:
            raise ConfigError(f"cuobjdump says nothing of registers: {report[:200]!r}")
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
    told = next((line for line in lines if "fatal" in line or "error" in line.lower().split(":")[0]), lines[-1])
    return f"{type(error).__name__}: {told}"[:300]
