"""Rewrites a permtriton checkpoint in another format, tensor by tensor, and checks that it loads."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import Tensor

from permtriton.checkpoint.card import ALONE, WITH_PERMTRITON, write_card
from permtriton.checkpoint.folder import Folder
from permtriton.checkpoint.format import Format
from permtriton.checkpoint.forms import described_sparsity
from permtriton.checkpoint.output import check_apart, claimed, replacing_folder
from permtriton.checkpoint.plan_entries import to_json
from permtriton.checkpoint.quantization_config import (
    VERSION,
    Packed,
    PermTritonQuantizationConfig,
    packed_entry,
)
from permtriton.checkpoint.reload import check_reloads
from permtriton.checkpoint.save import share_mode
from permtriton.checkpoint.shards import SHARD_BYTES, ShardWriter, describe_files
from permtriton.errors import ConfigError, ModelError, VerificationError, shown
from permtriton.kernels.packing import pack
from permtriton.model.checks import check_weight
from permtriton.model.headers import CONFIG_FILE, INDEX_FILE, REPORT_FILE
from permtriton.util.output_files import real_path
from permtriton.util.progress import NoProgress, Progress


def export(
    folder: Path,
    output: Path,
    format: str = Format.PACKED,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes ``folder`` in another format to ``output``, verifies it bit by bit, and renames it into place.

    Args:
        folder: folder that ``permtriton compile`` or this function wrote.
        output: folder to write.
        format: a `Format`, or its name.
        overwrite: whether an earlier output of permtriton may be replaced.
        shard_bytes: bytes per file; at most one file, or one larger tensor, is held in memory.

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
    check_format(format)
    check_apart(output, folder)
    started, progress = time.perf_counter(), progress or NoProgress()
    with claimed(output, overwrite=overwrite, say=progress.say):
        source = Folder.open(folder)
        source.check_listed()
        source.check_hashes()
        source.check_recorded_hashes()
        check_format(format, permuted=bool(source.permuted), what=str(folder))
        with replacing_folder(output, overwrite=overwrite) as partial:
            result = _write(source, partial, Format(format), shard_bytes, progress)
            _verify(source, partial, progress)
            stored = sum(entry["bytes"] for entry in result["files"].values())
            result["reloaded"] = check_reloads(folder, partial, stored + result["dense_bytes"] - result["stored_bytes"])
            result["seconds"] = round(time.perf_counter() - started, 3)
            section = {key: value for key, value in result.items() if key != "files"}
            new_report: dict[str, Any] = {**source.record, "files": result["files"], "export": section}
            new_report["card"] = write_card(partial, new_report, result["loads_with"], real_path(output).name)
            (partial / REPORT_FILE).write_text(to_json(new_report) + "\n", encoding="utf-8")
    return result


def check_format(format: str, *, permuted: bool = False, what: str = "the model") -> None:
    """Refuses a format that is unknown, or that a model cannot have.

    Args:
        permuted: whether the model permutes channels at run time.
        what: the model, for the error.

    Raises:
        ConfigError: as `export`.
    """
    if format not in list(Format):
        raise ConfigError(f"format {shown(format)} is unknown: choose one of {', '.join(Format)}")
    if format == Format.PLAIN and permuted:
        raise ConfigError(
            f"{what} permutes channels at run time (layout fused), which transformers alone cannot do: compile the "
            "original model with `layout=portable` for a plain checkpoint, or write this one as dense or packed"
        )


def _write(source: Folder, partial: Path, format: Format, shard_bytes: int, progress: Progress) -> dict[str, Any]:
    """Writes everything except the report; returns what `export` returns, except the seconds."""
    writer, dense_bytes, stored_bytes = ShardWriter(partial, shard_bytes), 0, 0
    packed: dict[str, Packed] = {}
    names, pruned, sparsity = source.names(), source.pruned, str(source.pattern)
    with progress.stage("export", len(names)) as advance:
        for name in names:
            tensor = source.tensor(name)
            parts = {name: tensor.unsqueeze(0) if source.has_more_dimensions(name) else tensor}
            if name in pruned:
                matrix = tensor.movedim(pruned[name].dim, -1).flatten(0, -2)
                check_weight(name, matrix, pruned[name].pattern)
                match format:
                    case Format.PACKED:
                        values, positions = pack(matrix, pruned[name].pattern)
                        parts = {f"{name}_values": values, f"{name}_positions": positions, name: tensor.new_empty(0)}
                        packed[name] = packed_entry(tensor.shape, pruned[name], sparsity)
                    case Format.DENSE | Format.PLAIN:
                        pass
                    case _:
                        assert_never(format)
                dense_bytes += tensor.nbytes
                stored_bytes += sum(part.nbytes for part in parts.values())
            for key, part in parts.items():
                writer.add(key, part)
            advance()
        files = describe_files(writer.close())
    config = _config(source, packed, {name: entry["sha256"] for name, entry in files.items()})
    (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _copy_others(source.path, partial, progress)
    share_mode(partial)
    return {
        "format": str(format),
        "sparsity": described_sparsity(source.record),
        "weights": len(pruned),
        "dense_bytes": dense_bytes,
        "stored_bytes": stored_bytes,
        "ratio": round(stored_bytes / dense_bytes, 6),
        "loads_with": WITH_PERMTRITON if packed or source.permuted else ALONE,
        "files": files,
    }


def _config(source: Folder, packed: dict[str, Packed], hashes: dict[str, str]) -> dict[str, Any]:
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    if packed or source.permuted:
        quantization = source.quantization
        config["quantization_config"] = PermTritonQuantizationConfig(
            version=VERSION,
            format=Format.PACKED if packed else Format.DENSE,
            sparsity=str(source.pattern),
            packed=packed,
            gathers=quantization.gathers if quantization else {},
            norms=quantization.norms if quantization else {},
            sha256=hashes,
        ).to_dict()
    return config


def _copy_others(folder: Path, partial: Path, progress: Progress) -> None:
    """Copies the tokenizer, the generation config and all other files that export does not write itself.

    Links to folders are not followed, nor are links out of the folder: they may lead anywhere, and what they lead to
    might be published. The hub's cache holds nothing but links, into a folder of its own.
    """
    inside = [real_path(folder), *([real_path(folder.parent.parent / "blobs")] * (folder.parent.name == "snapshots"))]
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            ours = path.suffix == ".safetensors" or path.name in (CONFIG_FILE, INDEX_FILE, REPORT_FILE)
            if path.is_symlink() and not any(real_path(path).is_relative_to(each) for each in inside):
                progress.say(f"left out {path}, a link out of the folder")
            elif path.is_file() and not (ours and path.parent == folder):
                copy = partial / path.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)


def _verify(source: Folder, partial: Path, progress: Progress) -> None:
    """Reads all tensors back and compares them bit by bit.

    Raises:
        VerificationError: a tensor differs or is missing; the message names the first one.
    """
    written = Folder.open(partial)
    try:
        written.check_listed()
        written.check_hashes()
    except ModelError as error:
        raise VerificationError(f"what was written cannot be read again: {error}") from error
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
