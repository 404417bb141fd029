"""What is in a folder that permtriton wrote? All who read one, such as transformers, vLLM and export, open it here."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from safetensors import safe_open
from torch import Tensor

from permtriton.checkpoint.packed import packed_parts, unpacked
from permtriton.checkpoint.quantization_config import METHOD, Packed, PermTritonQuantizationConfig
from permtriton.checkpoint.record import Record, read_record, recorded_weights
from permtriton.checkpoint.shards import file_sha256
from permtriton.errors import ModelError, reading
from permtriton.model.headers import (
    CONFIG_FILE,
    DTYPES,
    REPORT_FILE,
    StoredTensor,
    check_regular,
    read_checkpoint,
    read_headers,
    read_json,
)
from permtriton.model.modules import check_index
from permtriton.util.sparsity import NMPattern, PrunedWeight


class Folder:
    """A folder that permtriton wrote; what it holds is read, and refused where it is damaged, when it is asked for.

    Every attribute and method raises a `ModelError` for a file that is missing or damaged.

    Attributes:
        path: the folder.
        config: content of config.json.
        quantization: permtriton's entries in the config; None in a plain checkpoint.
        stored: tensor name -> description of the stored tensor.
        record: content of ``permtriton.json``.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._opened = path, dict[Path, Any]()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Returns the folder at a path.

        Raises:
            ModelError: it is not a folder, or as `check_regular`.
        """
        if not path.is_dir():
            raise ModelError(f"{path} is not a folder: give an output of permtriton compile or export")
        check_regular(path)
        return cls(path)

    @classmethod
    def loading(cls, files: Sequence[Path], quantization: PermTritonQuantizationConfig) -> "Folder":
        """Returns the folder that transformers loads: with the entries that its user may have changed.

        Args:
            files: files of weights, all in one folder.
            quantization: entries in place of those in config.json.
        """
        folder = cls(files[0].parent)
        folder.quantization, folder.stored = quantization, read_headers(files)
        return folder

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_json(self.path / CONFIG_FILE)

    @property
    def is_quantized(self) -> bool:
        """Whether compressed-tensors' layout stores its weights in few bits, as in format fp8."""
        entries = self.config.get("quantization_config")
        return isinstance(entries, dict) and entries.get("quant_method") == "compressed-tensors"

    @cached_property
    def quantization(self) -> PermTritonQuantizationConfig | None:
        entries = self.config.get("quantization_config")
        if entries is None or self.is_quantized:
            return None
        if not isinstance(entries, dict) or entries.get("quant_method") != METHOD:
            raise ModelError(
                f"{self.path / CONFIG_FILE}: quantization_config is not permtriton's: give a folder that permtriton "
                "wrote"
            )
        return PermTritonQuantizationConfig(**entries)

    @property
    def entries(self) -> PermTritonQuantizationConfig:
        """The same where there must be some: in a folder that is packed or permutes."""
        if self.quantization is None:
            raise ModelError(f"{self.path / CONFIG_FILE} has no quantization_config of permtriton")
        return self.quantization

    @cached_property
    def stored(self) -> Mapping[str, StoredTensor]:
        return read_checkpoint(self.path)

    @cached_property
    def record(self) -> Record:
        return read_record(self.path)

    @property
    def packed(self) -> Mapping[str, Packed]:
        """Packed parameter -> its shape and input dimension."""
        return self.quantization.packed if self.quantization else {}

    @property
    def permuted(self) -> list[str]:
        """Names of the modules that permute at run time."""
        return self.quantization.permuted if self.quantization else []

    @property
    def pattern(self) -> NMPattern:
        """N:M pattern of the pruned weights that have none of their own."""
        return NMPattern.parse(self.record["config"]["sparsity"])

    @property
    def files(self) -> list[Path]:
        """Files of weights."""
        return sorted({tensor.file for tensor in self.stored.values()})

    @cached_property
    def pruned(self) -> Mapping[str, PrunedWeight]:
        """Pruned parameter -> its input dimension and pattern. The record, the config and the tensors agree on them."""
        path, sparsity, pruned = self.path / REPORT_FILE, str(self.pattern), recorded_weights(self.record)
        listed = {
            name: PrunedWeight(entry["dim"], self.entries.pattern_of(name)) for name, entry in self.packed.items()
        }
        if self.quantization and self.quantization.sparsity != sparsity:
            raise ModelError(
                f"{path} has the sparsity {sparsity}, but {CONFIG_FILE} has {self.quantization.sparsity}: one of them "
                "is damaged"
            )
        if unknown := sorted(self.record.get("patterns", {}).keys() - pruned.keys()):
            raise ModelError(f"{path} has a pattern of {unknown[0]}, which it does not list as pruned: it is damaged")
        if listed and pruned != listed:
            raise ModelError(
                f"{path} and {CONFIG_FILE}, quantization_config list different pruned weights: one of them is damaged"
            )
        for name, weight in pruned.items() if not listed else ():
            if name not in self.stored:
                raise ModelError(f"{path} lists the pruned weight {name}, which the checkpoint does not hold")
            tensor, shape = self.stored[name], self.shape(name)
            dim, pattern = weight.dim, weight.pattern
            fits = 2 <= len(shape) <= 4 and 0 <= dim < len(shape) and shape[dim] % pattern.group == 0
            if not fits or (tensor.dtype not in DTYPES and not self.is_quantized):
                raise ModelError(
                    f"{tensor.file}: {name} is {tensor.dtype} {list(shape)}, which cannot have been pruned to "
                    f"{pattern} along dimension {dim}: the checkpoint or {REPORT_FILE} is damaged"
                )
        return pruned

    def check_hashes(self) -> None:
        """Refuses files of weights that were changed after they were written, as far as config.json has their hashes.

        Raises:
            ModelError: a file is missing, differs, or is the only one without a hash; the message names the first one.
        """
        hashes = self.quantization.sha256 if self.quantization else {}
        if hashes and (unknown := sorted({file.name for file in self.files} - set(hashes))):
            raise ModelError(f"{unknown[0]} has no SHA-256 in {CONFIG_FILE}, quantization_config: it is damaged")
        _compare(self.path, hashes, f"{CONFIG_FILE}, quantization_config")

    def check_recorded_hashes(self) -> None:
        """Does the same with the hashes of ``permtriton.json``, but for those that `check_hashes` compares."""
        known = self.quantization.sha256 if self.quantization else {}
        hashes = {name: file["sha256"] for name, file in self.record["files"].items()}
        if unsafe := [name for name in hashes if Path(name).name != name]:
            raise ModelError(f"{self.path / REPORT_FILE} names the file {unsafe[0]!r}: expected one in the same folder")
        _compare(self.path, {name: each for name, each in hashes.items() if known.get(name) != each}, REPORT_FILE)

    def check_listed(self) -> None:
        """Checks that config.json lists what is packed and what permutes, no more and no less, and reads permutations.

        Raises:
            ModelError: they differ, or an index is no permutation.
        """
        for name in self.packed:
            packed_parts(name, self.stored)
        for name in (name.removesuffix("_values") for name in self.stored if name.endswith("_values")):
            if name in self.stored and name not in self.packed:
                raise ModelError(
                    f"{self.path}: {name} is stored packed, but {CONFIG_FILE}, quantization_config does not list it: "
                    "the checkpoint is damaged"
                )
        norms = self.quantization.norms if self.quantization else {}
        gathers = self.quantization.gathers if self.quantization else {}
        channels = {f"{name}.index": entry["channels"] for name, entry in norms.items()}
        channels.update({f"{name}.gather.index": count for name, count in gathers.items()})
        stored = {name for name in self.stored if name.endswith(".gather.index")}
        for name in sorted({*channels, *stored}):
            if name not in channels or name not in self.stored:
                where = "the weights" if name in channels else f"{CONFIG_FILE}, quantization_config"
                raise ModelError(f"{self.path}: permutation {name} is missing from {where}: the checkpoint is damaged")
            check_index(self._read(name), channels[name], f"{self.stored[name].file}, {name}")

    def names(self) -> list[str]:
        """Returns the names of the model's tensors, ordered by file and name."""
        parts = {f"{name}_{part}": name for name in self.packed for part in ("values", "positions")}
        ordered = sorted(self.stored, key=lambda name: (self.stored[name].file, name))
        return list(dict.fromkeys(parts.get(name, name) for name in ordered))

    def has_more_dimensions(self, name: str) -> bool:
        """Whether a tensor is stored with one more dimension: the weight of a module that permutes."""
        return name.endswith(".weight") and name.removesuffix(".weight") in self.permuted

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape in the model."""
        if name in self.packed:
            return tuple(self.packed[name]["shape"])
        shape = self.stored[name].shape
        return shape[1:] if self.has_more_dimensions(name) and shape[:1] == (1,) and len(shape) > 1 else shape

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor in the model's shape, and unpacks it if it is packed."""
        if name not in self.packed:
            return self._read(name).view(self.shape(name))
        entry = self.packed[name]
        values, positions = self._read(f"{name}_values"), self._read(f"{name}_positions")
        return unpacked(name, values, positions, entry["shape"], entry["dim"], self.entries.pattern_of(name))

    def file_of(self, name: str) -> str:
        """Returns the name of the file that holds a tensor, or the values of a packed one."""
        return self.stored[f"{name}_values" if name in self.packed else name].file.name

    def _read(self, name: str) -> Tensor:
        with self._reading(name):
            return self._file(name).get_tensor(name)

    def _reading(self, name: str) -> Any:
        return reading(f"{self.stored[name].file}: {name} cannot be read, the file is damaged", ModelError)

    def _file(self, name: str) -> Any:
        file = self.stored[name].file
        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt")
        return self._opened[file]


def _compare(folder: Path, hashes: Mapping[str, str], origin: str) -> None:
    """Refuses files of ``folder`` whose SHA-256 is not the one in ``origin``."""
    for name, expected in hashes.items():
        if not (folder / name).is_file() or file_sha256(folder / name) != expected:
            raise ModelError(
                f"{folder / name} is missing, or its SHA-256 is not the one in {origin}: the file was changed after "
                "it was written; copy, export or compile it again"
            )
