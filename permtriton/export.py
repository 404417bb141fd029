"""Rewrites a checkpoint of permtriton in another format, tensor by tensor, without building the model.

Formats: "packed" (the kept values and their positions), "dense" (zeros stored too) and "plain" (dense, and sure to load
with transformers alone). A model with permuted modules has no plain form; its dense one needs permtriton.
"""

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from permtriton.artifact import replacing_folder, share_mode
from permtriton.checkpoint import (
    CONFIG_FILE,
    FLOATS,
    INDEX_FILE,
    REPORT_FILE,
    SHARD_BYTES,
    ShardWriter,
    check_hashes,
    describe_files,
    read_checkpoint,
    read_json,
)
from permtriton.errors import ConfigError, ModelError, OutputError, VerificationError
from permtriton.kernels.packing import pack
from permtriton.modules import check_index
from permtriton.passes.verify import check_weight
from permtriton.placement import packed_parts, unpacked
from permtriton.progress import NoProgress, Progress
from permtriton.report import to_json
from permtriton.schema import METHOD, VERSION, PermTritonQuantizationConfig
from permtriton.sparsity import NMPattern

FORMATS = ("packed", "dense", "plain")


def export(
    folder: Path,
    output: Path,
    format: str = "packed",
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes ``folder`` in another format to ``output``, verifies it bit by bit, and renames it into place.

    Args:
        folder: what `permtriton compile` or this function wrote.
        output: folder to write.
        format: one of `FORMATS`.
        overwrite: whether an earlier output of permtriton may be replaced.
        shard_bytes: largest size of a file of several tensors, and of what is held in memory.
        progress: told how it goes.

    Returns:
        What is also written to ``permtriton.json``, as ``export``: format, sparsity, weights, dense_bytes,
        stored_bytes, ratio, loads_with, seconds; and as ``files``: bytes and SHA-256 of each.

    Raises:
        ConfigError: an unknown format, or "plain" for a model that permutes at run time.
        ModelError: ``folder`` was not written by permtriton, is damaged, or holds a weight that is not N:M.
        OutputError: ``output`` may not or cannot be written.
        VerificationError: what was written is not what was read.
    """
    if format not in FORMATS:
        raise ConfigError(f"format {format!r} is unknown: choose one of {', '.join(FORMATS)}")
    if folder.resolve().is_relative_to(output.resolve()):
        raise OutputError(f"output {output} is, or holds, the folder that is exported: choose another folder")
    started, progress = time.perf_counter(), progress or NoProgress()
    with ExitStack() as stack:
        source = _Checkpoint(folder, stack)
        report = source.read_report()
        source.read_pruned(report)
        if format == "plain" and source.permuted:
            raise ConfigError(
                f"{folder} permutes channels at run time ({source.permuted[0]} and {len(source.permuted) - 1} more "
                "modules), which transformers alone cannot do: compile the original model with --layout portable for a "
                "plain checkpoint, or export this one as dense or packed"
            )
        with replacing_folder(output, overwrite=overwrite) as partial:
            told = _write(source, partial, format, shard_bytes, progress)
            _verify(source, partial, progress)
            told["seconds"] = round(time.perf_counter() - started, 3)
            section = {key: value for key, value in told.items() if key != "files"}
            written = {**report, "files": told["files"], "export": section}
            (partial / REPORT_FILE).write_text(to_json(written) + "\n", encoding="utf-8")
    return told


class _Checkpoint:
    """A folder of permtriton's, read lazily; its tensors are given as the model has them, whatever their stored form.

    Attributes:
        folder: where it is.
        config: config.json.
        quantization: its entries of permtriton's, None in a plain checkpoint.
        stored: what the files hold.
        pruned: pruned parameter -> input dimension; None where it is not known.
        pattern: their sparsity.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder: give an output of permtriton compile")
        self.folder, self._stack, self._opened = folder, stack, dict[Path, Any]()
        self.config = read_json(folder / CONFIG_FILE)
        self.quantization = _quantization(folder, self.config)
        self.stored = read_checkpoint(folder)
        self.packed = self.quantization.packed if self.quantization else {}
        self.permuted = self.quantization.permuted if self.quantization else []
        self._thicker = {f"{name}.weight" for name in self.permuted}
        self.pruned: dict[str, int | None] = {name: entry["dim"] for name, entry in self.packed.items()}
        self.pattern = self.quantization.pattern if self.quantization else None
        check_hashes(folder, self.quantization.sha256 if self.quantization else {}, CONFIG_FILE)
        for name in self.packed:
            packed_parts(name, self.stored)
        for name in (name.removesuffix("_values") for name in self.stored if name.endswith("_values")):
            if name in self.stored and name not in self.packed:
                raise ModelError(
                    f"{folder}: {name} is stored packed, but {CONFIG_FILE}, quantization_config does not tell of it: "
                    "the checkpoint is damaged"
                )
        self._check_permutations()

    def _check_permutations(self) -> None:
        norms = self.quantization.norms if self.quantization else {}
        gathers = self.quantization.gathers if self.quantization else {}
        told = {f"{name}.index": entry["channels"] for name, entry in norms.items()}
        told.update({f"{name}.gather.index": channels for name, channels in gathers.items()})
        for name in sorted({*told, *(name for name in self.stored if name.endswith(".gather.index"))}):
            if name not in told or name not in self.stored:
                where = "the weights" if name in told else f"{CONFIG_FILE}, quantization_config"
                raise ModelError(f"{self.folder}: permutation {name} is missing in {where}: the checkpoint is damaged")
            check_index(self._read(name), told[name], f"{self.stored[name].file}, {name}")

    def read_report(self) -> dict[str, Any]:
        """Returns permtriton.json."""
        if not (self.folder / REPORT_FILE).is_file():
            raise ModelError(
                f"{self.folder} was not written by permtriton (it holds no {REPORT_FILE}): give an output of "
                "permtriton compile"
            )
        return read_json(self.folder / REPORT_FILE)

    def read_pruned(self, report: Mapping[str, Any]) -> None:
        """Finds out from the report what is pruned, and how."""
        place, config = self.folder / REPORT_FILE, report.get("config")
        sparsity = config.get("sparsity") if isinstance(config, dict) else None
        if not isinstance(sparsity, str):
            raise ModelError(f"{place} tells no config.sparsity, such as 2:4: the file is damaged")
        try:
            pattern = NMPattern.parse(sparsity)
        except ConfigError as error:
            raise ModelError(f"{place}: {error}: the file is damaged") from error
        if self.pattern not in (None, pattern):
            raise ModelError(f"{place} tells a sparsity of {pattern}, config.json of {self.pattern}: one is damaged")
        self.pattern = pattern
        check_hashes(self.folder, _told_hashes(report, place), REPORT_FILE)
        if self.packed:
            if report.get("pruned_weights", self.pruned) != self.pruned:
                raise ModelError(
                    f"{place} and {CONFIG_FILE}, quantization_config tell of different pruned weights: one is damaged"
                )
            return
        self.pruned = _told_weights(report, place)
        for name, dim in self.pruned.items():
            if name not in self.stored:
                raise ModelError(f"{place} names the pruned weight {name}, which the checkpoint does not hold")
            self._check_shape(name, dim)

    def _check_shape(self, name: str, dim: int | None) -> None:
        tensor, assumed = self.stored[name], self.dense_shape(name)
        fits = 2 <= len(assumed) <= 4 and (dim is None or 0 <= dim < len(assumed))
        assert self.pattern is not None
        if not fits or tensor.dtype not in FLOATS or assumed[-1 if dim is None else dim] % self.pattern.group:
            raise ModelError(
                f"{tensor.file}: {name} is {tensor.dtype} {list(assumed)}, which is no weight that was pruned to "
                f"{self.pattern} along dimension {dim}: the checkpoint or {REPORT_FILE} is damaged"
            )

    def names(self) -> list[str]:
        """Returns the model's tensors, file by file."""
        parts = {f"{name}_{part}": name for name in self.packed for part in ("values", "positions")}
        ordered = sorted(self.stored, key=lambda name: (self.stored[name].file, name))
        return list(dict.fromkeys(parts.get(name, name) for name in ordered))

    def dense_shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape in the model."""
        if name in self.packed:
            return tuple(self.packed[name]["shape"])
        shape = self.stored[name].shape
        return shape[1:] if name in self._thicker and shape[:1] == (1,) and len(shape) > 1 else shape

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor in the model's shape, unpacked."""
        if name not in self.packed:
            return self._read(name).view(self.dense_shape(name))
        entry = self.packed[name]
        assert self.pattern is not None
        values, positions = self._read(f"{name}_values"), self._read(f"{name}_positions")
        return unpacked(name, values, positions, entry["shape"], entry["dim"], self.pattern.kept, self.pattern.group)

    def input_dim(self, name: str, weight: Tensor) -> int:
        """Returns a pruned weight's input dimension; untold, the last along which it is N:M, or the last."""
        told = self.pruned[name]
        if told is not None:
            return told
        assert self.pattern is not None
        for dim in reversed(range(weight.ndim)):
            if weight.shape[dim] % self.pattern.group == 0:
                groups = weight.movedim(dim, -1).unflatten(-1, (-1, self.pattern.group))
                if int((groups != 0).sum(-1).max()) <= self.pattern.kept:
                    return dim
        return weight.ndim - 1

    def stored_form(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a tensor as a dense checkpoint stores it: see `permtriton.quantizer`."""
        return tensor.unsqueeze(0) if name in self._thicker else tensor

    def _read(self, name: str) -> Tensor:
        file = self.stored[name].file
        try:
            if file not in self._opened:
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            return self._opened[file].get_tensor(name)
        except (SafetensorError, ValueError, RuntimeError) as error:
            raise ModelError(f"{file}: {name} cannot be read ({error}): the file is damaged") from error


def _quantization(folder: Path, config: Mapping[str, Any]) -> PermTritonQuantizationConfig | None:
    entries = config.get("quantization_config")
    if entries is None:
        return None
    if not isinstance(entries, dict) or entries.get("quant_method") != METHOD:
        raise ModelError(
            f"{folder / CONFIG_FILE}: quantization_config is not permtriton's: only its own can be exported"
        )
    return PermTritonQuantizationConfig(**entries)


def _told_hashes(report: Mapping[str, Any], place: Path) -> dict[str, str]:
    files = report.get("files", {})
    if not isinstance(files, dict) or not all(isinstance(told, dict) and "sha256" in told for told in files.values()):
        raise ModelError(f"{place}: files is no object of file names, sizes and hashes: the file is damaged")
    if unsafe := [name for name in files if Path(name).name != name]:
        raise ModelError(f"{place} names the file {unsafe[0]!r}: expected one in the same folder")
    return {name: told["sha256"] for name, told in files.items()}


def _told_weights(report: Mapping[str, Any], place: Path) -> dict[str, int | None]:
    """Returns the pruned weights that a report tells of; an older one names linears, and no dimensions."""
    told = report.get("pruned_weights")
    if isinstance(told, dict) and told and all(type(dim) is int for dim in told.values()):
        return dict(told)
    sites = report.get("sites")
    linears = [site.get("linears") for site in sites if isinstance(site, dict)] if isinstance(sites, list) else []
    names = [name for group in linears if isinstance(group, list) for name in group]
    if told is not None or not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{place} does not tell which weights are pruned: the file is damaged")
    return {f"{name}.weight": None for name in names}


def _write(source: _Checkpoint, partial: Path, format: str, shard_bytes: int, progress: Progress) -> dict[str, Any]:
    writer, packed, dense_bytes, stored_bytes = ShardWriter(partial, shard_bytes), {}, 0, 0
    names = source.names()
    with progress.stage("export", len(names)) as advance:
        for name in names:
            tensor = source.tensor(name)
            if name in source.pruned:
                dim = source.input_dim(name, tensor)
                matrix = tensor.movedim(dim, -1).flatten(0, -2)
                assert source.pattern is not None
                check_weight(name, matrix, source.pattern)
                dense_bytes += tensor.nbytes
                if format == "packed":
                    parts = pack(matrix, source.pattern.kept, source.pattern.group)
                    packed[name] = {"shape": list(tensor.shape), "dim": dim}
                    stored_bytes += sum(part.nbytes for part in parts)
                    for part, stored in zip(("values", "positions"), parts, strict=True):
                        writer.add(f"{name}_{part}", stored)
                    writer.add(name, tensor.new_empty(0))
                    advance()
                    continue
                stored_bytes += tensor.nbytes
            writer.add(name, source.stored_form(name, tensor))
            advance()
        files = writer.close()
    described = describe_files(files)
    config = _config(source, packed, {name: told["sha256"] for name, told in described.items()})
    (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _copy_others(source.folder, partial)
    share_mode(partial)
    return {
        "format": format,
        "sparsity": str(source.pattern),
        "weights": len(source.pruned),
        "dense_bytes": dense_bytes,
        "stored_bytes": stored_bytes,
        "ratio": round(stored_bytes / dense_bytes, 6),
        "loads_with": "transformers after import permtriton" if packed or source.permuted else "transformers alone",
        "files": described,
    }


def _config(source: _Checkpoint, packed: dict[str, Any], hashes: dict[str, str]) -> dict[str, Any]:
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    if packed or source.permuted:
        quantization = source.quantization
        config["quantization_config"] = PermTritonQuantizationConfig(
            version=VERSION,
            format="packed" if packed else "dense",
            sparsity=str(source.pattern),
            packed=packed,
            gathers=quantization.gathers if quantization else {},
            norms=quantization.norms if quantization else {},
            sha256=hashes,
        ).to_dict()
    return config


def _copy_others(folder: Path, partial: Path) -> None:
    """Copies tokenizer, generation config and whatever else lies there."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors" or path.name in (CONFIG_FILE, INDEX_FILE, REPORT_FILE):
            continue
        if path.is_dir():
            shutil.copytree(path, partial / path.name)
        elif path.is_file():
            shutil.copy2(path, partial / path.name)


def _verify(source: _Checkpoint, partial: Path, progress: Progress) -> None:
    """Reads everything back and compares it bit by bit.

    Raises:
        VerificationError: naming the first difference.
    """
    with ExitStack() as stack:
        try:
            written = _Checkpoint(partial, stack)
        except ModelError as error:
            raise VerificationError(f"what was written cannot be read again: {error}") from error
        written.pattern = source.pattern
        names = source.names()
        if differing := sorted(set(names) ^ set(written.names())):
            raise VerificationError(f"{differing[0]}: not both in what was read and in what was written")
        with progress.stage("verify", len(names)) as advance:
            for name in names:
                if not _same_bits(source.tensor(name), written.tensor(name)):
                    raise VerificationError(f"{name}: what was written differs from what was read")
                advance()


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(first.flatten().view(torch.uint8), second.flatten().view(torch.uint8))
