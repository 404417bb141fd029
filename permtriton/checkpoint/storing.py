"""How does each format store tensors: which tensors, which ``quantization_config``, and how is it checked?

`Storing` stores them as they are; a format that does not is a subclass. ``export.py`` does the rest, whatever the
format. **Add a way of storing in a file beside ``fp8.py``**, and to `permtriton.checkpoint.export.WAYS`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from permtriton.checkpoint.card import ALONE, WITH_PERMTRITON
from permtriton.checkpoint.folder import Folder
from permtriton.checkpoint.format import Format
from permtriton.checkpoint.quantization_config import VERSION, Packed, PermTritonQuantizationConfig, packed_entry
from permtriton.errors import ModelError, PermTritonError, VerificationError, first_line
from permtriton.kernels.packing import pack
from permtriton.model.checks import model_hash
from permtriton.model.load import load_model
from permtriton.model.name import location_of
from permtriton.model.source import Source
from permtriton.running.micro_batch import is_out_of_memory
from permtriton.util.machine import available_memory, release_memory
from permtriton.util.progress import Progress

INSTEAD = "every tensor was compared bit by bit instead"


class Storing:
    """Stores every tensor as it is.

    Attributes:
        source: folder that is rewritten.
    """

    def __init__(self, source: Folder) -> None:
        self.source = source

    @property
    def loads_with(self) -> str:
        """What loads the result, in words."""
        return WITH_PERMTRITON if self.source.permuted else ALONE

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Returns what is stored of a tensor of the model, by name."""
        return {name: tensor.unsqueeze(0) if self.source.has_more_dimensions(name) else tensor}

    def quantization_config(self, hashes: Mapping[str, str]) -> dict[str, Any] | None:
        """Returns the entry ``quantization_config`` of config.json once all tensors are stored; None for none.

        Args:
            hashes: file of weights -> its SHA-256.
        """
        return self._entries(hashes) if self.source.permuted else None

    def names(self) -> list[str]:
        """Returns the names of the tensors that the result holds, packed ones as one."""
        return self.source.names()

    def verify(self, written: Folder, progress: Progress) -> None:
        """Reads all tensors back and checks each.

        Raises:
            VerificationError: a tensor differs or is missing; the message names the first one.
        """
        names = self.source.names()
        try:
            written.check_listed()
            written.check_hashes()
        except ModelError as error:
            raise VerificationError(f"what was written cannot be read again: {error}") from error
        if differing := sorted(set(self.names()) ^ set(written.names())):
            raise VerificationError(f"{differing[0]}: it was read but not written, or written but not read")
        with progress.stage("verify", len(names)) as advance:
            for name in names:
                self.check(name, written)
                advance()

    def check(self, name: str, written: Folder) -> None:
        """Compares a tensor that was written with the one that was read.

        Raises:
            VerificationError: it differs.
        """
        check_same_bits(name, self.source.tensor(name), written.tensor(name))

    def check_loads(self, written: Path, model_bytes: int) -> dict[str, Any]:
        """Loads the source and what was written on the CPU, one after the other, and compares both bit by bit.

        Args:
            model_bytes: size of the dense model.

        Returns:
            Entries of ``permtriton.json``, ``reloaded`` among them: "same model", or "not run: " and why: too little
            memory, or a source that does not load either, such as one of a model with code of its own.

        Raises:
            VerificationError: it does not load, or as another model.
        """
        if model_bytes * 1.2 > available_memory(torch.device("cpu")):
            return {"reloaded": f"not run: the model does not fit into memory; {INSTEAD}"}
        try:
            expected = _hash(self.source.path)
        except PermTritonError as error:
            return {"reloaded": f"not run: the folder that was exported cannot be loaded here: {first_line(error)}"}
        try:
            actual = _hash(written)
        except PermTritonError as error:
            if is_out_of_memory(error.__cause__ or error):
                return {"reloaded": f"not run: memory ran out; {INSTEAD}"}
            raise VerificationError(f"what was written cannot be loaded again: {first_line(error)}") from error
        if actual != expected:
            raise VerificationError("what was written loads as another model than what was read")
        return {"reloaded": "same model"}

    def _entries(self, hashes: Mapping[str, str], packed: dict[str, Packed] | None = None) -> dict[str, Any]:
        quantization = self.source.quantization
        return PermTritonQuantizationConfig(
            version=VERSION,
            format=Format.PACKED if packed else Format.DENSE,
            sparsity=str(self.source.pattern),
            packed=packed or {},
            gathers=quantization.gathers if quantization else {},
            norms=quantization.norms if quantization else {},
            sha256=dict(hashes),
        ).to_dict()


class Packing(Storing):
    """Stores the kept values of pruned weights, and their positions."""

    def __init__(self, source: Folder) -> None:
        super().__init__(source)
        self._packed: dict[str, Packed] = {}

    @property
    def loads_with(self) -> str:
        return WITH_PERMTRITON

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if (pruned := self.source.pruned.get(name)) is None:
            return super().parts(name, tensor)
        self._packed[name] = packed_entry(tensor.shape, pruned, str(self.source.pattern))
        values, positions = pack(tensor.movedim(pruned.dim, -1).flatten(0, -2), pruned.pattern)
        return {f"{name}_values": values, f"{name}_positions": positions, name: tensor.new_empty(0)}

    def quantization_config(self, hashes: Mapping[str, str]) -> dict[str, Any]:
        return self._entries(hashes, self._packed)


def check_same_bits(name: str, first: Tensor, second: Tensor) -> None:
    """Refuses a tensor that is not the one that was read, dtype and shape included.

    Raises:
        VerificationError: it differs.
    """
    same = (first.dtype, first.shape) == (second.dtype, second.shape)
    if not same or not torch.equal(first.flatten().view(torch.uint8), second.flatten().view(torch.uint8)):
        raise VerificationError(f"{name}: what was written differs from what was read")


def _hash(folder: Path) -> str:
    try:
        return model_hash(load_model(Source(location_of(folder), device="cpu")))
    finally:
        release_memory()
