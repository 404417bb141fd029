"""The CUDA kernel on the sparse tensor cores: emulated thread by thread, compiled where nvcc is, and its launcher."""

import ctypes
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from itertools import product as product_of
from pathlib import Path

import pytest
import torch

from permtriton.errors import PermTritonError
from permtriton.kernels import autotune
from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.cuda.runtime import FOLDER, CudaKernel
from permtriton.kernels.packing import pack
from permtriton.kernels.sparse_linear_mma import (
    CONFIGS,
    GpuLimits,
    Product,
    Variant,
    configs_for,
    is_right,
    is_trusted,
    variant_of,
)

from .kernel_inputs import TWO_FOUR, poison, sparse

BF16, FP16 = torch.bfloat16, torch.float16
SOURCE = FOLDER / "sparse_linear_mma.cu"
H200, A100 = GpuLimits(132, 228 << 10, 227 << 10, True, True), GpuLimits(108, 164 << 10, 163 << 10, False)
B200 = replace(H200, has_wgmma=False)
CPU = torch.device("cpu")
EMULATED = (
    Variant(BF16, 16, 8, 64, 2, 1, 1, 1),
    Variant(FP16, 64, 16, 64, 3, 4, 2, 2),
    Variant(BF16, 32, 32, 128, 2, 2, 2, 1),
    Variant(BF16, 64, 8, 32, 3, 4, 4, 4),
    Variant(BF16, 64, 8, 64, 4, 4, 4, 4, early=True),  # the default's form with fewer rows: a cluster of four
    Variant(BF16, 64, 8, 128, 3, 4, 4, 3, early=True, wide=True),
    Variant(FP16, 128, 32, 128, 2, 8, 8, 1, wide=True),
)
IN_FP8 = (
    Variant(BF16, 64, 8, 256, 3, 4, 4, 3, early=True, wide=True, fp8=True),
    Variant(FP16, 128, 16, 256, 2, 8, 8, 2, wide=True, fp8=True),
    Variant(BF16, 64, 64, 256, 2, 4, 4, 1, wide=True, fp8=True),
    Variant(FP16, 64, 32, 256, 3, 4, 4, 2, early=True, wide=True, fp8=True),
    Variant(BF16, 64, 128, 256, 2, 4, 4, 1, wide=True, fp8=True),
    Variant(BF16, 256, 8, 256, 2, 16, 16, 1, wide=True, fp8=True),
)
ALL = (*EMULATED, *IN_FP8)
HARNESS = """
#include "{model}"
#include "{source}"
extern "C" int run(const char* name, const void* const* tensors, int width, int tokens, int rows, int channels,
                   int has_bias, int columns, int blocks, int threads, int layers, int bytes, int at_once, int seed) {{
    error = 0, eager = at_once;
    const auto byte = [=](int i) {{ return static_cast<const uint8_t*>(tensors[i]); }};
    const auto half = [=](int i) {{ return static_cast<u16*>(const_cast<void*>(tensors[i])); }};
    const auto scales = [=](int i) {{ return static_cast<const float*>(tensors[i]); }};
    readable = {{{{byte(0), 1LL * width * tokens * channels}}, {{byte(1), 1LL * width * rows * channels / 2}},
                 {{byte(2), 1LL * rows * channels / 8}}}};
    const auto kernel = [&](auto* function) {{
        body = [=] {{
            if constexpr (std::is_invocable_v<decltype(function), u8*, u8*, u8*, u16*, u16*, int, int, int, int>)
                function(byte(0), byte(1), byte(2), half(3), half(4), tokens, rows, channels, has_bias);
            else
                function(byte(0), byte(1), byte(2), half(3), scales(4), scales(5), half(6), tokens, rows, channels,
                         has_bias);
        }};
    }};
    {choices} return -1;
    for (int layer = 0; layer < layers; ++layer)
        for (int column = 0; column < columns; ++column) run_cluster(column, layer, blocks, threads, bytes, seed);
    return error;
}}
// Which rows' sums change, by which word of the channels, if half of a thread's metadata says other positions.
extern "C" int rows_of(int selector, int lane, int half, int word) {{
    static unsigned rows;
    static int at_lane, at_half, at_word;
    rows = 0, error = 0, eager = false, at_lane = lane, at_half = half, at_word = word;
    const auto product = [](auto multiply_one) {{
        float d[4] = {{}};
        const int me_lane = me->thread.x;
        const u32 ones = 0x3F803F80, a[4] = {{ones, ones, ones, ones}};
        u32 b[4], metadata = 0x44444444;  // the positions 0 and 1 of every group
        for (int i = 0; i < 4; ++i) b[i] = me_lane % 2 && i / 2 == at_word ? ones : 0;  // channels 2 and 3
        if (me_lane == at_lane) metadata = at_half ? 0xEEEE4444 : 0x4444EEEE;
        multiply_one(d, a, b, metadata);
        for (int i = 0; i < 4; ++i) if (d[i] != 0) rows |= 1u << (me_lane / 4 + i / 2 * 8);
    }};
    if (selector) body = [=] {{ product([](auto&... x) {{ multiply<1, 1>(x...); }}); }};
    else body = [=] {{ product([](auto&... x) {{ multiply<1, 0>(x...); }}); }};
    run_cluster(0, 0, 1, 32, 256, 0);
    return error ? -1 : int(rows);
}}
"""
# The rows of a tile of 32 whose metadata the halves of each thread's register hold, and the word (of 16 channels) of
# both, after CUTLASS's reorder for 16-bit operands: rows 0 to 15 are those of selector 0, the others of selector 1.
REORDERED_ROWS = (
    (0, 8), (0, 8), (16, 24), (16, 24), (1, 9), (1, 9), (17, 25), (17, 25), (2, 10), (2, 10), (18, 26), (18, 26),
    (3, 11), (3, 11), (19, 27), (19, 27), (4, 12), (4, 12), (20, 28), (20, 28), (5, 13), (5, 13), (21, 29), (21, 29),
    (6, 14), (6, 14), (22, 30), (22, 30), (7, 15), (7, 15), (23, 31), (23, 31),
)  # fmt: skip
REORDERED_WORDS = (0, 1) * 16


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    there = tmp_path_factory.mktemp("mma")
    choices = " else ".join(f'if (!strcmp(name, "{one.kernel.name}")) kernel({one.kernel.name});' for one in ALL)
    model = Path(__file__).with_name("mma_model.h")
    (there / "h.cpp").write_text(HARNESS.format(model=model, source=SOURCE, choices=f"{choices} else"))
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "h.cpp", "-o", "h.so"]
    result = subprocess.run(command, cwd=there, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(there / "h.so"))


@pytest.fixture(params=[(False, 0), (True, 7)], ids=["late", "shuffled"])
def emulated(library, request, monkeypatch):
    """Makes kernels run in the emulation; asynchronous copies land late or at once, threads run in any order."""

    def call(kernel: CudaKernel, grid, *tensors, **numbers) -> None:
        pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        launch = (grid[0], grid[1], kernel.threads, grid[2], kernel.shared_bytes, *request.param)
        width = tensors[0].dtype.itemsize
        assert library.run(kernel.name.encode(), pointers, width, *numbers.values(), *launch) == 0

    monkeypatch.setattr(CudaKernel, "__call__", call)


@pytest.mark.slow
def test_the_emulated_metadata_is_that_of_cutlass(library):
    """Each half of each thread's register speaks of the row and the word that the reorder puts there, or of none."""
    for selector, lane, half, word in product_of((0, 1), range(32), (0, 1), (0, 1)):
        row = REORDERED_ROWS[lane][half]
        holds = row // 16 == selector and REORDERED_WORDS[lane] == word
        assert library.rows_of(selector, lane, half, word) == (1 << row % 16 if holds else 0), (selector, lane, half)


@pytest.mark.parametrize("variant", ALL, ids=lambda variant: variant.kernel.name)
@pytest.mark.slow(but=[f"shuffled-{one.kernel.name}" for one in ALL])
def test_the_kernel_computes_a_product_exactly(emulated, variant):
    """What a GPU checks too, before it uses the kernel; the known product is made on the CPU."""
    with torch.device("meta"):  # whatever the default device is
        assert is_right(variant, CPU)


def product(x, weight, bias, index):
    x = x if index is None else x[..., index.long()]
    return x.double() @ weight.double().t() + (0 if bias is None else bias.double())


@pytest.mark.parametrize("variant", EMULATED, ids=lambda variant: variant.kernel.name)
@pytest.mark.slow(but=[f"shuffled-{one.kernel.name}" for one in EMULATED])
def test_the_product_in_float64(emulated, variant, monkeypatch):
    """Ragged rows and channels (by wgmma those are whole), strided inputs that are not aligned, outputs poisoned."""
    poison(monkeypatch)
    channels = 1664 if variant.wide else 416
    rows, tokens = max(variant.rows, 64) + 3, variant.tokens + variant.tokens // 2 + 1
    weight = sparse(rows, channels // 4, dtype=variant.dtype)
    values, positions = pack(weight, TWO_FOUR)
    x = torch.randn(tokens + 1, 1, channels).to(variant.dtype)[1:]
    bias, index = torch.randn(2 * rows).to(variant.dtype)[::2], torch.randperm(channels).short()
    unaligned = torch.empty(values.numel() + 1, dtype=values.dtype)[1:].view(values.shape).copy_(values)
    for kept, b, i in ((values, None, None), (unaligned, bias, index), (values.t().contiguous().t(), bias, None)):
        found = variant.launch(x if i is None else x[..., i.long()], kept, positions, b)
        expected, eps = product(x, weight, b, i), torch.finfo(variant.dtype).eps
        assert (found.dtype, found.shape) == (variant.dtype, (tokens, 1, rows))
        torch.testing.assert_close(found.double(), expected, rtol=4 * eps, atol=4 * eps * expected.abs().max().item())


@pytest.mark.parametrize("variant", EMULATED, ids=lambda variant: variant.kernel.name)
def test_an_infinite_input_reaches_the_rows_that_keep_its_channel(emulated, variant):
    """Not what is added for the channels that the last chunk lacks, nor another token."""
    channels, rows = (128, variant.rows) if variant.wide else (96, 64)
    weight = torch.ones(rows, channels).bfloat16().view(rows, -1, 4)
    weight[..., 2:] = 0
    weight[0, 0] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    x = torch.ones(3, channels)
    x[1, 0] = torch.inf
    y = variant.launch(x.to(variant.dtype), *pack(weight.flatten(1).to(variant.dtype), TWO_FOUR), None)
    expected = torch.full((3, rows), channels / 2)
    expected[1, 1:] = torch.inf
    assert torch.equal(y.float(), expected)


def in_fp8(variant, x, weight, bias, scales):
    """The kernel's result, and the terms' sum in float64; both operands are float8, scales those of rows and tokens."""
    values, positions = pack(weight.float(), TWO_FOUR)
    y = torch.full((len(x), len(weight)), torch.nan, dtype=variant.dtype)
    variant.launch(x, values.to(mma.FP8), positions, bias, scales, y)
    dense = x.double() @ weight.double().t() * scales[0] * scales[1].view(-1, 1)
    return y.double(), dense + (0 if bias is None else bias.double())


@pytest.mark.parametrize("variant", IN_FP8, ids=lambda variant: variant.kernel.name)
@pytest.mark.slow(but=[f"shuffled-{one.kernel.name}" for one in IN_FP8[:3]])
def test_the_product_in_float8(emulated, variant):
    """Ragged rows and tokens, inputs that are not aligned, and scales that no two rows or tokens share."""
    channels, rows, tokens = 1792, variant.rows + 3, variant.tokens + variant.tokens // 2 + 1
    weight = sparse(rows, channels // 4).clamp(-448, 448).to(mma.FP8)
    x = torch.randn(tokens * channels + 1).mul(30).to(mma.FP8)[1:].view(tokens, channels)
    limit = 2 * torch.finfo(variant.dtype).eps + 2**-10
    for bias in (None, torch.randn(2 * rows).to(variant.dtype)[::2]):
        found, expected = in_fp8(variant, x, weight, bias, (torch.rand(rows) / 50, torch.rand(tokens)))
        torch.testing.assert_close(found, expected, rtol=limit, atol=limit * expected.abs().max().item())


def test_a_long_sum_in_float8_keeps_its_last_terms(emulated):
    """One large term, then thousands below the 14 bits of a sum with it: without totals all of them would be lost.

    In a chunk, four products cut off less than 33 units each, of at most 2^-13 of the sum of its terms.
    """
    variant, channels = IN_FP8[0], 14336
    weight, x = torch.zeros(64, channels), torch.full((3, channels), 3.5)
    weight.view(64, -1, 4)[..., :2] = 4.0
    weight[:, 0] = x[:, 0] = 448
    found, expected = in_fp8(variant, x.to(mma.FP8), weight.to(mma.FP8), None, (torch.ones(64), torch.ones(3)))
    large = 448 * 448
    assert expected.min() > 1.4 * large
    assert ((found - expected).abs() < (4 * 33 * 2**-13 + 2**-8) * expected).all()


@pytest.fixture
def fresh(monkeypatch):
    """Forgets which kernels were tried."""
    monkeypatch.setattr(mma, "_CHOSEN", {})
    is_trusted.cache_clear()
    monkeypatch.setattr(mma, "limits_of", lambda device: H200)
    yield
    is_trusted.cache_clear()


def test_a_wrong_kernel_is_not_used(fresh, monkeypatch):
    """With one warning for each way to begin: for wrong results, and for what does not compile."""
    for call, message in (
        (lambda *_, **__: None, "its results are wrong on this GPU"),  # writes nothing
        (CudaKernel.__call__, "runs on an NVIDIA GPU"),
    ):
        monkeypatch.setattr(CudaKernel, "__call__", call)
        mma._CHOSEN.clear()
        is_trusted.cache_clear()
        with autotune.choices() as ran, pytest.warns(UserWarning, match=message) as said:
            assert mma.chosen(Product(2, 64, 64, BF16), CPU) is None
        assert ["begins early" in str(one.message) for one in said] == [True, False]
        assert [what for what in ran if what.startswith("rejected")] == ["rejected 2x64x64"]
        assert mma.chosen(Product(2, 64, 64, BF16), CPU) is None


def test_one_that_is_right_only_when_it_begins_late_begins_late(fresh, monkeypatch):
    monkeypatch.setattr(mma, "is_right", lambda variant, device: not variant.early)
    with autotune.choices() as ran, pytest.warns(UserWarning, match="begins early is not used"):
        variant = mma.chosen(Product(2, 4096, 4096, BF16), CPU)
    assert variant is not None
    assert not variant.early
    assert ran["variant 2x4096x4096"] == variant.kernel.name


@pytest.mark.parametrize(("at_once", "splits"), [(1000, 4), (32, 4), (31, 3), (1, 1)])
def test_clusters_run_all_at_once(fresh, monkeypatch, at_once, splits):
    """Else the last ones would wait for a whole round; a block alone has no cluster to fit."""
    monkeypatch.setattr(mma, "is_right", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(
        CudaKernel, "active_clusters", lambda kernel, grid: at_once if grid[1] == 4 or at_once == 1 else 1000
    )
    variant = mma.chosen(Product(16, 4096, 4096, BF16), torch.device("cuda", 0))
    assert variant is not None
    assert variant.splits == splits


def test_clusters_that_a_gpu_cannot_schedule_are_lowered_before_the_kernel_is_tried(fresh, monkeypatch):
    """A part of a GPU, or one with few multiprocessors that share a cluster, refuses large ones; the route stays."""

    def active_clusters(kernel, grid):
        if grid[1] > 2:
            raise PermTritonError("misconfigured clusters")
        return 1000

    tried = []
    monkeypatch.setattr(mma, "is_right", lambda variant, device: tried.append(variant.splits) or True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(CudaKernel, "active_clusters", active_clusters)
    variant = mma.chosen(Product(16, 4096, 4096, BF16), torch.device("cuda", 0))
    assert variant is not None
    assert variant.splits == 2
    assert set(tried) == {2}


def test_a_launch_is_captured_in_a_graph_if_it_was_tried(fresh, monkeypatch):
    """As it was tried: here without beginning early, which its check refused, and with fewer blocks per cluster."""
    capturing, device, product = [False], torch.device("cuda", 0), Product(16, 4096, 4096, BF16)
    monkeypatch.setattr(mma, "is_right", lambda variant, device: not variant.early)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(CudaKernel, "active_clusters", lambda kernel, grid: 1000 if grid[1] < 4 else 1)
    with pytest.warns(UserWarning, match="begins early is not used"):
        tried = mma.chosen(product, device)
    assert (tried.early, tried.splits) == (False, 3)
    capturing[0] = True
    assert mma.chosen(product, device) == tried
    assert mma.chosen(product._replace(tokens=15), device) == tried, "which is the same launch"
    with pytest.warns(UserWarning, match="run each number of tokens once before"):
        assert mma.chosen(product._replace(tokens=32), device) is None


@pytest.mark.parametrize(
    ("gpu", "config"),
    [
        *product_of((H200, A100), CONFIGS),
        *product_of([H200], mma.WIDE_CONFIGS),
        (GpuLimits(128, 100 << 10, 99 << 10, False), CONFIGS[0]),
    ],
)
def test_a_variant_fits_its_gpu(gpu, config):
    for tokens in (1, 8, 9, 16, 33, 64, 65, 256):
        for rows, channels in ((64, 32), (100, 96), (1024, 4096), (4096, 11008), (11008, 4096), (128256, 8192)):
            channels = 128 if channels < 128 and config in mma.WIDE_CONFIGS else channels
            variant = variant_of(config, Product(tokens, rows, channels, BF16), gpu)
            assert variant.rows <= rows
            assert variant.rows % (16 * variant.row_warps) == 0
            assert variant.rows // variant.row_warps * variant.tokens <= mma.MAX_SUMS
            layers = variant.grid(tokens, rows)[2]
            assert tokens <= variant.tokens * layers < max(2 * tokens, 9)
            assert variant.kernel.shared_bytes <= gpu.block_bytes
            assert variant.stages >= 2
            tiles = -(-rows // variant.rows) * layers
            assert variant.splits == 1 or tiles * variant.splits <= config.constants["BLOCKS"] * gpu.multiprocessors


@pytest.mark.parametrize("config", mma.WIDE_CONFIGS)
def test_a_variant_in_float8_fits_its_gpu(config):
    for tokens in (1, 9, 64, 65, 256):
        for rows, channels in ((64, 256), (1024, 4096), (14336, 4096), (128256, 8192)):
            variant = variant_of(config, Product(tokens, rows, channels, BF16, fp8=True), H200)
            assert (variant.chunk, variant.wide, variant.fp8) == (256, True, True)
            assert variant.rows <= rows
            assert variant.rows * variant.tokens <= mma.FP8_SUMS, "sums and totals fit into registers"
            assert variant.kernel.shared_bytes <= H200.block_bytes
            assert variant.stages >= 2
            assert variant.splits <= max(channels // 256, 1)


def test_what_the_kernel_takes_in_float8(monkeypatch):
    """Whole stages of 256 channels, and only where there is wgmma."""
    for gpu, channels, fits in ((H200, 512, True), (H200, 384, False), (B200, 512, False)):
        monkeypatch.setattr(mma, "limits_of", lambda device, gpu=gpu: gpu)
        assert mma.takes(Product(2, 64, channels, BF16, fp8=True), TWO_FOUR, CPU) is fits


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_the_defaults_compile_without_a_spill(tmp_path):
    in_fp8 = [(0, 8, 4096), (0, 16, 4096), (0, 32, 4096), (0, 64, 4096), (0, 128, 4096), (0, 64, 1024), (3, 64, 8192)]
    variants = [
        variant_of(configs_for(one, gpu)[0], one, gpu)
        for gpu, one in product_of((H200, B200), (Product(tokens, 4096, 4096, BF16) for tokens in (16, 64)))
    ]
    variants += [
        variant_of(mma.WIDE_CONFIGS[config], Product(tokens, rows, 4096, BF16, fp8=True), H200)
        for config, tokens, rows in in_fp8
    ]
    uses = "\n".join(f"void* use_{i} = (void*)&{one.kernel.name};" for i, one in enumerate(variants))
    (tmp_path / "k.cu").write_text(f'#include "{SOURCE}"\n{uses}\n')
    command = ["nvcc", "-std=c++17", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v"]
    command += ["k.cu", "-o", "k.cubin"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    used = [line for line in result.stderr.splitlines() if "spill stores" in line]
    assert len(used) == len(variants)
    assert all("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line for line in used)
