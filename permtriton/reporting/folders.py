"""The compiled folders that a report is made of, and what their linears are called."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from permtriton.checkpoint.record import read_record
from permtriton.checkpoint.schema import METHOD, PermTritonQuantizationConfig
from permtriton.errors import ConfigError, ModelError
from permtriton.kernels.packing import position_bits
from permtriton.model.stored import CONFIG_FILE, StoredTensor, read_checkpoint, read_json
from permtriton.model_name import shown_name
from permtriton.sparsity import NMPattern

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Compiled:
    """A folder that ``permtriton compile`` or ``export`` wrote.

    Attributes:
        path: the folder.
        label: what distinguishes it in the report.
        record: content of ``permtriton.json``, checked; keys that older versions did not write are missing.
        stored: tensor name -> description of the stored tensor.
        quantization: permtriton's entries in config.json; None for a plain checkpoint.
    """

    path: Path
    label: str
    record: Mapping[str, Any]
    stored: Mapping[str, StoredTensor]
    quantization: PermTritonQuantizationConfig | None = field(repr=False)

    @property
    def model(self) -> str:
        """Name of the dense model, without a path."""
        return shown_name(self.record["model"]) if "model" in self.record else "a model that was not recorded"

    @property
    def pattern(self) -> NMPattern:
        """N:M pattern of the pruned weights."""
        return NMPattern.parse(self.record["config"]["sparsity"])

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files of weights on disk."""
        return sum(file.stat().st_size for file in {tensor.file for tensor in self.stored.values()})

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the weights dense and packed; empty if they were not recorded."""
        element, pruned = DTYPES.get(self.record.get("dtype", "")), self.record.get("pruned_parameters")
        exported = self.record.get("export", {})
        if exported.get("format") == "packed" and "dense_bytes" in exported:
            dense = self.stored_bytes - exported["stored_bytes"] + exported["dense_bytes"]
            return {"dense": dense, "packed": self.stored_bytes}
        if element is None or pruned is None:
            return {}
        share = self.pattern.kept / self.pattern.group
        ratio = share * (1 + position_bits(self.pattern.group) / (8 * element.itemsize))
        return {
            "dense": self.stored_bytes,
            "packed": round(self.stored_bytes - pruned * element.itemsize * (1 - ratio)),
        }


def read_folders(folders: Sequence[Path]) -> list[Compiled]:
    """Reads what permtriton recorded in each folder, and the headers of its weights.

    Raises:
        ModelError: a folder was not written by permtriton, or is damaged.
    """
    records = [read_record(folder) for folder in folders]
    labels = [method_of(record.get("config", {})) for record in records]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({folder.resolve().name})" for label, folder in zip(labels, folders, strict=True)]
    return [_compiled(folder, label, record) for folder, label, record in zip(folders, labels, records, strict=True)]


def method_of(config: Mapping[str, Any]) -> str:
    """Returns the name of a method, such as ``wanda: heuristic, mask``, from the options of a compilation."""
    steps = str(config.get("recipe", "recipe not recorded")).replace(",", ", ")
    words = f"{config.get('importance', 'importance not recorded')}: {steps}"
    return f"{words}, fused" if config.get("layout") == "fused" else words


def layer_of(name: str) -> int | None:
    """Returns the number of the layer in a module's name, or None."""
    found = re.search(r"\.(\d+)\.", f".{name}.")
    return int(found[1]) if found else None


def kind_of(linear: str) -> str:
    """Returns the last part of a linear's name, such as ``down_proj``."""
    return linear.rpartition(".")[2]


def _compiled(folder: Path, label: str, record: Mapping[str, Any]) -> Compiled:
    if "sparsity" not in record.get("config", {}):
        raise ModelError(f"{folder}: permtriton.json has no config.sparsity, such as 2:4: the file is damaged")
    try:
        NMPattern.parse(record["config"]["sparsity"])
    except ConfigError as error:
        raise ModelError(f"{folder}: permtriton.json: {error}: the file is damaged") from error
    entries = read_json(folder / CONFIG_FILE).get("quantization_config")
    quantization = None
    if isinstance(entries, dict) and entries.get("quant_method") == METHOD:
        quantization = PermTritonQuantizationConfig(**entries)
    return Compiled(folder, label, record, read_checkpoint(folder), quantization)
