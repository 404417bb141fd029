import pytest
import torch
from torch import Tensor

from permtriton.kernels import permute_triton as permute_file
from permtriton.kernels.launch import Config
from permtriton.kernels.permute import permute_triton
from permtriton.kernels.permute_triton import gather_rows

from ..kernel_inputs import poison

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.bool, torch.int64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip
SMALL = Config({"TILE": 32, "PACK_BITS": 32}, num_warps=1)


def bits(x: Tensor) -> Tensor:
    """NaN equals itself here."""
    return x.contiguous().view(torch.uint8)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    x = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)
    return x if dtype != torch.bool else torch.rand(shape) > 0.5


def same(x: Tensor, index: Tensor, config: Config | None = None) -> None:
    y = gather_rows(x.flatten(0, -2), index, config).view(x.shape) if config else permute_triton(x, index)
    expected = x.contiguous().flatten(0, -2)[:, index.long()].view(x.shape) if x.element_size() > 1 else None
    if expected is None:
        expected = x.contiguous().view(torch.uint8).flatten(0, -2)[:, index.long()].view(x.dtype).view(x.shape)
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    assert torch.equal(bits(y), bits(expected))


@pytest.fixture
def packs_few_rows(monkeypatch):
    monkeypatch.setattr(permute_file, "PACKED_ROWS", 2)


@pytest.fixture
def poisoned(monkeypatch):
    poison(monkeypatch)
