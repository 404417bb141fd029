"""Compiles, on a machine without a GPU, what rows launch on an H200, so that a machine that is lent need not.

    python -m benchmarks.gpu.beforehand --out FOLDER

Run it in an environment with the torch, Triton and Python of the GPU's machine: their versions, and the files of Triton
itself, are part of the name under which Triton looks a kernel up. FOLDER gets caches.tar.gz, which a call of
`benchmarks.gpu` with the same FOLDER unpacks.
"""

import argparse
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.gpu import caches
from benchmarks.gpu.compile_check import all_builds
from benchmarks.gpu.permute_cuda import built
from benchmarks.gpu.table import FEW, LAYER_8B, MERGED_8B, MORE
from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.cuda.runtime import CudaKernel, machine_code

H200 = mma.GpuLimits(132, has_wgmma=True)


class Pretended:
    """An H200 that Triton compiles for; nothing can be launched on it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def products() -> Iterator[CudaKernel]:
    """Yields the CUDA kernels that multiply by packed weights of an 8B model, as they run by default."""
    for tokens, (rows, channels), fp8 in product((*FEW, *MORE), {**LAYER_8B, **MERGED_8B}, (False, True)):
        if tokens <= mma.MAX_TOKENS:
            one = mma.Product(tokens, rows, channels, torch.bfloat16, fp8)
            yield mma.variant_of(mma.configs_for(one, H200)[0], one, H200).kernel


def compile_all(results: Path) -> str:
    """Adds the compiled kernels to the caches of a folder of results; returns what was compiled, for people."""
    started = time.perf_counter()
    results.mkdir(parents=True, exist_ok=True)
    caches.unpack(results)
    os.environ |= caches.environment("first_look")
    driver.set_active(Pretended())
    triton_kernels = [build.launch.compile for build in all_builds() if build.default]
    in_cuda = sorted(set(products()), key=lambda kernel: kernel.name) if torch.version.cuda else []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # assembling runs in other processes, and NVRTC without the GIL
        list(pool.map(lambda compile: compile(), triton_kernels))
        list(pool.map(lambda kernel: machine_code(kernel, "sm_90a"), in_cuda))
    if shutil.which("nvcc"):
        built("sm_90")  # the paper's yardstick
    caches.pack(results)
    megabytes = (results / caches.ARCHIVE).stat().st_size / 1e6
    return (
        f"{len(triton_kernels)} Triton kernels, {len(in_cuda)} CUDA kernels, {megabytes:.0f} MB, "
        f"{time.perf_counter() - started:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    print(compile_all(parser.parse_args().out.resolve()))


if __name__ == "__main__":
    main()
