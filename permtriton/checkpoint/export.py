"""Rewrites a folder that permtriton wrote in another format, file by file, and verifies what was written."""

import json
import os
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from permtriton.checkpoint.card import write_record
from permtriton.checkpoint.folder import Folder, check_hashes, describe_weights
from permtriton.checkpoint.format_writer import FormatWriter
from permtriton.checkpoint.formats import IN_8_BITS, Format
from permtriton.checkpoint.fp8 import Fp8Writer, packed_fp8_writer
from permtriton.checkpoint.output import check_apart, claimed, replacing_folder
from permtriton.checkpoint.read_record import described_sparsity
from permtriton.checkpoint.save import copy_file, share_mode
from permtriton.errors import ConfigError, ModelError, shown
from permtriton.model.headers import CONFIG_FILE, INDEX_FILE, REPORT_FILE, WEIGHTS_FILE
from permtriton.util.extras import require
from permtriton.util.output_files import real_path
from permtriton.util.progress import NoProgress, Progress

WRITERS: dict[Format, Callable[[Folder], FormatWriter]] = {
    Format.PACKED: lambda source: FormatWriter(source, packed=source.pruned),
    Format.PACKED_FP8: packed_fp8_writer,
    Format.DENSE: FormatWriter,
    Format.FP8: Fp8Writer,
}
THEIRS = (".git", ".cache")


def export(
    folder: Path,
    output: Path,
    format: str = Format.PACKED,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Does the work of `permtriton.export`: writes a folder in another format, verifies it, and renames it into place.

    Each file of weights is rewritten under the same name; the tensors of one file are in memory at once.

    Returns:
        The entry ``export`` of the new ``permtriton.json``, and ``files``, as in its entry ``files``.
    """
    check_apart(output, folder)
    progress = progress or NoProgress()
    with claimed(output, overwrite=overwrite, say=progress.say):
        source = Folder(folder)
        if source.is_quantized:
            raise ModelError(
                f"{folder} is quantized already, and does not hold its weights before they were rounded: export the "
                "folder that it was made from"
            )
        check_format(format, permuted=bool(source.entries.permuted), what=str(folder))
        check_hashes(folder, {name: file["sha256"] for name, file in source.record["files"].items()})
        return rewrite(source, output, format, overwrite=overwrite, progress=progress)


def rewrite(
    source: Folder, output: Path, format: str, *, overwrite: bool, progress: Progress | None = None
) -> dict[str, Any]:
    """Does what `export` does, but does not check the folder or the format."""
    started, progress = time.perf_counter(), progress or NoProgress()
    writer = WRITERS[Format(format)](source)
    with replacing_folder(output, overwrite=overwrite) as partial:
        dense_bytes, stored_bytes = _write_tensors(writer, partial, progress)
        files = _write_config(writer, partial)
        _copy_others(source.path, partial, progress)
        share_mode(partial)
        writer.verify(Folder(partial), progress)
        entry = {
            "format": str(format),
            "sparsity": described_sparsity(source.record),
            "weights": len(source.pruned),
            "dense_bytes": dense_bytes,
            "stored_bytes": stored_bytes,
            "ratio": round(stored_bytes / dense_bytes, 6),
            "loads_with": writer.loads_with,
            **(writer.counts if format in IN_8_BITS else {}),
            "seconds": round(time.perf_counter() - started, 3),
        }
        record = {**source.record, "files": files, "export": entry}
        write_record(partial, record, writer.loads_with, real_path(output).name)
    return {**entry, "files": files}


def check_format(format: str, *, permuted: bool, what: str) -> None:
    """Refuses a format that is unknown, not installed, or impossible for a model that permutes channels at run time."""
    if format not in list(Format):
        raise ConfigError(f"format {shown(format)} is unknown: choose one of {', '.join(Format)}")
    if format == Format.FP8:  # other programs load it without permtriton, so no module may permute
        if permuted:
            raise ConfigError(
                f"{what} permutes channels at run time (layout fused), which only permtriton can do: compile the "
                "original model with `layout=portable` for a fp8 checkpoint, or write this one as dense or packed"
            )
        require("format fp8", "compressed_tensors")  # which describes it to other programs


def _write_tensors(writer: FormatWriter, partial: Path, progress: Progress) -> tuple[int, int]:
    """Writes the files of weights and their index; returns the bytes of the pruned weights, dense and as stored."""
    source, names = writer.source, writer.source.names()
    dense_bytes = stored_bytes = all_bytes = 0
    weight_map: dict[str, str] = {}
    with progress.stage("export", len(names)) as advance:
        for file, in_file in groupby(sorted(names, key=source.file_of), source.file_of):
            stored: dict[str, Tensor] = {}
            for name in in_file:
                tensor = source.tensor(name)
                parts = writer.parts(name, tensor)
                if name in source.pruned:
                    dense_bytes += tensor.nbytes
                    stored_bytes += sum(part.nbytes for part in parts.values())
                stored |= parts
                advance()
            save_file(stored, partial / file, {"format": "pt"})
            weight_map |= dict.fromkeys(stored, file)
            all_bytes += sum(part.nbytes for part in stored.values())
    if {*weight_map.values()} != {WEIGHTS_FILE}:
        index = {"metadata": {"total_size": all_bytes}, "weight_map": weight_map}
        (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return dense_bytes, stored_bytes


def _write_config(writer: FormatWriter, partial: Path) -> dict[str, dict[str, Any]]:
    """Writes config.json beside the files of weights; returns the size and the hash of each of these."""
    files = describe_weights(partial)
    config = {key: value for key, value in writer.source.config.items() if key != "quantization_config"}
    if quantization := writer.quantization_config({name: entry["sha256"] for name, entry in files.items()}):
        config["quantization_config"] = quantization
    (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return files


def _copy_others(folder: Path, partial: Path, progress: Progress) -> None:
    """Copies all files that export does not write itself, such as those of the tokenizer.

    Links to folders, links out of the folder, and what git and the hub's client keep in the folder are left out.
    """
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in THEIRS]
        for path in (Path(place, name) for name in names):
            ours = path.suffix == ".safetensors" or path.name in (CONFIG_FILE, INDEX_FILE, REPORT_FILE)
            if path.is_file() and not (ours and path.parent == folder) and not copy_file(path, folder, partial):
                progress.say(f"left out {path}, a link out of the folder")
