"""The issue floor: the least time that a launch takes because of the instructions that its warps must issue.

    issue floor = warp instructions of the whole launch / (multiprocessors x 4 issue slots x clock)
    memory time = bytes that must move / bandwidth of a copy

Both are counted without a GPU: the launch is the one that the launcher makes by default for a named shape, recorded and
compiled for the target; its machine code gives the instructions of each loop (sass.py), shapes.py how often they run.
What a kernel can reach is bounded by the larger of the two times, and comes near it only if their ratio is well below
1.

It is a lower bound. Not in it: latency, conflicts of shared memory banks, waiting at barriers (barriers and shuffles
are listed beside it), and instructions that keep their unit for more than one cycle.
Instructions whose predicate is false are issued, so they count. A branch inside a loop is counted with both its sides,
as if each iteration ran both; so is code outside of loops. Called functions (the slow case of a division) do not count.

As a check of ``loops``, the bytes of global memory that the counted instructions ask for cannot be fewer than those
that must move.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.compile_check import (
    RESERVED_SHARED,
    TARGETS,
    Target,
    binary_of,
    check_compiles,
    cuda_usage,
    disassembled,
    resident,
)
from benchmarks.gpu.recording import CudaLaunch, Launch, recorded
from benchmarks.gpu.sass import Code, loops_of, parse
from permtriton.errors import ConfigError
from permtriton.kernels.cuda.runtime import FOLDER, OPTIONS, CudaKernel
from permtriton.kernels.sparse_linear_mma import GpuLimits
from permtriton.kernels.tools.case import Case

ISSUE_SLOTS = 4
BARRIERS, SHUFFLES = ("BAR", "UCGABAR_ARV"), ("SHFL",)


@dataclass(frozen=True)
class Floor:
    """A launch whose issue floor is counted: one named shape of a kernel in its default launch.

    Attributes:
        case: The same call as a case, which runs on the meta device.
        launch: Calls the launcher with the inputs of the case, while launches are recorded.
        units: How many units of work the call does, in which instructions are stated.
        unit: Their name: "weight".
        loops: Launch -> how often a program runs each loop of its machine code, on average: in the order of their
            addresses, outer loops before their inner ones. None where the data decide: then only resources are listed.
    """

    case: Case
    launch: Callable[..., object]
    units: int
    unit: str
    loops: Callable[[Any], Sequence[float]] | None


@dataclass(frozen=True)
class Gpu:
    """A GPU that floors are stated for.

    Attributes:
        name: Its name.
        target: Its architecture.
        processors: Multiprocessors.
        clock: Instructions per second and issue slot.
        bandwidth: Bytes per second of a copy, read and written ones together.
        source: Where the bandwidth comes from.
    """

    name: str
    target: Target
    processors: int
    clock: float
    bandwidth: float
    source: str

    @property
    def limits(self) -> GpuLimits:
        """What its launches depend on."""
        block = self.target.shared_limit
        return GpuLimits(self.processors, block + RESERVED_SHARED, block, int(self.target.arch) >= 90)


_TARGETS = {target.name: target for target in TARGETS}
H200 = Gpu("H200", _TARGETS["sm_90"], 132, 1.98e9, 4.3e12, "assumed: 0.9 of the nominal 4.8 TB/s")
GPUS = (
    H200,
    Gpu("A100 80 GB", _TARGETS["sm_80"], 108, 1.41e9, 0.9 * 2.04e12, "0.9 of the nominal 2.04 TB/s"),
    Gpu("RTX 4090", _TARGETS["sm_89"], 128, 2.52e9, 0.9 * 1.008e12, "0.9 of the nominal 1.008 TB/s; its boost clock"),
    Gpu("B200", _TARGETS["sm_100"], 148, 1.85e9, 0.9 * 8e12, "0.9 of the nominal 8 TB/s; the clock is assumed"),
)


@dataclass(frozen=True)
class Counted:
    """One launch on one target.

    Attributes:
        kernel: Name of the kernel.
        warps: Warps per program.
        programs: Programs of the launch.
        registers: Registers per thread.
        shared_bytes: Bytes of shared memory per program.
        spills: Instructions that store registers to local memory; stack use without one counts as one.
        resident: Programs per multiprocessor.
        loops: Instructions of each loop without its inner ones, in the order of their addresses.
        straight: Instructions outside of loops.
        main_loop: Instructions of the loop that issues the most in all, or of the kernel outside of loops if that
            issues more; where the data decide how often loops run, of the longest loop.
        instructions: Warp instructions of the launch.
        barriers: Barriers that a program passes.
        shuffles: Shuffles that a warp issues.
        asked_bytes: Bytes of global memory that the launch asks for; masked threads count.
    """

    kernel: str
    warps: int
    programs: int
    registers: int
    shared_bytes: int
    spills: int
    resident: int
    loops: tuple[int, ...]
    straight: int
    main_loop: int
    instructions: float = math.nan
    barriers: float = math.nan
    shuffles: float = math.nan
    asked_bytes: float = math.nan


@dataclass(frozen=True)
class Row:
    """The floor of one call on one GPU: a line of the table.

    Attributes:
        name: Name of the case.
        gpu: Name of the GPU.
        unit: What instructions are stated per: "weight".
        units: How many of them there are.
        launches: The launches of the call, the one that issues the most first.
        per_unit: Instructions of threads, 32 per warp, per unit of work.
        issue_us: Issue floor in microseconds.
        memory_us: Memory time in microseconds.
        bytes: That must move.
    """

    name: str
    gpu: str
    unit: str
    units: int
    launches: tuple[Counted, ...]
    per_unit: float
    issue_us: float
    memory_us: float
    bytes: int

    @property
    def ratio(self) -> float:
        """Returns the issue floor over the memory time; not a number if the data decide how often loops run."""
        return self.issue_us / self.memory_us

    @property
    def spills(self) -> int:
        """Returns the spills of all launches."""
        return sum(launch.spills for launch in self.launches)

    def figures(self) -> dict[str, Any]:
        """Returns what is stored and printed; of several launches, registers and loops are those of the first.

        Times, ratio and counts that the data decide are None.
        """
        main = self.launches[0]
        counted = {
            "ratio": self.ratio, "issue_us": self.issue_us, "memory_us": self.memory_us, "per_unit": self.per_unit,
            "barriers": main.barriers, "shuffles": main.shuffles,
        }  # fmt: skip
        return {
            "name": self.name, "gpu": self.gpu, "kernels": [launch.kernel for launch in self.launches],
            "registers": main.registers, "shared_bytes": main.shared_bytes, "resident": main.resident,
            "spills": self.spills, "main_loop": main.main_loop, "unit": self.unit, "units": self.units,
            "bytes": self.bytes,
            **{name: None if math.isnan(value) else round(value, 3) for name, value in counted.items()},
        }  # fmt: skip


def row(floor: Floor, gpu: Gpu) -> Row:
    """Returns the floor of a call on one GPU.

    Raises:
        ConfigError: nothing can be compiled here, or ``loops`` does not fit the machine code.
    """
    check_compiles()
    with torch.device("meta"), recorded(gpu.processors) as launches:
        floor.launch(*floor.case.make(torch.device("meta")))
    if not launches:
        raise ConfigError(f"{floor.case.name}: its floor launches nothing: call the kernel's launcher there")
    found = [_counted(launch, gpu.target, floor.loops) for launch in launches]
    found.sort(key=lambda one: -one.instructions)
    asked, instructions = sum(one.asked_bytes for one in found), sum(one.instructions for one in found)
    if asked < 0.99 * floor.case.bytes:
        raise ConfigError(
            f"{floor.case.name} for {gpu.target.name}: its loops ask for {asked:,.0f} bytes, fewer than the "
            f"{floor.case.bytes:,} that must move: correct how often they run in benchmarks/gpu/shapes.py"
        )
    return Row(
        floor.case.name, gpu.name, floor.unit, floor.units, tuple(found), 32 * instructions / floor.units,
        1e6 * instructions / (gpu.processors * ISSUE_SLOTS * gpu.clock), 1e6 * floor.case.bytes / gpu.bandwidth,
        floor.case.bytes,
    )  # fmt: skip


def _counted(launch: Launch | CudaLaunch, target: Target, loops: Callable[[Any], Sequence[float]] | None) -> Counted:
    times = None if loops is None else loops(launch)
    if isinstance(launch, CudaLaunch):
        cubin, kernel = cuda_binary(launch.kernel, target), launch.kernel
        return count(cubin, target, math.ceil(kernel.threads / 32), launch.grid, times, kernel.shared_bytes)
    binary = binary_of(launch, target)
    columns = getattr(binary.metadata, "tmem_size", None) or 0
    warps = launch.options.get("num_warps", 4)
    return count(binary.asm["cubin"], target, warps, launch.grid, times, int(binary.metadata.shared), columns)


def count(
    cubin: bytes,
    target: Target,
    warps: int,
    grid: Sequence[int],
    times: Sequence[float] | None,
    shared_bytes: int = 0,
    tensor_columns: int = 0,
) -> Counted:
    """Counts a launch of the one kernel in some machine code, whoever compiled it.

    Args:
        cubin: The machine code.
        target: Its architecture.
        warps: Warps per program.
        grid: Programs along each axis.
        times: How often a program runs each loop, see `Floor`; None if the data decide.
        shared_bytes: Bytes of dynamic shared memory per program.
        tensor_columns: Columns of tensor memory per program.

    Raises:
        ConfigError: more or fewer loops than ``times`` tells of, or several kernels.
    """
    functions = parse(disassembled(cubin, "nvdisasm", "-c", "-ndf", "-hex"))
    if len(functions) != 1:
        raise ConfigError(f"machine code with the kernels {', '.join(functions) or 'none'}: expected one")
    ((kernel, function),) = functions.items()
    code, used, programs = loops_of(function), cuda_usage(cubin), math.prod(grid)
    found = list(code.loops())
    about = Counted(
        kernel, warps, programs, used["registers"], shared_bytes,
        used["spills"] or int(used["stack_bytes"] > 0),
        resident(target, warps, used["registers"], shared_bytes + _static_shared(used, target), tensor_columns),
        tuple(loop.instructions for loop in found), code.instructions,
        max((loop.instructions for loop in found), default=code.instructions),
    )  # fmt: skip
    if times is None:
        return about
    if len(times) != len(found):
        raise ConfigError(
            f"{kernel} for {target.name} has {len(found)} loops, of {', '.join(map(str, about.loops)) or 'no'} "
            f"instructions, but benchmarks/gpu/shapes.py tells how often {len(times)} run: return one number for each "
            "loop, in the order of their addresses"
        )
    weighted = [(1.0, code), *zip(times, found, strict=True)]

    def total(of: Callable[[Code], float]) -> float:
        return sum(often * of(part) for often, part in weighted)

    return dataclasses.replace(
        about,
        instructions=programs * warps * total(lambda part: part.instructions),
        main_loop=max(weighted, key=lambda one: one[0] * one[1].instructions)[1].instructions,
        barriers=total(lambda part: sum(part.counts[name] for name in BARRIERS)),
        shuffles=total(lambda part: sum(part.counts[name] for name in SHUFFLES)),
        asked_bytes=programs * warps * total(lambda part: part.global_bytes),
    )


def _static_shared(used: dict[str, int], target: Target) -> int:
    """Returns the bytes of shared memory that the code declares; since sm_90 they are stated with the system's."""
    taken = RESERVED_SHARED if int(target.arch) >= 90 else 0
    return max(used["shared_bytes"] - taken, 0)


def cuda_binary(kernel: CudaKernel, target: Target) -> bytes:
    """Compiles a CUDA kernel with nvcc, which makes the same code as NVRTC does on a GPU's machine.

    Raises:
        ConfigError: nvcc is not on the PATH, or it refuses the source.
    """
    return _cuda_binary((FOLDER / kernel.source).read_text(encoding="utf-8"), kernel.name, target.name)


@functools.cache
def _cuda_binary(source: str, name: str, architecture: str) -> bytes:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise ConfigError(f"{name} is CUDA: nvcc, which is not on the PATH, must compile it to count its instructions")
    if "<" in name:  # nvcc compiles the templates that something uses
        source += f"\nstatic const void* used = (const void*)&{name};\n"
    with tempfile.TemporaryDirectory() as folder:
        file, made = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        file.write_text(source, encoding="utf-8")
        command = [nvcc, f"-arch={architecture}", "-cubin", *OPTIONS, "-o", str(made), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = " ".join((done.stderr or done.stdout).split())
            raise ConfigError(f"nvcc refuses {name}: {reason[:300]}")
        return made.read_bytes()
