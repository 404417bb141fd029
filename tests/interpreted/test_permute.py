import pytest
import torch
from torch import Tensor

from permtriton.kernels import autotune
from permtriton.kernels import permute as permute_file
from permtriton.kernels.launch import Config
from permtriton.kernels.permute import CONFIGS, permute_triton

DTYPES = [
    torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64,
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
    with autotune.forced({"permute": config} if config else {}):
        y = permute_triton(x, index)
    values = x.contiguous()
    values = values.view(torch.uint8) if x.element_size() == 1 else values  # torch does not index all 8-bit types
    expected = values[..., index.long()].view(x.dtype)
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    assert torch.equal(bits(y), bits(expected))


@pytest.fixture
def packs_few_rows(monkeypatch):
    monkeypatch.setattr(permute_file, "PACKED_ROWS", 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_every_type_bit_for_bit(dtype, packed, monkeypatch):
    """Rows that share words are aligned: a multiple of 16 channels."""
    monkeypatch.setattr(permute_file, "PACKED_ROWS", 2 if packed else 1000)
    for shape in ((2, 3, 12), (1, 1), (9, 48)):
        same(random(*shape, dtype=dtype), torch.randperm(shape[-1]), SMALL)


@pytest.mark.usefixtures("packs_few_rows")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("channels", [208, 300])
def test_every_configuration(config, channels):
    """One tile per program, and several, of which each is loaded while the one before it is gathered."""
    for rows in (3, 70):
        same(random(rows, channels, dtype=torch.bfloat16), torch.randperm(channels), config)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_an_index_of_any_whole_numbers(dtype):
    same(random(3, 100), torch.randperm(100).to(dtype))


def test_rows_longer_than_a_program_holds(monkeypatch):
    """Half as long if rows are not aligned."""
    monkeypatch.setattr(permute_file, "STAGED", 64)
    monkeypatch.setattr(permute_file, "DIRECT_TILE", 32)
    for dtype, channels in ((torch.bfloat16, 64), (torch.bfloat16, 60), (torch.int8, 130)):
        same(random(5, channels, dtype=dtype), torch.randperm(channels))


@pytest.mark.usefixtures("packs_few_rows")
def test_order_inside_blocks():
    index = torch.cat([torch.randperm(64) + start for start in (0, 64, 128)])
    same(random(6, 192, dtype=torch.bfloat16), index)


@pytest.mark.usefixtures("packs_few_rows")
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.mT,
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(32, 32),
        lambda x: x[::3],
        lambda x: x.view(2, 16, 32).transpose(0, 1),
        lambda x: x[0],
        lambda x: x[:, :16],
    ],
)
def test_strided_input(view):
    x = view(random(32, 32, dtype=torch.float16))
    same(x, torch.randperm(x.shape[-1]))


def test_other_dimensions_and_wide_values_run_the_reference():
    x = torch.randn(4, 3, dtype=torch.complex128)
    assert torch.equal(permute_triton(x, torch.tensor([2, 0, 1])), x[:, [2, 0, 1]])
    assert torch.equal(permute_triton(x, torch.tensor([2, 0, 3, 1]), 0), x[[2, 0, 3, 1]])


def test_an_entry_that_is_none_reads_channel_0():
    x = torch.arange(8.0).view(2, 4) + 1
    assert permute_triton(x, torch.tensor([3, 4, -1, 10**6])).tolist() == [[4, 1, 1, 1], [8, 5, 5, 5]]
