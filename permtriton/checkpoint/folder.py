"""Reads a folder that permtriton wrote, in any format, and hashes its files of weights."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.checkpoint.names import PACKED_PARTS
from permtriton.checkpoint.packed import unpacked
from permtriton.checkpoint.quantization_config import METHOD, PermTritonQuantizationConfig, config_entries
from permtriton.checkpoint.read_record import Record, check_recorded, read_record, recorded_weights
from permtriton.errors import ModelError, reading
from permtriton.kernels.quantize import dequantized
from permtriton.kernels.sparse_linear_fp8 import unpack_fp8
from permtriton.model.headers import CONFIG_FILE, REPORT_FILE, StoredTensor, read_checkpoint, read_json
from permtriton.model.load import load_empty_model
from permtriton.model.name import location_of
from permtriton.model.source import Source
from permtriton.util.sparsity import NMPattern, PrunedWeight


class Folder:
    """A folder that permtriton wrote. A file is read when it is needed for the first time, and refused if damaged."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ModelError(f"{path} is not a folder: give an output of permtriton compile or export")
        self.path = path
        self._open: tuple[Path | None, Any] = None, None

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_json(self.path / CONFIG_FILE)

    @property
    def is_quantized(self) -> bool:
        """Whether weights are in 8 bits: in format fp8 (compressed-tensors' layout) or packed-fp8."""
        return self._is_compressed or any("values" in entry for entry in self.entries.packed.values())

    @property
    def _is_compressed(self) -> bool:
        entries = self.config.get("quantization_config")
        return isinstance(entries, dict) and entries.get("quant_method") == "compressed-tensors"

    @cached_property
    def entries(self) -> PermTritonQuantizationConfig:
        """permtriton's entries in the config; empty ones for a plain checkpoint and format fp8, which have none."""
        entries = self.config.get("quantization_config")
        if entries is None or self._is_compressed:
            return config_entries("2:4", {}, {}, {})  # the pattern of no weight
        if not isinstance(entries, dict) or entries.get("quant_method") != METHOD:
            raise ModelError(
                f"{self.path / CONFIG_FILE}: quantization_config is not permtriton's: give a folder that permtriton "
                "wrote"
            )
        return PermTritonQuantizationConfig(**entries)

    @cached_property
    def stored(self) -> Mapping[str, StoredTensor]:
        return read_checkpoint(self.path)

    @cached_property
    def record(self) -> Record:
        return read_record(self.path)

    @property
    def pattern(self) -> NMPattern:
        """N:M pattern of the pruned weights that are not in the record's ``patterns``."""
        return NMPattern.parse(self.record["config"]["sparsity"])

    @property
    def files(self) -> list[Path]:
        return sorted({tensor.file for tensor in self.stored.values()})

    @cached_property
    def pruned(self) -> Mapping[str, PrunedWeight]:
        """Pruned parameter -> its input dimension and pattern, checked against its shape."""
        pruned = recorded_weights(self.record)
        for name, weight in pruned.items():
            if name not in self.stored:
                raise ModelError(
                    f"{self.path / REPORT_FILE} lists the pruned weight {name}, which the checkpoint does not hold"
                )
            check_recorded(name, weight, self.shape(name))
        return pruned

    def names(self) -> list[str]:
        """Returns the names of the model's tensors, ordered by file and name."""
        owners = (*self.entries.packed, *filter(self._is_scaled, self.stored))
        parts = {name + part: name for name in owners for part in PACKED_PARTS}
        ordered = sorted(self.stored, key=lambda name: (self.stored[name].file, name))
        return list(dict.fromkeys(parts.get(name, name) for name in ordered))

    def has_more_dimensions(self, name: str) -> bool:
        """Whether a tensor is stored with one more dimension: the weight of a module that permutes."""
        return name.endswith(".weight") and name.removesuffix(".weight") in self.entries.permuted

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape in the model, without the dimension that checkpoints add."""
        if name in self.entries.packed:
            return tuple(self.entries.packed[name]["shape"])
        shape = self.stored[name].shape
        return shape[1:] if self.has_more_dimensions(name) else shape

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor in the model's shape, and unpacks and dequantizes it if it is packed or in 8 bits."""
        if name not in self.entries.packed:
            tensor = self._read(name).view(self.shape(name))
            return dequantized(tensor, self.scale(name)) if self._is_scaled(name) else tensor
        entry, pattern = self.entries.packed[name], self.entries.pattern_of(name)
        values, positions = self._read(f"{name}_values"), self._read(f"{name}_positions")
        if "values" not in entry:
            return unpacked(values, positions, entry["shape"], entry["dim"], pattern)
        weight = unpack_fp8(values, positions, self.scale(name), entry["shape"][1], pattern)
        return weight.to(self._read(name).dtype)

    def kept(self, name: str) -> Tensor:
        """Returns which weights of a parameter are not zero, a boolean tensor of the parameter's shape.

        Weights in 8 bits are not multiplied by their scales, with which the smallest ones would be zero in float16.
        """
        return (self._read(name).float() if self._is_scaled(name) else self.tensor(name)) != 0

    def scale(self, name: str) -> Tensor:
        """Returns the stored scales of the rows of a weight in 8 bits: ``[out]`` if it is packed, else ``[out, 1]``."""
        return self._read(f"{name}_scale")

    def file_of(self, name: str) -> str:
        """Returns the name of the file that holds a tensor, or the values of a packed one."""
        return self.stored[f"{name}_values" if name in self.entries.packed else name].file.name

    def empty_model(self) -> PreTrainedModel:
        """Returns the model without weights, on the meta device, with no module replaced."""
        return load_empty_model(Source(location_of(self.path)))

    def _is_scaled(self, name: str) -> bool:
        """Whether a tensor is stored as format fp8 stores a weight, with its scales beside it."""
        return self._is_compressed and self.stored[name].dtype == "F8_E4M3"

    def _read(self, name: str) -> Tensor:
        if name not in self.stored:
            raise ModelError(f"{self.path} holds no tensor {name}: the folder is damaged")
        file = self.stored[name].file
        with reading(f"{file}: {name} cannot be read, the file is damaged", ModelError):
            if file != self._open[0]:  # one at a time, because the pages that were read of a file count as memory
                self._open = file, safe_open(file, framework="pt")
            return self._open[1].get_tensor(name)


def check_hashes(folder: Path, hashes: Mapping[str, str]) -> None:
    """Refuses a file of weights that is missing, or whose SHA-256 is not the one that ``hashes`` has for its name."""
    for name, expected in hashes.items():
        if not (folder / name).is_file() or file_sha256(folder / name) != expected:
            raise ModelError(
                f"{folder / name} is missing, or its SHA-256 is not the one that was written with it: the file was "
                "changed; copy, export or compile it again"
            )


def describe_weights(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the size in bytes and the SHA-256 of each file of weights, by name."""
    files = sorted(folder.glob("*.safetensors"))
    return {file.name: {"bytes": file.stat().st_size, "sha256": file_sha256(file)} for file in files}


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
