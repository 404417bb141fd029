"""Rewrites a permtriton checkpoint in another format, tensor by tensor, and checks that it loads.

Formats: "packed" (kept values and their positions), "dense" (zeros are stored, too) and "plain" (dense, and loads with
transformers alone). A model with permuted modules has no plain form; its dense form needs permtriton.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from permtriton.checkpoint.card import ALONE, WITH_PERMTRITON, write_card
from permtriton.checkpoint.files import (
    SHARD_BYTES,
    ShardWriter,
    check_hashes,
    describe_files,
)
from permtriton.checkpoint.loading import packed_parts, unpacked
from permtriton.checkpoint.output import claimed, replacing_folder
from permtriton.checkpoint.plan_entries import to_json
from permtriton.checkpoint.record import CARD_RECORD, read_record
from permtriton.checkpoint.reload import check_reloads
from permtriton.checkpoint.save import share_mode
from permtriton.checkpoint.schema import METHOD, VERSION, PermTritonQuantizationConfig
from permtriton.errors import ConfigError, ModelError, OutputError, VerificationError
from permtriton.kernels.packing import pack
from permtriton.model.checks import check_weight
from permtriton.model.load import REPORT_FILE
from permtriton.model.modules import check_index
from permtriton.model.stored import CONFIG_FILE, FLOATS, INDEX_FILE, read_checkpoint, read_json
from permtriton.progress import NoProgress, Progress
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
        folder: folder that ``permtriton compile`` or this function wrote.
        output: folder to write.
        format: one of `FORMATS`.
        overwrite: whether an earlier output of permtriton may be replaced.
        shard_bytes: bytes per file; at most one file, or one larger tensor, is held in memory.
        progress: progress reporter.

    Returns:
        format, sparsity, weights, dense_bytes, stored_bytes, ratio, loads_with, reloaded (as `check_reloads`) and
        seconds, which are also the entry ``export`` of ``permtriton.json``; and files: bytes and SHA-256 per file, as
        in its entry ``files``.

    Raises:
        ConfigError: an unknown format, or "plain" for a model that permutes at run time.
        ModelError: ``folder`` was not written by permtriton or is damaged.
        OutputError: ``output`` exists and may not be replaced, or cannot be written.
        VerificationError: a pruned weight is not N:M, the written tensors differ from the ones that were read, or the
            written folder does not load as the model that it was made from.
    """
    if format not in FORMATS:
        raise ConfigError(f"format {format!r} is unknown: choose one of {', '.join(FORMATS)}")
    inner, outer = folder.resolve(), output.resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise OutputError(f"output {output} is, contains or is in the folder that is exported: choose another folder")
    started, progress = time.perf_counter(), progress or NoProgress()
    with claimed(output, overwrite=overwrite, say=progress.say), ExitStack() as stack:
        source = _Checkpoint(folder, stack)
        report = read_record(folder, CARD_RECORD)
        source.read_pruned(report)
        if format == "plain" and source.permuted:
            raise ConfigError(
                f"{folder} permutes channels at run time ({source.permuted[0]} and {len(source.permuted) - 1} more "
                "modules), which transformers alone cannot do: compile the original model with --layout portable for a "
                "plain checkpoint, or export this one as dense or packed"
            )
        with replacing_folder(output, overwrite=overwrite) as partial:
            result = _write(source, partial, format, shard_bytes, progress)
            _verify(source, partial, progress)
            stored = sum(entry["bytes"] for entry in result["files"].values())
            result["reloaded"] = check_reloads(folder, partial, stored + result["dense_bytes"] - result["stored_bytes"])
            result["seconds"] = round(time.perf_counter() - started, 3)
            section = {key: value for key, value in result.items() if key != "files"}
            new_report = {**report, "files": result["files"], "export": section}
            new_report["card"] = write_card(partial, new_report, result["loads_with"])
            (partial / REPORT_FILE).write_text(to_json(new_report) + "\n", encoding="utf-8")
    return result


class _Checkpoint:
    """A permtriton checkpoint, read lazily. It gives each tensor as the model has it, however it is stored.

    Attributes:
        folder: folder of the checkpoint.
        config: content of config.json.
        quantization: permtriton's entries in the config; None in a plain checkpoint.
        stored: tensor name -> description of the stored tensor.
        packed: packed parameter -> its shape and input dimension.
        permuted: names of the modules that permute at run time.
        pruned: pruned parameter -> input dimension; None if the dimension is not recorded.
        pattern: N:M pattern of the pruned parameters.
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
        self._with_extra_dim = {f"{name}.weight" for name in self.permuted}
        self.pruned: dict[str, int | None] = {name: entry["dim"] for name, entry in self.packed.items()}
        self.pattern = self.quantization.pattern if self.quantization else None
        check_hashes(folder, self.quantization.sha256 if self.quantization else {}, CONFIG_FILE)
        for name in self.packed:
            packed_parts(name, self.stored)
        for name in (name.removesuffix("_values") for name in self.stored if name.endswith("_values")):
            if name in self.stored and name not in self.packed:
                raise ModelError(
                    f"{folder}: {name} is stored packed, but {CONFIG_FILE}, quantization_config does not list it: "
                    "the checkpoint is damaged"
                )
        self._check_permutations()

    def _check_permutations(self) -> None:
        norms = self.quantization.norms if self.quantization else {}
        gathers = self.quantization.gathers if self.quantization else {}
        channels = {f"{name}.index": entry["channels"] for name, entry in norms.items()}
        channels.update({f"{name}.gather.index": count for name, count in gathers.items()})
        stored = {name for name in self.stored if name.endswith(".gather.index")}
        for name in sorted({*channels, *stored}):
            if name not in channels or name not in self.stored:
                where = "the weights" if name in channels else f"{CONFIG_FILE}, quantization_config"
                raise ModelError(
                    f"{self.folder}: permutation {name} is missing from {where}: the checkpoint is damaged"
                )
            check_index(self._read(name), channels[name], f"{self.stored[name].file}, {name}")

    def read_pruned(self, report: Mapping[str, Any]) -> None:
        """Reads the pattern and the pruned parameters from the report, and checks them."""
        path, config = self.folder / REPORT_FILE, report.get("config")
        sparsity = config.get("sparsity") if isinstance(config, dict) else None
        if not isinstance(sparsity, str):
            raise ModelError(f"{path}: config.sparsity, such as 2:4, is missing: the file is damaged")
        try:
            pattern = NMPattern.parse(sparsity)
        except ConfigError as error:
            raise ModelError(f"{path}: {error}: the file is damaged") from error
        if self.pattern not in (None, pattern):
            raise ModelError(
                f"{path} has the sparsity {pattern}, but {CONFIG_FILE} has {self.pattern}: one of them is damaged"
            )
        self.pattern = pattern
        check_hashes(self.folder, _recorded_hashes(report, path), REPORT_FILE)
        if self.packed:
            if report.get("pruned_weights", self.pruned) != self.pruned:
                raise ModelError(
                    f"{path} and {CONFIG_FILE}, quantization_config list different pruned weights: one of them is "
                    "damaged"
                )
            return
        self.pruned = _recorded_weights(report, path)
        for name, dim in self.pruned.items():
            if name not in self.stored:
                raise ModelError(f"{path} lists the pruned weight {name}, which the checkpoint does not hold")
            self._check_shape(name, dim)

    def _check_shape(self, name: str, dim: int | None) -> None:
        tensor, shape = self.stored[name], self.dense_shape(name)
        fits = 2 <= len(shape) <= 4 and (dim is None or 0 <= dim < len(shape))
        assert self.pattern is not None
        if not fits or tensor.dtype not in FLOATS or shape[-1 if dim is None else dim] % self.pattern.group:
            raise ModelError(
                f"{tensor.file}: {name} is {tensor.dtype} {list(shape)}, which cannot have been pruned to "
                f"{self.pattern} along dimension {dim}: the checkpoint or {REPORT_FILE} is damaged"
            )

    def names(self) -> list[str]:
        """Returns the names of the model's tensors, ordered by file and name."""
        parts = {f"{name}_{part}": name for name in self.packed for part in ("values", "positions")}
        ordered = sorted(self.stored, key=lambda name: (self.stored[name].file, name))
        return list(dict.fromkeys(parts.get(name, name) for name in ordered))

    def dense_shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape in the model."""
        if name in self.packed:
            return tuple(self.packed[name]["shape"])
        shape = self.stored[name].shape
        return shape[1:] if name in self._with_extra_dim and shape[:1] == (1,) and len(shape) > 1 else shape

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor in the model's shape, and unpacks it if it is packed."""
        if name not in self.packed:
            return self._read(name).view(self.dense_shape(name))
        entry = self.packed[name]
        assert self.pattern is not None
        values, positions = self._read(f"{name}_values"), self._read(f"{name}_positions")
        return unpacked(name, values, positions, entry["shape"], entry["dim"], self.pattern)

    def input_dim(self, name: str, weight: Tensor) -> int:
        """Returns the input dimension of a pruned weight.

        If the report does not record it: the last dimension along which the weight is N:M, else the last dimension.
        """
        recorded = self.pruned[name]
        if recorded is not None:
            return recorded
        assert self.pattern is not None
        for dim in reversed(range(weight.ndim)):
            if weight.shape[dim] % self.pattern.group == 0:
                groups = weight.movedim(dim, -1).unflatten(-1, (-1, self.pattern.group))
                if int((groups != 0).sum(-1).max()) <= self.pattern.kept:
                    return dim
        return weight.ndim - 1

    def stored_form(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a tensor as a dense checkpoint stores it; see `permtriton.checkpoint.quantizer`."""
        return tensor.unsqueeze(0) if name in self._with_extra_dim else tensor

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
            f"{folder / CONFIG_FILE}: quantization_config is not permtriton's: only permtriton checkpoints can be "
            "exported"
        )
    return PermTritonQuantizationConfig(**entries)


def _recorded_hashes(report: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Returns file name -> SHA-256, as the report in the file ``path`` lists them."""
    files = report.get("files", {})
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and "sha256" in entry for entry in files.values()
    ):
        raise ModelError(f"{path}: files is not an object of file names, sizes and hashes: the file is damaged")
    if unsafe := [name for name in files if Path(name).name != name]:
        raise ModelError(f"{path} names the file {unsafe[0]!r}: expected a file in the same folder")
    return {name: entry["sha256"] for name, entry in files.items()}


def _recorded_weights(report: Mapping[str, Any], path: Path) -> dict[str, int | None]:
    """Returns pruned parameter -> input dimension; None in older reports, which list only the linears of each site."""
    weights = report.get("pruned_weights")
    if isinstance(weights, dict) and weights and all(type(dim) is int for dim in weights.values()):
        return dict(weights)
    sites = report.get("sites")
    linears = [site.get("linears") for site in sites if isinstance(site, dict)] if isinstance(sites, list) else []
    names = [name for group in linears if isinstance(group, list) for name in group]
    if weights is not None or not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{path} does not say which weights are pruned: the file is damaged")
    return {f"{name}.weight": None for name in names}


def _write(source: _Checkpoint, partial: Path, format: str, shard_bytes: int, progress: Progress) -> dict[str, Any]:
    """Writes everything except the report; returns what `export` returns, except the seconds."""
    writer, packed, dense_bytes, stored_bytes = ShardWriter(partial, shard_bytes), {}, 0, 0
    names = source.names()
    with progress.stage("export", len(names)) as advance:
        for name in names:
            tensor = source.tensor(name)
            parts = {name: source.stored_form(name, tensor)}
            if name in source.pruned:
                dim = source.input_dim(name, tensor)
                matrix = tensor.movedim(dim, -1).flatten(0, -2)
                assert source.pattern is not None
                check_weight(name, matrix, source.pattern)
                if format == "packed":
                    values, positions = pack(matrix, source.pattern)
                    parts = {f"{name}_values": values, f"{name}_positions": positions, name: tensor.new_empty(0)}
                    packed[name] = {"shape": list(tensor.shape), "dim": dim}
                dense_bytes += tensor.nbytes
                stored_bytes += sum(part.nbytes for part in parts.values())
            for key, part in parts.items():
                writer.add(key, part)
            advance()
        files = describe_files(writer.close())
    config = _config(source, packed, {name: entry["sha256"] for name, entry in files.items()})
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
        "loads_with": WITH_PERMTRITON if packed or source.permuted else ALONE,
        "files": files,
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
    """Copies the tokenizer, the generation config and all other files that export does not write itself.

    Links to folders are not followed: they may lead anywhere, and round in a circle.
    """
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            ours = path.suffix == ".safetensors" or path.name in (CONFIG_FILE, INDEX_FILE, REPORT_FILE)
            if path.is_file() and not (ours and path.parent == folder):
                copy = partial / path.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)


def _verify(source: _Checkpoint, partial: Path, progress: Progress) -> None:
    """Reads all tensors back and compares them bit by bit.

    Raises:
        VerificationError: a tensor differs or is missing; the message names the first one.
    """
    with ExitStack() as stack:
        try:
            written = _Checkpoint(partial, stack)
        except ModelError as error:
            raise VerificationError(f"what was written cannot be read again: {error}") from error
        written.pattern = source.pattern
        names = source.names()
        if differing := sorted(set(names) ^ set(written.names())):
            raise VerificationError(f"{differing[0]}: it was read but not written, or written but not read")
        with progress.stage("verify", len(names)) as advance:
            for name in names:
                if not _same_bits(source.tensor(name), written.tensor(name)):
                    raise VerificationError(f"{name}: what was written differs from what was read")
                advance()


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(first.flatten().view(torch.uint8), second.flatten().view(torch.uint8))
