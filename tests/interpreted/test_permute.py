import pytest
import torch
from torch import Tensor

from permtriton.errors import ModelError
from permtriton.kernels import permute_triton as permute_file
from permtriton.kernels.launch import Config
from permtriton.kernels.permute import permute_backward_triton, permute_reference, permute_triton
from permtriton.kernels.permute_triton import CONFIGS, gather_rows

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
    """Memory that the kernel does not write keeps a pattern that no test writes by chance everywhere."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).view(torch.uint8).fill_(0xA5).view(k["dtype"]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_every_type_bit_for_bit(dtype, packed, monkeypatch):
    monkeypatch.setattr(permute_file, "PACKED_ROWS", 2 if packed else 1000)
    for shape in ((2, 7, 12), (5, 16), (1, 1), (9, 40)):
        same(random(*shape, dtype=dtype), torch.randperm(shape[-1]), SMALL)


@pytest.mark.usefixtures("packs_few_rows", "poisoned")
@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_every_configuration(config):
    same(random(11, 300, dtype=torch.bfloat16), torch.randperm(300), CONFIGS[config])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_an_index_of_any_whole_numbers(dtype):
    same(random(3, 100), torch.randperm(100).to(dtype))


@pytest.mark.usefixtures("poisoned")
def test_rows_longer_than_a_program_holds(monkeypatch):
    monkeypatch.setattr(permute_file, "STAGED", 64)
    monkeypatch.setattr(permute_file, "DIRECT_TILE", 32)
    for dtype, channels in ((torch.bfloat16, 65), (torch.int8, 130), (torch.float64, 33)):
        same(random(5, channels, dtype=dtype), torch.randperm(channels))


def test_order_inside_blocks():
    index = torch.cat([torch.randperm(64) + start for start in (0, 64, 128)])
    same(random(6, 192, dtype=torch.bfloat16), index)


@pytest.mark.usefixtures("packs_few_rows")
@pytest.mark.parametrize("view", [lambda x: x.mT, lambda x: x[:, ::2], lambda x: x[:1].expand(8, 8), lambda x: x[::3],
                                  lambda x: x.view(2, 4, 8).transpose(0, 1), lambda x: x[0]])  # fmt: skip
def test_strided_input(view):
    x = view(random(8, 8, dtype=torch.float16))
    index = torch.randperm(x.shape[-1])
    assert torch.equal(bits(permute_triton(x, index)), bits(permute_triton(x.contiguous(), index)))
    assert torch.equal(bits(permute_triton(x, index)), bits(permute_reference(x, index)))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (3, 0)])
def test_nothing_to_do(shape):
    assert permute_triton(torch.empty(shape), torch.arange(shape[-1])).shape == shape


def test_other_dimensions_and_wide_values_run_the_reference():
    x = torch.randn(4, 3, dtype=torch.complex128)
    assert torch.equal(permute_triton(x, torch.tensor([2, 0, 1])), x[:, [2, 0, 1]])
    assert torch.equal(permute_triton(x, torch.tensor([2, 0, 3, 1]), 0), x[[2, 0, 3, 1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backward_is_the_gradient(dtype):
    x, index = torch.randn(2, 3, 20, dtype=torch.float64, requires_grad=True), torch.randperm(20)
    grad = torch.randn(2, 3, 20).to(dtype)
    (expected,) = torch.autograd.grad(permute_reference(x, index), x, grad.double())
    for narrow in (index, index.byte()):
        assert torch.equal(permute_backward_triton(grad, narrow).double(), expected)


def test_an_entry_that_is_none_reads_channel_0():
    x = torch.arange(8.0).view(2, 4) + 1
    assert permute_triton(x, torch.tensor([3, 4, -1, 10**6])).tolist() == [[4, 1, 1, 1], [8, 5, 5, 5]]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ModelError, match=r"index of shape \[7\]"):
        permute_triton(torch.zeros(2, 8), torch.arange(7))


def test_the_convention_is_seen():
    """Break it: the inverse is another gather."""
    x, index = torch.randn(4, 24), torch.randperm(24)
    assert not torch.equal(permute_triton(x, index), permute_backward_triton(x, index))
