import pytest
import torch
from torch import Tensor

from permtriton.kernels import nm_mask as file
from permtriton.kernels import nm_mask_backward_triton as backward
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.launch import Config
from permtriton.util.sparsity import NMPattern

from ..kernel_inputs import TWO_FOUR, block_index, factors_of

TOLERANCE = 1e-4  # the interpreter cuts float32 to bfloat16 where GPUs round: four times their error
SHORT_TOLERANCE = 1e-2  # of weights of 16 bits, whose products have operands of 8 bits


def laid_out(values_OC: Tensor, layout: str) -> Tensor:
    """The same values in other strides."""
    if layout == "input-major":
        return values_OC.t().contiguous().t()
    if layout == "strided":
        wide = torch.zeros(values_OC.shape[0] * 2, values_OC.shape[1] * 3, dtype=values_OC.dtype)
        wide[1::2, 2::3] = values_OC
        return wide[1::2, 2::3]
    return values_OC.contiguous()


def in_float64(factors: ImportanceFactors) -> ImportanceFactors:
    wide = (None if factor is None else factor.double() for factor in (factors.scale, factors.row, factors.column))
    return ImportanceFactors(factors.power, *wide)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize(
    ("layout", "kept", "group"),
    [
        *(("input-major", kept, group) for kept, group in ((2, 4), (1, 2), (2, 3))),
        *(("row-major", kept, group) for kept, group in ((2, 4), (1, 4))),
        ("strided", 3, 4),
    ],
)
def test_forward_is_the_reference_bit_for_bit(kept, group, layout):
    """Eighths, so that many scores are equal, and negative weights, so that a -0.0 would be seen."""
    sizes = [2 * group, 2 * group, group]
    rows, channels = 21, sum(sizes)
    weight = laid_out(torch.randint(-4, 5, (rows, channels)).float() / 8, layout)
    weight[0, 0] = -0.0
    factors, index = factors_of("row and column", rows, channels), block_index(sizes)
    arguments = (weight, factors, index, sizes, NMPattern(kept, group))
    found = file.nm_mask_triton(*arguments)
    expected = file.nm_mask_reference(*arguments)
    assert same_bits(found, expected)
    assert not (found == 0)[found.signbit()].any()
    assert found.stride() == expected.stride() == (1, rows)


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (torch.float32, "power 1"),
        (torch.bfloat16, "power 2"),
        (torch.float16, "row and column"),
        (torch.bfloat16, "row and column"),
    ],
)
def test_forward_of_every_form_and_dtype(dtype, form):
    weight = laid_out(torch.randn(17, 12).to(dtype), "input-major")
    arguments = (weight, factors_of(form, 17, 12), block_index([8, 4]), [8, 4], TWO_FOUR)
    assert same_bits(file.nm_mask_triton(*arguments), file.nm_mask_reference(*arguments))


@pytest.mark.parametrize("number", range(len(file.CONFIGS)))
def test_forward_in_every_configuration(number, monkeypatch):
    monkeypatch.setattr(file, "config_for", lambda op, configs, shape, dtype: configs[number])
    weight = laid_out(torch.randn(1030, 12), "input-major")
    arguments = (weight, factors_of("power 2", 1030, 12), block_index([8, 4]), [8, 4], TWO_FOUR)
    assert same_bits(file.nm_mask_triton(*arguments), file.nm_mask_reference(*arguments))


def test_forward_writes_every_weight():
    arguments = (torch.randn(5, 8), factors_of("power 1", 5, 8), block_index([8]), [8], TWO_FOUR)
    assert file.nm_mask_triton(*arguments).isfinite().all()


BACKWARD = [
    ([16, 16, 48], 4, 160, "input-major", "power 2"),
    ([64, 32], 8, 32, "input-major", "power 2"),
    ([32, 32, 16], 4, 80, "input-major", "row and column"),
    ([16], 2, 48, "row-major", "power 2"),
    ([48, 16], 16, 16, "input-major", "row and column"),
    ([64], 32, 16, "strided", "row and column"),
]


@pytest.mark.parametrize(("sizes", "group", "rows", "layout", "form"), BACKWARD)
def test_backward_is_close_to_the_reference_in_float64(sizes, group, rows, layout, form):
    channels = sum(sizes)
    grad, weight = (laid_out(torch.randn(rows, channels), layout) for _ in range(2))
    factors, index = factors_of(form, rows, channels), block_index(sizes)
    found = backward.nm_mask_backward_triton(grad, weight, factors, index, sizes, group)
    doubles = in_float64(factors)
    expected = file.nm_mask_backward_reference(grad.double(), weight.double(), doubles, index, sizes, group)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE, atol=TOLERANCE * expected.abs().max().item())


@pytest.mark.parametrize(
    ("sizes", "rows", "splits", "dtype"),
    [([32, 16], 304, 3, torch.float32), ([48, 16], 304, 3, torch.bfloat16), ([32, 16], 304, 1, torch.float16)],
)
def test_backward_over_splits_and_dtypes(dtype, splits, sizes, rows, monkeypatch):
    """Every split's partial sums count, once."""
    config = Config({"TILE_O": 32, "PROGRAMS": 2 * splits}, num_warps=4)
    monkeypatch.setattr(backward, "config_for", lambda op, configs, shape, dtype: config)
    monkeypatch.setattr(backward, "LEAST_ROWS", 100)
    grad, weight = (laid_out(torch.randn(rows, sum(sizes)).to(dtype), "input-major") for _ in range(2))
    arguments = (factors_of("row and column", rows, sum(sizes)), block_index(sizes), sizes, 4)
    found = backward.nm_mask_backward_triton(grad, weight, *arguments)
    expected = file.nm_mask_backward_reference(grad, weight, *arguments)
    tolerance = TOLERANCE if dtype == torch.float32 else SHORT_TOLERANCE
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
    assert torch.equal(found, backward.nm_mask_backward_triton(grad, weight, *arguments))


def angle(found: Tensor, expected: Tensor) -> float:
    """1 - cosine of two gradients of a block, less the means of rows and columns, which Sinkhorn's backward drops."""

    def centred(block: Tensor) -> Tensor:
        return block - block.mean(0) - block.mean(1, keepdim=True) + block.mean()

    return 1 - torch.cosine_similarity(
        *(centred(block.double().view(64, 64)).flatten() for block in (found, expected)), 0
    )


@pytest.mark.parametrize("hard", ["nothing", "rows cancel to 5%", "weights within 20%", "gradients all of one sign"])
def test_short_products_keep_the_direction_of_the_gradient(hard):
    """Rounded operands turn dP no further than it was turned when the weights and gradients were rounded."""
    rows = 192
    grad, weight = torch.randn(rows, 64), torch.randn(rows, 64) * 0.02
    if hard == "rows cancel to 5%":
        weight[rows // 2 :], grad[rows // 2 :] = weight[: rows // 2], 0.05 * grad[rows // 2 :] - grad[: rows // 2]
    elif hard == "weights within 20%":
        weight = weight.sign() * (1 + torch.rand(rows, 64) / 5)
    elif hard == "gradients all of one sign":
        grad = grad.abs() + 10
    arguments = (factors_of("power 1", rows, 64), block_index([64]), [64], 4)
    exact = file.nm_mask_backward_reference(grad.double(), weight.double(), in_float64(arguments[0]), *arguments[1:])
    grad, weight = (laid_out(values.bfloat16(), "input-major") for values in (grad, weight))
    rounded = file.nm_mask_backward_reference(grad.double(), weight.double(), in_float64(arguments[0]), *arguments[1:])
    found = backward.nm_mask_backward_triton(grad, weight, *arguments)
    assert angle(found, rounded) < 1.25 * angle(rounded, exact)
    if hard in ("nothing", "gradients all of one sign"):
        assert angle(found, rounded) < 2e-5


@pytest.mark.parametrize("number", range(len(backward.CONFIGS)))
def test_backward_in_every_configuration(number, monkeypatch):
    monkeypatch.setattr(backward, "config_for", lambda op, configs, shape, dtype: configs[number])
    grad, weight = (laid_out(torch.randn(144, 64), "input-major") for _ in range(2))
    arguments = (factors_of("power 1", 144, 64), block_index([64]), [64], 4)
    found = backward.nm_mask_backward_triton(grad, weight, *arguments)
    expected = file.nm_mask_backward_reference(grad, weight, *arguments)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE * expected.abs().max().item())


@pytest.mark.parametrize(
    ("rows", "blocks", "group", "fits"),
    [
        (32, [64, 16], 4, True), (24, [64], 4, False), (32, [128], 4, False), (32, [64, 8], 4, False),
        (32, [48], 3, False),
    ],
)  # fmt: skip
def test_which_sizes_the_backward_kernel_takes(rows, blocks, group, fits):
    assert backward.takes(torch.empty(rows, sum(blocks)), blocks, group) == fits


@pytest.mark.parametrize("dead", ["weights", "statistics"])
def test_zeros_give_finite_gradients(dead):
    weight, grad = torch.randn(16, 16), torch.randn(16, 16)
    scale = torch.ones(16)
    (weight if dead == "weights" else scale).zero_()
    arguments = (weight, ImportanceFactors(1, scale), block_index([16]), [16], 4)
    found = backward.nm_mask_backward_triton(grad, *arguments)
    torch.testing.assert_close(found, file.nm_mask_backward_reference(grad, *arguments), rtol=TOLERANCE, atol=TOLERANCE)
