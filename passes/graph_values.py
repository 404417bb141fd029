"""What channel rules read in place of parameters and of outer products, and the products that they record."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True)
class ParameterValue:
    """A parameter, possibly with moved or permuted dimensions, or with an elementwise function applied to it."""

    name: str  # name in ``model.named_parameters()``
    shape: tuple[int, ...]  # current shape
    # for each current dimension, the dimension of the stored parameter; None for an added one of size 1
    dims: tuple[int | None, ...]
    # for each current dimension, an int64 index of its positions in the stored parameter; None where they are in order
    orders: tuple[Tensor | None, ...]
    # whether an elementwise function was applied to the parameter
    computed: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether the value is a stored parameter of two dimensions, possibly transposed."""
        return len(self.shape) == 2 and None not in self.dims and not self.computed

    def permuted(self, index: Tensor, dim: int) -> "ParameterValue":
        orders, dim = list(self.orders), dim % len(self.shape)
        order = orders[dim]
        orders[dim] = index if order is None else order[index]
        return replace(self, orders=tuple(orders))

    def with_dims(self, dims: Sequence[int | None]) -> "ParameterValue":
        """Returns the parameter with its present dimensions in another order; None adds one of size 1."""
        return replace(
            self,
            shape=tuple(1 if dim is None else self.shape[dim] for dim in dims),
            dims=tuple(None if dim is None else self.dims[dim] for dim in dims),
            orders=tuple(None if dim is None else self.orders[dim] for dim in dims),
        )

    def transposed(self) -> "ParameterValue":
        return self.with_dims(range(len(self.shape) - 1, -1, -1))

    def moved(self, operator: Callable[..., Any], arguments: Mapping[str, Any]) -> "ParameterValue | None":
        """Returns an operator's result on the parameter; None unless it only moves, adds or drops dimensions."""
        # The strides of all dimensions differ, those of dimensions of size 1, too.
        strides = [math.prod(size + 1 for size in self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        sample = torch.empty_strided(self.shape, strides, device="meta")
        try:
            result = operator(**{**arguments, "self": sample})
        except RuntimeError:  # a view that merges dimensions
            return None
        if not isinstance(result, Tensor) or result.numel() != sample.numel():
            return None
        remaining = {place: dim for dim, place in enumerate(zip(strides, self.shape, strict=True))}
        dims = [remaining.pop(place, None) for place in zip(result.stride(), result.shape, strict=True)]
        if any(dim is None and size > 1 for dim, size in zip(dims, result.shape, strict=True)):
            return None
        return self.with_dims(dims)


@dataclass(frozen=True)
class Crossed:
    """Ids of a tensor whose elements belong to several channels at once, such as those of an outer product."""

    parts: tuple[Tensor, ...]  # tensors of ids, all of one shape: the channels of each factor

    @property
    def shape(self) -> torch.Size:
        return self.parts[0].shape


@dataclass(frozen=True)
class Products:
    """All products of activations with one weight, in execution order."""

    parameter: str  # name of the weight
    in_dim: int  # dimension of the weight that is contracted
    nodes: list[fx.Node] = field(default_factory=list)  # graph nodes of the products
    sources: list[fx.Node] = field(default_factory=list)  # node of each activation, before any reshaping

    @property
    def owner(self) -> str:
        """Name of the module that holds the weight."""
        return self.parameter.rpartition(".")[0]


def leaves(value: Any) -> list[Any]:
    collected: list[Any] = []
    fx.node.map_aggregate(value, lambda leaf: collected.append(leaf) or leaf)  # type: ignore[func-returns-value]
    return collected
