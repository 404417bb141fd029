import pytest
import torch
from torch import Tensor

from permtriton.kernels.permute import permute
from permtriton.util.permutation import compose, inverse

from .kernel_inputs import index_of


def values_of(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize("shape", [(5,), (1,), (3, 8), (2, 3, 12), (0, 4), (2, 1, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool])
def test_each_output_channel_is_the_named_input_channel(shape, dtype):
    x, index = values_of(*shape).to(dtype), index_of(shape[-1])
    y = permute(x, index)
    assert y.dtype == dtype
    assert y.shape == x.shape
    for j, source in enumerate(index.tolist()):
        assert torch.equal(y[..., j], x[..., source])


def test_undone_by_the_inverse():
    x, index = values_of(4, 16), index_of(16)
    assert torch.equal(permute(permute(x, index), inverse(index)), x)
    assert not torch.equal(permute(x, index), x)


def test_two_in_a_row_are_their_composition():
    x, first, second = values_of(4, 16), index_of(16, 1), index_of(16, 2)
    assert torch.equal(permute(permute(x, first), second), permute(x, compose(first, second)))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_along_any_dimension(dim):
    x = values_of(3, 5, 7)
    index = index_of(x.shape[dim])
    expected = permute(x.movedim(dim, -1), index).movedim(-1, dim)
    assert torch.equal(permute(x, index, dim), expected)
    assert permute(x, index, dim).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_an_index_of_any_whole_numbers(dtype):
    """Also uint8, which torch would read as a mask."""
    x, index = values_of(2, 200).float(), index_of(200)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    results = [permute(leaves[0], index), permute(leaves[1], index.to(dtype))]
    for result in results:
        (result * values_of(200)).sum().backward()
    assert torch.equal(*results)
    assert torch.equal(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize(
    ("index", "dim", "named"),
    [
        (index_of(7), -1, r"\[7\] for dimension -1 of \[2, 8\]"),
        (index_of(8), 0, r"\[8\] for dimension 0"),
        (index_of(8).view(2, 4), -1, r"\[2, 4\]"),
        (index_of(8).float(), -1, "float32"),
        (torch.ones(8, dtype=torch.bool), -1, "bool"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_does_not_fit_is_refused(index, dim, named, device):
    with pytest.raises(AssertionError, match=named):
        permute(torch.zeros(2, 8, device=device), index.to(device), dim)


@pytest.mark.parametrize("view", [lambda x: x.mT, lambda x: x[:, ::2], lambda x: x[:1].expand(8, 8)])
def test_strided_input(view):
    x, index = view(values_of(8, 8)), index_of(8)
    index = index if x.shape[-1] == 8 else index_of(x.shape[-1])
    assert torch.equal(permute(x, index), permute(x.contiguous(), index))


def test_output_is_a_copy():
    x = values_of(2, 4)
    permute(x, torch.arange(4))[0, 0] = 99
    assert torch.equal(x, values_of(2, 4))


def test_gradcheck_and_second_gradient():
    x, index = torch.rand(2, 6, dtype=torch.float64, requires_grad=True), index_of(6)
    assert torch.autograd.gradcheck(lambda v: permute(v, index), x)
    assert torch.autograd.gradgradcheck(lambda v: permute(v, index).pow(3), x)
    assert torch.autograd.gradcheck(lambda v: permute(v.mT, index.int(), 0).pow(2), x)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.slow
def test_compiles_without_a_break(dynamic):
    x, index = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)), index_of(8)
    compiled = torch.compile(lambda v, i: permute(v * 2, i).cos(), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    results = [compiled(leaves[0], index), permute(leaves[1] * 2, index).cos()]
    for result in results:
        result.square().sum().backward()
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
