"""Reads the JSON files, the safetensors headers and the index of a checkpoint, but no tensor."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from permtriton.errors import ModelError, reading, shown

WEIGHTS_FILE, INDEX_FILE, CONFIG_FILE = "model.safetensors", "model.safetensors.index.json", "config.json"
REPORT_FILE = "permtriton.json"  # marks a folder that permtriton wrote
# safetensors' name of each dtype that a weight may have
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file's header describes it."""

    file: Path  # safetensors or GGUF file that holds it
    dtype: str  # the file format's name of the dtype, such as ``BF16`` or ``Q4_1``
    shape: tuple[int, ...]  # size of each dimension


def read_json(path: Path) -> dict[str, Any]:
    with reading(f"{path} cannot be read as JSON", ModelError):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}: expected an object")
    return content


def checkpoint_files(folder: Path) -> list[Path]:
    """Returns the files of weights in a folder: `WEIGHTS_FILE`, or those of the same folder that the index names."""
    if (folder / WEIGHTS_FILE).is_file():  # if it exists, transformers reads it and ignores an index
        return [folder / WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise ModelError(
            f"{folder} holds no weights that permtriton reads, neither {WEIGHTS_FILE} nor {INDEX_FILE}: convert "
            "pickles (.bin, .pt), which can run code when they are read, to .safetensors first"
        )
    names = indexed_files(index)
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} does not exist, but {index.name} names it: the checkpoint is incomplete")
    return [folder / name for name in names]


def indexed_files(index: Path) -> list[str]:
    """Returns the names of the files that an index names; refuses those of other folders and of other formats."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise ModelError(f"{index}: weight_map is not an object of tensor names and file names; the file is damaged")
    names = sorted(set(listed.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names the file {shown(name)}: expected a .safetensors file in the same folder")
    return names


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Reads and checks the headers of a checkpoint: one file, or the shards that its index names."""
    return read_headers(checkpoint_files(folder))


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Reads and checks the headers of safetensors files. No tensor is allocated, whatever size a header claims."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        with (
            reading(f"{file} is not a complete safetensors file, it is damaged or truncated", ModelError),
            safe_open(file, framework="pt") as opened,
        ):
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                if name in stored:
                    raise ModelError(f"tensor {name} is both in {stored[name].file} and in {file}")
                stored[name] = StoredTensor(file, part.get_dtype(), tuple(part.get_shape()))
    return stored
