"""Where large tensors beside the weights are: inputs of layers, dense weights, targets, copies of weights."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor


class Store:
    """Memory: new tensors are made on the CPU, and others stay where they are. Subclasses use other memory."""

    # whether layers come to a GPU one by one (`permtriton.running.onload`), and steps on a whole model work on one of
    # its layers at a time
    onloads: ClassVar[bool] = False

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def on(self, device: torch.device) -> "Store":
        """Returns the store for tensors beside a model: the memory of ``device``, or this store if it is too small."""
        return self if self.onloads else DeviceMemory(device)

    def moved(self, tensor: Tensor) -> Tensor:
        """Returns the tensor in this store: the same object, or a copy."""
        return tensor

    def copied(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()


class DeviceMemory(Store):
    """The memory of a device: tensors that the device reads repeatedly are not copied from the CPU each time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)


class HostMemory(Store):
    """Host memory, which holds large tensors when a GPU's memory is short."""

    onloads = True

    def moved(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def copied(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True)


MEMORY = Store()
