"""The index of a linear's gather, as a parameter that vLLM loads."""

import torch
from torch import Tensor, nn

from permtriton.errors import ModelError
from permtriton.model.modules import check_index
from permtriton.util.permutation import index_dtype

USE_PORTABLE = "compile the model with --layout portable"


class Order(nn.Module):
    """The index of a gather, a parameter without elements until it is loaded.

    vLLM accepts a checkpoint that lacks a parameter without elements, so `finish` checks that the index was loaded.
    """

    index: Tensor  # ``[channels]`` once it is loaded

    def __init__(self, name: str, channels: int) -> None:
        """``name`` is that of the linear, for errors."""
        super().__init__()
        self.name, self.channels = name, channels
        empty = torch.empty(0, dtype=index_dtype(channels))
        self.index = nn.Parameter(empty, requires_grad=False)
        self.index.weight_loader = self._load  # type: ignore[attr-defined]

    def _load(self, parameter: nn.Parameter, tensor: Tensor, part: object = None) -> None:
        """Loads the index of one of the linears that vLLM joined; as they share an input, they must share an index."""
        check_index(tensor, self.channels, self.name)
        if not parameter.numel():
            parameter.data = tensor.to(parameter.device, parameter.dtype, copy=True)
        elif not torch.equal(parameter.data.long(), tensor.to(parameter.device).long()):
            raise ModelError(
                f"{self.name}: vLLM joins linears to this one that gather their input in different orders: "
                f"{USE_PORTABLE}"
            )

    def finish(self, start: int, channels: int) -> None:
        """Checks that the index was loaded, and keeps this rank's part: ``channels`` entries from ``start`` on."""
        if not self.index.numel():
            raise ModelError(f"{self.name}: no index was loaded for its gather: the checkpoint is incomplete")
        if channels == self.channels:
            return
        here = self.index.data[start : start + channels].long() - start
        if bool((here < 0).any()) or bool((here >= channels).any()):
            raise ModelError(
                f"{self.name}: its gather takes channels of other ranks of tensor parallelism: use one rank, or "
                f"{USE_PORTABLE}"
            )
        self.index.data = here.to(self.index.dtype)
