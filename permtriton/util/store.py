"""The memory for large tensors other than the model's weights: inputs of layers, targets, copies of weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Store:
    """The memory in which new tensors are made; other tensors stay where they are unless the store onloads."""

    device: torch.device | None = None  # None for the CPU
    # whether layers come to a GPU one by one (`permtriton.running.onload`), and steps on a whole model work on one
    # layer at a time: all large tensors are then in host memory
    onloads: bool = False

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def on(self, device: torch.device) -> "Store":
        """Returns the store for tensors that ``device`` reads repeatedly: on it, or this store if it onloads."""
        return self if self.onloads else Store(device)

    def moved(self, tensor: Tensor) -> Tensor:
        """Returns the tensor in this store: the same object, or a copy."""
        return tensor.cpu() if self.onloads else tensor

    def copied(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu" if self.onloads else tensor.device, copy=True)


MEMORY = Store()
