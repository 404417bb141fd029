"""Rewrites the tensors of a folder, packed or in 8 bits, and verifies them.

**To add a format, write a function that makes a `FormatWriter`**, such as `packed_fp8_writer` in ``fp8.py``, and name
it in `permtriton.checkpoint.formats.Format` and `permtriton.checkpoint.export.WRITERS`.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from permtriton.checkpoint.card import ALONE, WITH_PERMTRITON
from permtriton.checkpoint.folder import Folder
from permtriton.checkpoint.names import PACKED_PARTS
from permtriton.checkpoint.quantization_config import Packed, config_entries, packed_entry
from permtriton.checkpoint.verify import check_same_bits
from permtriton.errors import VerificationError
from permtriton.kernels.packing import pack
from permtriton.kernels.quantize import dequantized, round_to_fp8, to_float8
from permtriton.kernels.sparse_linear_fp8 import pack_fp8
from permtriton.model.checks import check_finite_tensor
from permtriton.model.nm_checks import check_weight
from permtriton.util.progress import Progress


class FormatWriter:
    """Rewrites a folder in another format.

    Attributes:
        source: folder that is rewritten.
        packed: names of the pruned weights that are stored as their kept values and positions.
        rounded: names of the weights of linears that are stored in float8 e4m3 with a scale per row.
        counts: numbers of linears in 8 bits (``quantized``), of those whose weights were not on FP8's grid already
            (``rounded``), and of kept weights that became 0 (``further_zeros``); complete once all tensors are stored.
    """

    def __init__(self, source: Folder, *, packed: Collection[str] = (), rounded: Collection[str] = ()) -> None:
        self.source, self.packed, self.rounded = source, packed, rounded
        self.counts = {"quantized": 0, "rounded": 0, "further_zeros": 0}

    @property
    def loads_with(self) -> str:
        """What loads the result, in words."""
        return WITH_PERMTRITON if self.source.entries.permuted or self.packed else ALONE

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Returns the tensors that are stored for one tensor of the model, by name."""
        if name in self.rounded:
            weight, scale = round_to_fp8(tensor)
            self.counts["quantized"] += 1
            self.counts["rounded"] += not torch.equal(dequantized(weight, scale), tensor)
            self.counts["further_zeros"] += int(((weight.view(torch.uint8) == 0) & (tensor != 0)).sum())
            if name not in self.packed:
                return {name: weight, f"{name}_scale": scale}
        if name not in self.packed:
            return {name: tensor.unsqueeze(0) if self.source.has_more_dimensions(name) else tensor}
        pruned = self.source.pruned[name]
        stored = (pack_fp8 if name in self.rounded else pack)(pruned.rows(tensor), pruned.pattern)
        parts = {name + part: values for part, values in zip(PACKED_PARTS, stored, strict=False)}
        return {**parts, name: tensor.new_empty(0)}

    def quantization_config(self, hashes: Mapping[str, str]) -> dict[str, Any] | None:
        """Returns the entry ``quantization_config`` of config.json; None if it has none.

        Args:
            hashes: file of weights -> its SHA-256.
        """
        source, sparsity = self.source, str(self.source.pattern)
        packed: dict[str, Packed] = {
            name: packed_entry(source.shape(name), source.pruned[name], sparsity, in_fp8=name in self.rounded)
            for name in source.names()
            if name in self.packed
        }
        if not packed and not source.entries.permuted:
            return None
        return config_entries(sparsity, packed, source.entries.gathers, source.entries.norms, hashes).to_dict()

    def verify(self, written: Folder, progress: Progress) -> None:
        """Compares every tensor that was written with the one that was read, bit by bit.

        Weights in 8 bits are compared with what was read, rounded with the scales that were written, and the scales
        are not computed again. They must be finite and, if they are pruned, N:M.
        """
        names = self.source.names()
        if differing := sorted(set(names) ^ set(written.names())):
            raise VerificationError(f"{differing[0]}: it was read but not written, or written but not read")
        with progress.stage("verify", len(names)) as advance:
            for name in names:
                expected, weight = self.source.tensor(name), written.tensor(name)
                if name in self.rounded:
                    scale = written.scale(name).view(-1, 1).to(expected.dtype)  # computing it takes nine roundings
                    expected = dequantized(to_float8(expected, scale), scale)
                    check_finite_tensor(name, weight)
                    if pruned := self.source.pruned.get(name):
                        check_weight(name, weight, pruned.pattern)
                check_same_bits(name, weight, expected, "what was read")
                advance()
