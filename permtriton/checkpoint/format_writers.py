"""How each format stores tensors: which ones, with which ``quantization_config``, and how they are verified.

`FormatWriter` stores all tensors unchanged; its subclasses change some. ``export.py`` does what all formats share.
**Add a format as a subclass in a file beside ``fp8.py``**, and to `permtriton.checkpoint.export.WRITERS`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from permtriton.checkpoint.card import ALONE, WITH_PERMTRITON
from permtriton.checkpoint.folder import Folder
from permtriton.checkpoint.quantization_config import Packed, config_entries, packed_entry
from permtriton.errors import VerificationError
from permtriton.kernels.packing import pack
from permtriton.util.progress import Progress


class FormatWriter:
    """Rewrites a folder in another format; this base class stores every tensor unchanged.

    Attributes:
        source: folder that is rewritten.
        loads_with: what loads the result, in words.
        counts: further entries of ``export`` in ``permtriton.json``, complete once all tensors are stored.
    """

    def __init__(self, source: Folder) -> None:
        self.source = source
        self.loads_with = WITH_PERMTRITON if source.permuted else ALONE
        self.counts: dict[str, int] = {}

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Returns the tensors that are stored for one tensor of the model, by name."""
        return {name: tensor.unsqueeze(0) if self.source.has_more_dimensions(name) else tensor}

    def quantization_config(self, hashes: Mapping[str, str]) -> dict[str, Any] | None:
        """Returns the entry ``quantization_config`` of config.json after all tensors are stored; None if it has none.

        Args:
            hashes: file of weights -> its SHA-256.
        """
        return self._entries(hashes) if self.source.permuted else None

    def names(self) -> list[str]:
        """Returns the names of the tensors in the result; a packed weight has one name."""
        return self.source.names()

    def verify(self, written: Folder, progress: Progress) -> None:
        names = self.source.names()
        if differing := sorted(set(self.names()) ^ set(written.names())):
            raise VerificationError(f"{differing[0]}: it was read but not written, or written but not read")
        with progress.stage("verify", len(names)) as advance:
            for name in names:
                self.check(name, written)
                advance()

    def check(self, name: str, written: Folder) -> None:
        """Compares a tensor that was written with the one that was read."""
        check_same_bits(name, self.source.tensor(name), written.tensor(name))

    def _entries(self, hashes: Mapping[str, str], packed: dict[str, Packed] | None = None) -> dict[str, Any]:
        source = self.source.quantization
        gathers, norms = (source.gathers, source.norms) if source else ({}, {})
        return config_entries(str(self.source.pattern), packed or {}, gathers, norms, hashes).to_dict()


class PackedWriter(FormatWriter):
    """Stores the kept values of pruned weights, and their positions."""

    def __init__(self, source: Folder) -> None:
        super().__init__(source)
        self.loads_with = WITH_PERMTRITON
        self._packed: dict[str, Packed] = {}

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if (pruned := self.source.pruned.get(name)) is None:
            return super().parts(name, tensor)
        self._packed[name] = packed_entry(tensor.shape, pruned, str(self.source.pattern))
        values, positions = pack(tensor.movedim(pruned.dim, -1).flatten(0, -2), pruned.pattern)
        return {f"{name}_values": values, f"{name}_positions": positions, name: tensor.new_empty(0)}

    def quantization_config(self, hashes: Mapping[str, str]) -> dict[str, Any]:
        return self._entries(hashes, self._packed)


def check_same_bits(name: str, first: Tensor, second: Tensor) -> None:
    """Refuses two tensors that differ in dtype, shape or any bit."""
    same = (first.dtype, first.shape) == (second.dtype, second.shape)
    if not same or not torch.equal(first.flatten().view(torch.uint8), second.flatten().view(torch.uint8)):
        raise VerificationError(f"{name}: what was written differs from what was read")
