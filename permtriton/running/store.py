"""Where large tensors beside the weights are: inputs of layers, dense weights, targets, copies of weights."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn

from permtriton.running import ranks
from permtriton.util.machine import available_memory


class Store:
    """Memory: new tensors are on the CPU, and others stay where they are. Its subclasses are other places.

    Attributes:
        one_layer: whether whatever works on a whole model works on one of its layers at a time, because the memory of
            its device does not hold all weights.
        onloads: whether layers come to a GPU one by one (`permtriton.running.onload`).
    """

    one_layer: ClassVar[bool] = False
    onloads: ClassVar[bool] = False

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Returns a tensor there, of any values."""
        return torch.empty(tuple(shape), dtype=dtype)

    def on(self, device: torch.device) -> "Store":
        """Returns the place of tensors beside a model on a device: there, or here if its memory is short."""
        return self if self.one_layer else DeviceMemory(device)

    def moved(self, tensor: Tensor) -> Tensor:
        """Returns a tensor there that may be the same."""
        return tensor

    def copied(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a tensor there."""
        return tensor.detach().clone()

    def release(self) -> None:
        """Gives up memory that is not needed at the moment."""

    def working(self, model: nn.Module, device: torch.device | None = None) -> AbstractContextManager[None]:
        """Returns the context in which a model is compiled.

        Args:
            device: device that it shall run on; None where it is.
        """
        return nullcontext()

    def free(self) -> int:
        """Returns how many bytes are free there for this process."""
        return available_memory(torch.device("cpu")) // ranks.count_here()


class DeviceMemory(Store):
    """The memory of a device: what is needed there again and again need not come from the CPU each time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)


class HostMemory(Store):
    """The CPU's memory, which takes large tensors in place of a GPU's."""

    one_layer = onloads = True

    def moved(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def copied(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True)


MEMORY = Store()
