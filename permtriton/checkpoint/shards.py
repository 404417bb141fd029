"""How are tensors written in shards, read one by one, and what are the hashes of their files?"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from permtriton.model.headers import INDEX_FILE, WEIGHTS_FILE

SHARD_BYTES = 5 * 10**9


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


class ShardWriter:
    """Writes tensors to numbered shards and an index, with one shard in memory.

    Args:
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
