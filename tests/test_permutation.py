import pytest
import torch
from torch import Tensor

from permtriton.util.permutation import compose, identity, inverse, is_permutation

from .kernel_inputs import index_of

CHANNELS = [1, 2, 7, 64]


def matrix_of(index: Tensor) -> Tensor:
    matrix = torch.zeros(index.numel(), index.numel())
    matrix[index, torch.arange(index.numel())] = 1
    return matrix


@pytest.mark.parametrize("channels", CHANNELS)
def test_inverse_undoes(channels):
    index, x = index_of(channels), torch.rand(channels)
    assert torch.equal(x[index][inverse(index)], x)
    assert torch.equal(x[inverse(index)][index], x)
    assert torch.equal(inverse(inverse(index)), index)
    assert torch.equal(matrix_of(inverse(index)), matrix_of(index).T)


@pytest.mark.parametrize("channels", CHANNELS)
def test_compose_applies_the_first_first(channels):
    first, second, x = index_of(channels, 1), index_of(channels, 2), torch.rand(channels)
    assert torch.equal(x[first][second], x[compose(first, second)])
    assert torch.equal(matrix_of(compose(first, second)), matrix_of(first) @ matrix_of(second))
    assert torch.equal(compose(first, inverse(first)), identity(channels))


def test_the_matrix_orders_the_columns_of_a_weight():
    weight, index = torch.rand(4, 6), index_of(6)
    assert torch.equal(weight[:, index], weight @ matrix_of(index))


@pytest.mark.parametrize("index", [[0, 0, 1], [0, 1, 3], [-1, 0, 1], [1, 2, 3]])
def test_is_permutation_refuses(index):
    assert not is_permutation(torch.tensor(index))
