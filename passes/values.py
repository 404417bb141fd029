"""What channel rules see instead of parameters and indices, and the products with weights that they record."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx


@dataclass(frozen=True)
class ParameterValue:
    """A parameter as an operator reads it: possibly transposed, and permuted by a pass.

    Attributes:
        name: Name in ``model.named_parameters()``.
        shape: Current shape.
        dims: For each current dimension, the dimension of the stored parameter.
        orders: For each current dimension, an int64 index of its positions in the stored parameter; None where they are
            in order.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    orders: tuple[Tensor | None, ...]

    def permuted(self, index: Tensor, dim: int) -> "ParameterValue":
        """Returns the parameter with one dimension in the order of ``index``."""
        orders, dim = list(self.orders), dim % len(self.shape)
        before = orders[dim]
        orders[dim] = index if before is None else before[index]
        return replace(self, orders=tuple(orders))

    def transposed(self) -> "ParameterValue":
        """Returns the parameter with its dimensions reversed."""
        return replace(self, shape=self.shape[::-1], dims=self.dims[::-1], orders=self.orders[::-1])


@dataclass(frozen=True)
class IndexValue:
    """A permutation that a pass has put into the graph.

    Attributes:
        index: int64 ``[C]`` on the CPU.
    """

    index: Tensor


@dataclass(frozen=True)
class LinearCall:
    """One matrix product of an activation with a parameter.

    Attributes:
        parameter: Name of the weight.
        in_dim: Dimension of the weight that is contracted.
        node: Graph node of the call.
        source: Node of the activation, before any reshaping.
        problem: Why the channels of the input are not known; empty where they are.
    """

    parameter: str
    in_dim: int
    node: fx.Node
    source: fx.Node
    problem: str


def leaves(value: Any) -> list[Any]:
    """Returns everything inside nested arguments, in order."""
    collected: list[Any] = []
    fx.node.map_aggregate(value, lambda leaf: collected.append(leaf) or leaf)  # type: ignore[func-returns-value]
    return collected
