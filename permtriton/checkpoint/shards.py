"""Reads the tensors of files one by one, and hashes the files."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


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
