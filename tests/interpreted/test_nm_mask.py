import pytest
import torch
from torch import Tensor

from permtriton.kernels import nm_mask as file
from permtriton.util.sparsity import NMPattern

from ..kernel_inputs import TWO_FOUR, block_index, factors_of


def laid_out(values_OC: Tensor, layout: str) -> Tensor:
    """The same values in other strides."""
    if layout == "input-major":
        return values_OC.t().contiguous().t()
    if layout == "strided":
        wide = torch.zeros(values_OC.shape[0] * 2, values_OC.shape[1] * 3, dtype=values_OC.dtype)
        wide[1::2, 2::3] = values_OC
        return wide[1::2, 2::3]
    return values_OC.contiguous()


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
