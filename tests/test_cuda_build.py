"""The hand-written CUDA gather of the GPU benchmark, which compares its result itself: it compiles where nvcc is."""

import ctypes
import shutil
import subprocess

import pytest
import torch

from benchmarks.gpu import caches
from benchmarks.gpu.permute_cuda import SOURCE, built, library, permute_cuda
from permtriton.errors import ModelError, PermTritonError

DTYPES = [torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.slow
def test_compiles_without_a_spill(arch, tmp_path):
    command = ["nvcc", "-std=c++17", "-O3", "-cubin", f"-arch={arch}", "-Xptxas", "-v", str(SOURCE), "-o", "p.cubin"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    if f"'{arch}' is not defined" in result.stderr or "Unsupported gpu architecture" in result.stderr:
        pytest.skip(f"this nvcc knows no {arch}")
    assert result.returncode == 0, result.stderr
    spills = [line for line in result.stderr.splitlines() if "spill stores" in line]
    assert len(spills) == 16  # per size wide or not; packed and plain words of 8 and 16 bits; direct
    assert all("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line for line in spills)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
@pytest.mark.slow
def test_it_is_built_once_without_a_gpu(tmp_path, monkeypatch):
    """Beforehand, for a machine that is lent: the library holds the function, and a second call only finds it."""
    monkeypatch.setattr(caches, "work", lambda: tmp_path)
    path = built("sm_90")
    assert ctypes.CDLL(str(path)).permtriton_permute
    monkeypatch.setenv("PATH", "")
    assert built("sm_90") == path
    with pytest.raises(PermTritonError, match="could not be built by nvcc"):
        built("sm_80")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so():
    with pytest.raises(PermTritonError, match="NVIDIA GPU"):
        library()
    with pytest.raises(ModelError, match=r"on cpu.*one GPU"):
        permute_cuda(torch.zeros(2, 8), torch.arange(8))


@pytest.mark.skipif(not torch.cuda.is_available() or shutil.which("nvcc") is None, reason="needs a GPU and nvcc")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 37), (2, 3, 4096), (1025, 11008), (2, 70000)])
def test_equals_triton(dtype, shape):
    from permtriton.kernels.permute import permute

    x = torch.randint(-100, 100, shape, device="cuda").to(dtype)
    index = torch.randperm(shape[-1], device="cuda")
    assert torch.equal(permute_cuda(x, index), permute(x, index))
    blocks = (torch.rand(shape[-1], device="cuda") + torch.arange(shape[-1], device="cuda") // 64).argsort()
    assert torch.equal(permute_cuda(x, blocks, 64), permute(x, blocks))
