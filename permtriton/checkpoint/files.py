"""Files of a checkpoint: reads and checks safetensors headers before any tensor, writes shards, computes hashes."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from permtriton.errors import ModelError

WEIGHTS_FILE, INDEX_FILE, CONFIG_FILE = "model.safetensors", "model.safetensors.index.json", "config.json"
SHARD_BYTES = 5 * 10**9
MAX_JSON_BYTES = 10**8
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file's header describes it.

    Attributes:
        file: safetensors file that holds it.
        dtype: safetensors' name of the dtype, such as ``BF16``.
        shape: size of each dimension.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ModelError: the file is missing, too large, not JSON, or holds no object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(
                f"{path} has {path.stat().st_size} bytes: expected a JSON file of at most {MAX_JSON_BYTES} bytes"
            )
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}): the file is damaged") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}: expected an object")
    return content


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Reads and checks the headers of all safetensors files of a checkpoint.

    Args:
        folder: folder that holds either one file of weights, or shards and their index.

    Returns:
        Tensor name -> description.

    Raises:
        ModelError: no weights, a damaged file, or an index that is damaged or points outside the folder.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / WEIGHTS_FILE).is_file():
            raise ModelError(
                f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}: it is not a safetensors checkpoint"
            )
        return read_headers([folder / WEIGHTS_FILE])
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise ModelError(f"{index}: weight_map is not an object of tensor names and file names; the file is damaged")
    names = sorted(set(listed.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names the file {name!r}: expected a .safetensors file in the same folder")
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} does not exist, but {index.name} names it: the checkpoint is incomplete")
    stored = read_headers([folder / name for name in names])
    actual = {name: tensor.file.name for name, tensor in stored.items()}
    if differing := sorted(name for name in {**actual, **listed} if actual.get(name) != listed.get(name)):
        name = differing[0]
        raise ModelError(
            f"{index}: tensor {name} is in {actual.get(name, 'no file')}, but the index says "
            f"{listed.get(name, 'nowhere')}; the checkpoint is damaged"
        )
    return stored


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Reads and checks the headers of safetensors files. No tensor is allocated, whatever size a header claims.

    Returns:
        Tensor name -> description.

    Raises:
        ModelError: a damaged or truncated file, or a tensor that two files hold.
    """
    stored: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    part = opened.get_slice(name)
                    if name in stored:
                        raise ModelError(f"tensor {name} is both in {stored[name].file} and in {file}")
                    stored[name] = StoredTensor(file, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError, ValueError, MemoryError) as error:
            raise ModelError(
                f"{file} is not a complete safetensors file ({error}): it is damaged or truncated"
            ) from error
    return stored


def read_tensors(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and value of every tensor, one at a time, on the CPU."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Returns the size in bytes and the SHA-256 of each file, by name."""
    return {file.name: {"bytes": file.stat().st_size, "sha256": file_sha256(file)} for file in files}


def check_hashes(folder: Path, hashes: Mapping[str, str], origin: str) -> None:
    """Refuses files that were changed after they were written.

    Args:
        folder: folder of the files.
        hashes: file name -> expected SHA-256.
        origin: where the hashes are recorded, for the error.

    Raises:
        ModelError: a file is missing or differs; the message names the first one.
    """
    for name, expected in hashes.items():
        if not (folder / name).is_file() or file_sha256(folder / name) != expected:
            raise ModelError(
                f"{folder / name} is missing, or its SHA-256 is not the one in {origin}: the file was changed after "
                "it was written; copy, export or compile it again"
            )


class ShardWriter:
    """Writes tensors to numbered shards and an index, with one shard in memory.

    Args:
        folder: folder to write to.
        shard_bytes: largest size of a shard; a larger tensor has a shard of its own.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder = folder
        self.limit = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a contiguous tensor on the CPU to the present shard; if it does not fit, writes that shard first."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.limit:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += size
        self._total += size

    def close(self) -> list[Path]:
        """Writes the last shard, renames all files to the names that transformers gives them, and returns them."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            names = [WEIGHTS_FILE]
        else:
            names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
            file_of = {tensor: name for name, tensors in zip(names, self._shards, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(file_of.items()))}
            (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        files = [self.folder / name for name in names]
        for number, file in enumerate(files):
            self._temporary(number).rename(file)
        return files

    def _flush(self) -> None:
        if not self._pending and self._shards:
            return
        save_file(self._pending, self._temporary(len(self._shards)), {"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _temporary(self, number: int) -> Path:
        return self.folder / f"shard-{number}.safetensors"
