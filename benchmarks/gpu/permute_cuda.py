"""Builds ``permute.cu`` with nvcc and calls it: a yardstick for the Triton kernel, which nothing in permtriton needs.

The source includes no torch headers, so it builds in seconds; it is called through its one C function.
"""

import ctypes
import functools
import hashlib
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu import caches
from permtriton.errors import ModelError, PermTritonError
from permtriton.kernels.permute import check_shapes
from permtriton.util.durable import replace_file

SOURCE = Path(__file__).with_name("permute.cu")


def built(arch: str) -> Path:
    """Returns the library for an architecture (``sm_90``), compiled unless it is in the caches; it needs no GPU.

    Raises:
        PermTritonError: no nvcc, or the build failed.
    """
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()  # the caches may hold the library of an older one
    path = caches.work() / f"permute_{arch}_{source[:16]}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = ["nvcc", "-O3", "-std=c++17", f"-arch={arch}", "-shared", "-Xcompiler=-fPIC", str(SOURCE), "-o"]
        try:
            replace_file(
                path, lambda part: subprocess.run([*command, part], check=True, capture_output=True, text=True)
            )
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or error
            raise PermTritonError(f"{SOURCE.name} could not be built by nvcc: {said}; nothing depends on it") from error
    return path


@functools.cache
def library() -> ctypes.CDLL:
    """Loads the library for the present GPU.

    Raises:
        PermTritonError: no GPU, or as `built`.
    """
    if not torch.cuda.is_available():
        raise PermTritonError(f"{SOURCE.name} runs on an NVIDIA GPU, and torch sees none on this machine")
    major, minor = torch.cuda.get_device_capability()
    loaded = ctypes.CDLL(str(built(f"sm_{major}{minor}")))
    pointer, wide, narrow = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    loaded.permtriton_permute.argtypes = [pointer, pointer, pointer, wide, narrow, wide, narrow, narrow, pointer]
    return loaded


def permute_cuda(x: Tensor, index: Tensor, block_size: int | None = None) -> Tensor:
    """Returns ``x[..., index]``, contiguous, by the CUDA kernel.

    Args:
        x: ``[..., C]`` on a GPU, values of up to 64 bits.
        index: ``[C]``, any integer dtype, on the same GPU.
        block_size: Channels per block if the index keeps to blocks: segments of about 2048 channels are then staged.
            This is not checked: an entry outside its segment reads another channel.

    Raises:
        ModelError: values larger than 64 bits, or a tensor on a CPU.
        PermTritonError: the kernel could not be built or launched.
    """
    check_shapes(x, index)
    if not x.is_cuda or index.device != x.device:
        raise ModelError(f"permute_cuda: x on {x.device}, the index on {index.device}: expected both on one GPU")
    if x.element_size() not in (1, 2, 4, 8):
        raise ModelError(f"permute_cuda: values of {x.dtype}: expected 8, 16, 32 or 64 bits")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    channels = x.shape[-1]
    segment = channels if block_size is None else min(max(2048 // block_size, 1) * block_size, channels)
    rows = x.reshape(-1, channels)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    index = index.to(torch.int32).contiguous()
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream().cuda_stream
        error = library().permtriton_permute(
            rows.data_ptr(), index.data_ptr(), y.data_ptr(), rows.shape[0], channels, rows.stride(0),
            x.element_size(), segment, stream,
        )  # fmt: skip
    if error:
        raise PermTritonError(f"permute_cuda of {list(x.shape)}: CUDA error {error}")
    return y
