"""Every operator on the GPU against its reference: shapes, types, layouts, compilation, determinism, reach."""

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import timing
from permtriton.errors import ModelError
from permtriton.kernels import autotune
from permtriton.kernels import sparse_linear_mma as mma
from permtriton.kernels.assignment import assignment
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.nm_mask import nm_mask, nm_mask_reference
from permtriton.kernels.norm_permute import NormVariant, norm_permute
from permtriton.kernels.packing import pack
from permtriton.kernels.permute import permute, permute_reference
from permtriton.kernels.sinkhorn import sinkhorn, sinkhorn_reference
from permtriton.kernels.sparse_linear import sparse_linear
from permtriton.kernels.sparse_linear_fp8 import pack_fp8, sparse_linear_fp8
from permtriton.kernels.tools import tuning
from permtriton.kernels.tools.case import Random, relative_error
from permtriton.kernels.tools.cases import assignment_case, cases_by_kernel, cases_for
from permtriton.util.sparsity import NMPattern

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(64, 128), (96, 320), (256, 704), (4096, 4096)]


def order(channels: int, device: torch.device) -> Tensor:
    return torch.randperm(channels, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_case_is_right(shape, dtype, device):
    wrong = {}
    for case in cases_for([shape], [1, 16, 77, 512], dtype):
        for seed in range(2):
            if problem := case.check(device, seed):
                wrong[case.name] = problem
    assert wrong == {}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_case_is_right_on_a_gpu_that_is_not_the_current_one():
    for case in cases_for([(256, 512)], [1, 16, 77], torch.bfloat16):
        assert case.check(torch.device("cuda", 1)) is None, case.name


def test_every_case_reads_the_tables_that_it_names(device):
    found = {}
    for case in cases_for([(256, 512)], [1, 16, 77], torch.bfloat16):
        several = {name for name, configs in case.tables.items() if len(configs) > 1}
        # cuSPARSELt's table is searched, and the dense route unpacks, which has a case of its own.
        others = {"cusparselt", *(["packing", "quantize"] if case.op.startswith("sparse_linear") else [])}
        read = {request.op for request in tuning.requests_of(case, device)} - others
        # Routes are read only if there is a choice; a case does not know whether the GPU has the wgmma kernel in FP8.
        if (read ^ several) - {"sparse_linear_route", "sparse_linear_fp8_route", "sparse_linear_fp8"}:
            found[case.name] = read, several
    assert found == {}


@pytest.mark.parametrize("kernel", cases_by_kernel([], [], torch.float32))
def test_every_configuration_is_right(kernel, device):
    """Every configuration that autotuning may choose runs, unless the device has no room for it."""
    wrong = {}
    for case in cases_for([(256, 512)], [16], torch.bfloat16, kernel):
        for request in tuning.requests_of(case, device):
            for config in request.configs:
                with autotune.forced({**request.forced, request.op: config}):
                    try:
                        problem = case.check(device)
                    except Exception as error:
                        problem = None if "out of resource" in str(error) else repr(error)
                if problem:
                    wrong[case.name, autotune.describe(config)] = problem
    assert wrong == {}


@pytest.mark.parametrize("shape", [(4096, 11008), (11008, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_sparse_tensor_cores_compute_a_product_exactly(dtype, shape, device):
    """Every variant: where one is wrong, sparse_linear would warn and take Triton's kernel."""
    gpu = mma.limits_of(device)
    variants = {
        mma.variant_of(config, product, gpu)
        for product in (mma.Product(tokens, *shape, dtype) for tokens in (8, 16, 32, 64, 128))
        for config in (*mma.CONFIGS, *mma.configs_for(product, gpu))
    }
    if gpu.has_wgmma:
        variants |= {
            mma.variant_of(config, mma.Product(tokens, *shape, dtype, fp8=True), gpu)
            for tokens in (8, 16, 32, 64, 128)
            for config in mma.WIDE_CONFIGS
        }
    fitting = [variant for variant in variants if variant.kernel.shared_bytes <= gpu.block_bytes]
    assert [variant.kernel.name for variant in fitting if not mma.is_right(variant, device)] == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, *DTYPES], ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 5, 100), (2, 11008)], ids=str)
def test_permute_of_every_type(shape, dtype, device):
    x = torch.randint(0, 120, shape, device=device).to(torch.uint8).view(torch.uint8)
    x = x.view(dtype) if dtype.itemsize == 1 else x.to(dtype)
    index = order(shape[-1], device)
    y = permute(x, index)
    bytes_of = torch.uint8 if dtype.itemsize == 1 else dtype
    assert y.is_contiguous()
    assert torch.equal(y.view(bytes_of), permute_reference(x.view(bytes_of), index))


def test_permute_of_strided_rows(device):
    x = torch.randn(64, 300, device=device, dtype=torch.bfloat16)[:, 20:276]
    index = order(256, device)
    assert torch.equal(permute(x, index), permute_reference(x, index))
    assert torch.equal(permute(x.t(), order(64, device).sort().values), x.t())


def test_permute_beyond_32_bit_addresses(device):
    if torch.cuda.get_device_properties(device).total_memory < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    rows, channels = (1 << 31) // 4096 + 64, 4096
    x = torch.randint(-120, 120, (rows, channels), device=device, dtype=torch.int8)
    index = order(channels, device)
    y = permute(x, index)
    for part in (slice(0, 8), slice(rows - 72, rows)):
        assert torch.equal(y[part], permute_reference(x[part], index))


@pytest.mark.parametrize("kind", ["rms", "rms_float", "layer"])
@pytest.mark.parametrize("channels", [64, 100, 4096, 11008])
def test_norms_against_the_reference(kind, channels, device):
    x = torch.randn(33, channels, device=device, dtype=torch.bfloat16)
    weight = torch.randn(channels, device=device, dtype=torch.bfloat16)
    bias = weight.flip(0).contiguous() if kind == "layer" else None
    arguments = (x, weight, bias, order(channels, device), NormVariant(kind, 1e-5, 1.0))
    assert relative_error(norm_permute(*arguments), norm_permute.__wrapped__(*arguments)) < 5e-3


@pytest.mark.parametrize("size", [1, 7, 32, 48, 64, 128, 256])
def test_assignment_of_every_size(size, device):
    case = assignment_case(17, size)
    assert case.check(device) is None
    tied = torch.randint(0, 3, (9, size, size), device=device).float()
    index = assignment(tied)
    assert torch.equal(index.long().sort(1).values, torch.arange(size, device=device).expand(9, -1))
    assert case.error((tied, index), (tied, assignment(tied.cpu()).to(device))) == 0


def test_assignment_refuses_nan(device):
    score = torch.randn(3, 64, 64, device=device)
    score[1, 2, 3] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        assignment(score)


@pytest.mark.parametrize(("kept", "group"), [(2, 4), (1, 4), (4, 8), (3, 8), (8, 16)])
@pytest.mark.parametrize("row_major", [False, True])
def test_masks_keep_the_same_weights(kept, group, row_major, device):
    weight = torch.randn(192, 320, device=device, dtype=torch.bfloat16)
    weight = weight if row_major else weight.t().contiguous().t()
    sizes = [64] * 5
    index = torch.cat([start + order(64, device) for start in range(0, 320, 64)])
    factors, pattern = ImportanceFactors(1, torch.rand(320, device=device) + 0.5), NMPattern(kept, group)
    out = nm_mask(weight, factors, index, sizes, pattern)
    expected = nm_mask_reference(weight, factors, index, sizes, pattern)
    assert torch.equal(out, expected)
    assert not bool((out.eq(0) & out.signbit()).any())


@pytest.mark.parametrize("rounds", [0, 1, 5])
@pytest.mark.parametrize("size", [16, 48, 64, 128])
def test_sinkhorn_gradients(rounds, size, device):
    logits = torch.randn(6, size, size, device=device, requires_grad=True)
    grad = torch.randn(6, size, size, device=device)
    (found,) = torch.autograd.grad(sinkhorn(logits, 0.5, rounds), logits, grad)
    wide = logits.detach().double().cpu().requires_grad_()
    (expected,) = torch.autograd.grad(sinkhorn(wide, 0.5, rounds), wide, grad.double().cpu())
    assert relative_error(found.cpu(), expected) < 1e-3


def test_the_same_input_gives_the_same_bits(device):
    for case in cases_for([(512, 1024)], [16, 512], torch.bfloat16):
        inputs = case.make(device, 3)
        first, second = case.run(*inputs), case.run(*inputs)
        for a, b in zip(*((x,) if isinstance(x, Tensor) else x for x in (first, second)), strict=True):
            assert torch.equal(a, b), case.name


def test_operators_pass_opcheck(device):
    x = torch.randn(4, 64, device=device, requires_grad=True)
    index = order(64, device)
    values, positions = pack(Random(0, device).two_of_four(32, 64, torch.float32), NMPattern(2, 4))
    logits = torch.randn(3, 32, 32, device=device, requires_grad=True)
    weight = torch.randn(64, device=device, requires_grad=True)
    ops = torch.ops.permtriton
    scales = torch.rand(3, 5, 32, device=device) + 0.5
    mask = (torch.randn(48, 64, device=device), 1, torch.rand(64, device=device), None, None, index, [64])
    swaps = [torch.rand(shape, device=device) for shape in (4 * [(8, 48)] + [(8,)] + 4 * [(9, 48)] + [(9,)])]
    for op, arguments in [
        (ops.sinkhorn_backward.default, (torch.rand(3, 32, 32, device=device), logits.detach(), scales, scales, 0.5)),
        (ops.nm_mask.default, (*mask, 2, 4)),
        (ops.swap_gains.default, swaps),
        (ops.unpack.default, (values, positions, 64, 2, 4)),
        (ops.permute.default, (x, index)),
        (ops.norm_permute.default, (x, weight, None, index, "rms", 1e-5, 0.0)),
        (ops.sinkhorn.default, (logits, 0.5, 5)),
        (ops.assignment.default, (logits.detach(),)),
        (ops.sparse_linear.default, (x, values, positions, None, index, 64, 2, 4)),
    ]:
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(op, arguments, test_utils=checks)


def test_compiled_without_a_break(device):
    x = torch.randn(8, 128, device=device, dtype=torch.bfloat16)
    index, weight = order(128, device), torch.randn(128, device=device, dtype=torch.bfloat16)
    values, positions = pack(Random(0, device).two_of_four(64, 128, torch.bfloat16), NMPattern(2, 4))

    def layer(x: Tensor) -> Tensor:
        hidden = norm_permute(permute(x, index), weight, None, index, NormVariant("rms", 1e-5))
        return sparse_linear(hidden, values, positions, None, index, 128, NMPattern(2, 4)) * 2

    assert relative_error(torch.compile(layer, fullgraph=True)(x), layer(x)) < 1e-2


def test_a_product_in_float8_is_compiled_without_a_break_and_captured(device):
    """By its kernel where there is one; the input is quantized in the same graph."""
    x = torch.randn(8, 512, device=device, dtype=torch.bfloat16)
    packed = pack_fp8(Random(0, device).two_of_four(64, 512, torch.bfloat16), NMPattern(2, 4))

    def layer(x: Tensor) -> Tensor:
        return sparse_linear_fp8(x * 2, *packed, None, order_of_x, 512, NMPattern(2, 4))

    order_of_x = order(512, device)
    expected = layer(x)
    assert relative_error(torch.compile(layer, fullgraph=True)(x), expected) < 1e-2
    replay, (out,) = timing.captured([lambda: layer(x)], device)
    out.zero_()
    replay()
    assert torch.equal(out, expected)


def test_tuning_finds_a_configuration_that_is_used(device, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(autotune, "_STATE", autotune._State())
    monkeypatch.setattr(tuning, "MILLISECONDS", 5)
    todo = cases_for([(256, 512)], [64], torch.bfloat16, "permute")
    keys = {trial.key for trial in tuning.tune(todo, device, autotune.machine_key(), autotune.cache_file())}
    assert keys
    for case in todo:
        assert case.check(device) is None
    assert set(autotune._fastest()) >= keys


def test_after_a_failed_capture_numbers_can_be_drawn_and_captured(device):
    with pytest.raises(RuntimeError):
        timing.captured([lambda: torch.randn(4, device=device).sum().item()], device)
    assert torch.randn(4, device=device).isfinite().all()
    replay, (out,) = timing.captured([lambda: torch.full((4,), 2.0, device=device) * 3], device)
    out.zero_()
    replay()
    assert out.tolist() == [6.0] * 4


def test_the_relaxation_of_a_step_fits_beside_a_model(device):
    """Besides logits and result, a forward pass keeps at most 2 x rounds x B float32 values per block."""
    blocks, size, rounds = 2048, 64, 5
    logits = torch.randn(blocks, size, size, device=device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = torch.ops.permtriton.sinkhorn(logits, 0.5, rounds)
    torch.cuda.synchronize()
    allowed = logits.nbytes + 2 * rounds * size * 4 * blocks
    assert torch.cuda.max_memory_allocated() - before <= allowed + (4 << 20)
    assert relative_error(out[0], sinkhorn_reference(logits.double(), 0.5, rounds)[0]) < 1e-4
