"""The hand-written CUDA gather: its kernels run on the CPU here, thread by thread, and compile where nvcc is."""

import ctypes
import shutil
import subprocess

import pytest
import torch

from benchmarks.gpu import caches
from benchmarks.gpu.permute_cuda import SOURCE, built, library, permute_cuda
from permtriton.errors import ModelError, PermTritonError

# What CUDA provides to a kernel: threads, a barrier, and shared memory that lives as long as its block.
HARNESS = r"""
#include <algorithm>
#include <barrier>
#include <cstring>
#include <thread>
#include <vector>
#define __global__
#define __shared__
#define __launch_bounds__(x)
using std::min;
struct dim3 { unsigned x, y; };
struct alignas(16) uint4 { unsigned at[4]; };
static thread_local dim3 threadIdx, blockIdx;
static dim3 blockDim{32, 1}, gridDim{};
uint4 shared[4096];
static std::barrier<>* meeting;
void __syncthreads() { meeting->arrive_and_wait(); }
#define PERMUTE_KERNELS_ONLY
#include SOURCE
template <typename Kernel> void launch(dim3 grid, Kernel kernel) {
    gridDim = grid;
    for (unsigned b = 0; b < grid.x; ++b) for (unsigned s = 0; s < grid.y; ++s) {
        std::memset(shared, 0xA5, sizeof(shared));
        std::barrier<> all(blockDim.x);
        meeting = &all;
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < blockDim.x; ++t)
            threads.emplace_back([&, t] { threadIdx = {t, 0}; blockIdx = {b, s}; kernel(); });
        for (auto& thread : threads) thread.join();
    }
}
template <typename V, typename W, int PACK>
void run(const void* x, const int32_t* index, void* y, int64_t rows, int c, int64_t stride, int segment, int how) {
    auto* from = static_cast<const V*>(x);
    auto* to = static_cast<V*>(y);
    const dim3 grid{2, unsigned((c + segment - 1) / segment)};
    if (how == 2) launch({2, 1}, [&] { permute_direct<V>(from, index, to, rows, c, stride); });
    else if (how) launch(grid, [&] { permute_staged<V, W, PACK, true>(from, index, to, rows, c, stride, segment); });
    else launch(grid, [&] { permute_staged<V, W, PACK, false>(from, index, to, rows, c, stride, segment); });
}
extern "C" void run_permute(const void* x, const int32_t* i, void* y, int64_t r, int c, int64_t stride, int size,
                            int segment, int how) {
    if (size == 1) run<uint8_t, uint32_t, 4>(x, i, y, r, c, stride, segment, how);
    if (size == 2) run<uint16_t, uint32_t, 2>(x, i, y, r, c, stride, segment, how);
    if (size == 4) run<uint32_t, uint32_t, 1>(x, i, y, r, c, stride, segment, how);
    if (size == 8) run<uint64_t, uint64_t, 1>(x, i, y, r, c, stride, segment, how);
}
"""
DTYPES = [torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64]
SCALAR, WIDE, DIRECT = range(3)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    there = tmp_path_factory.mktemp("cuda")
    (there / "harness.cpp").write_text(HARNESS)
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f'-DSOURCE="{SOURCE}"', "harness.cpp"]
    result = subprocess.run(
        [*command, "-o", "h.so"], cwd=there, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    pointer, wide, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    run = ctypes.CDLL(str(there / "h.so")).run_permute
    run.argtypes = [pointer, pointer, pointer, wide, whole, wide, whole, whole, whole]
    return run


def gathered(emulated, x, index, segment, how):
    y = torch.full(x.shape, 0x7B, dtype=torch.uint8).repeat(1, x.element_size()).view(x.dtype)
    emulated(x.data_ptr(), index.data_ptr(), y.data_ptr(), *x.shape, x.stride(0), x.element_size(), segment, how)
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("how", "channels"), [(SCALAR, 37), (WIDE, 48), (WIDE, 640), (DIRECT, 37)])
def test_the_kernels_gather(emulated, dtype, how, channels):
    for rows in (1, 3, 9):
        x = torch.randint(-100, 100, (rows, channels + 16)).to(dtype)[:, :channels]
        index = torch.randperm(channels, dtype=torch.int32)
        assert torch.equal(gathered(emulated, x, index, channels, how), x[:, index])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", [SCALAR, WIDE])
def test_segments_of_an_index_that_stays_in_blocks(emulated, dtype, how):
    index = torch.cat([torch.randperm(16) + start for start in range(0, 80, 16)]).int()
    x = torch.randint(-100, 100, (5, 80)).to(dtype)
    assert torch.equal(gathered(emulated, x, index, 32, how), x[:, index])


def test_an_entry_that_is_none_reads_the_first_channel(emulated):
    x, index = torch.arange(8.0).view(2, 4), torch.tensor([3, 4, -1, 1], dtype=torch.int32)
    for how in (SCALAR, DIRECT):
        assert torch.equal(gathered(emulated, x, index, 4, how), x[:, [3, 0, 0, 1]])


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
