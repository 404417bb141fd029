import pytest
import torch

from permtriton.kernels import packing as kernels
from permtriton.kernels.packing import pack, unpack_reference

from ..kernel_inputs import TWO_FOUR, sparse


@pytest.mark.parametrize("config", kernels.CONFIGS, ids=str)
@pytest.mark.parametrize(
    ("rows", "channels", "dtype"),
    [(1, 16, torch.float32), (9, 1040, torch.bfloat16), (5, 2064, torch.float16), (0, 32, torch.float32)],
)
def test_unpacks_bit_for_bit(rows, channels, dtype, config, monkeypatch):
    monkeypatch.setattr(kernels, "config_for", lambda *_: config)
    weight = sparse(rows, channels // 4, dtype=dtype)
    packed = pack(weight, TWO_FOUR)
    assert torch.equal(kernels.unpack_triton(*packed, channels, TWO_FOUR), weight)


def test_float8_is_moved_as_bytes():
    weight = sparse(9, 16).to(torch.float8_e4m3fn)
    values, positions = pack(weight.float(), TWO_FOUR)
    found = kernels.unpack_triton(values.to(weight.dtype), positions, 64, TWO_FOUR)
    assert found.dtype == weight.dtype
    assert torch.equal(found.view(torch.uint8), (weight.float() + 0.0).to(weight.dtype).view(torch.uint8))


def test_strided_parts():
    weight = sparse(6, 16)
    values, positions = (part.t().contiguous().t() for part in pack(weight, TWO_FOUR))
    arguments = (values, positions, 64, TWO_FOUR)
    assert torch.equal(kernels.unpack_triton(*arguments), unpack_reference(*arguments))


@pytest.mark.parametrize(("channels", "dtype"), [(24, torch.float32), (16, torch.float64)])
def test_what_the_kernel_does_not_take(channels, dtype):
    assert not kernels.supports(dtype, channels, TWO_FOUR)
