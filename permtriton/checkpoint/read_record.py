"""Reads ``permtriton.json``, the record of a compilation, and checks the entries that permtriton works with again."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from pydantic import AfterValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from permtriton.errors import ConfigError, ModelError
from permtriton.model.headers import REPORT_FILE, read_json
from permtriton.model.source import Source
from permtriton.util.permutation import is_permutation
from permtriton.util.sparsity import NMPattern, PrunedWeight, in_words
from permtriton.util.validation import checked

# Advice for weights that another tool pruned, or that a training saved without the record.
PRUNED_ELSEWHERE = (
    "If its weights are N:M already, this packs them as they are: permtriton compile FOLDER --recipe mask "
    "--importance magnitude --save-format packed"
)


def _pattern(text: str) -> str:
    with suppress(ConfigError):
        if str(NMPattern.parse(text)) == text:
            return text
    raise ValueError("a pattern such as 2:4")


def _permutation(index: list[int]) -> list[int]:
    if not is_permutation(torch.tensor(index, dtype=torch.int64)):
        raise ValueError("a permutation")
    return index


Pattern = Annotated[str, AfterValidator(_pattern)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Index = Annotated[list[int], AfterValidator(_permutation)]
# Further entries are not checked: they are only shown.
OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
Record = dict[str, Any]  # all entries of ``permtriton.json``, which docs/formats.md describes


@with_config(OPEN)
class ConfigEntry(TypedDict):
    """The options of a compilation."""

    sparsity: Pattern


@with_config(OPEN)
class SiteEntry(TypedDict):
    """A site and the order of its channels: channel ``j`` was channel ``index[j]`` of the dense model."""

    name: str
    linears: list[str]
    index: Index


class RowsEntry(TypedDict):
    """Linears whose rows moved: row ``j`` was row ``index[j]`` of the dense model."""

    linears: list[str]
    index: Index


@with_config(OPEN)
class FileEntry(TypedDict):
    """A file of weights."""

    sha256: Sha256


@with_config(OPEN)
class ReadEntries(TypedDict):
    """The checked entries of a record."""

    model: str
    config: ConfigEntry
    sites: list[SiteEntry]
    rows: list[RowsEntry]
    hidden_states: dict[str, Any]
    pruned_weights: Annotated[dict[str, int], Field(min_length=1)]  # parameter -> its input dimension
    patterns: NotRequired[dict[str, Pattern]]  # parameter -> its pattern, where it is not that of the config
    files: dict[str, FileEntry]


def described_sparsity(record: Mapping[str, Any]) -> str:
    return in_words(record["config"]["sparsity"], record.get("patterns", {}).values(), len(record["pruned_weights"]))


def recorded_weights(record: Mapping[str, Any]) -> dict[str, PrunedWeight]:
    """Returns pruned parameter -> its input dimension and pattern."""
    patterns, sparsity = record.get("patterns", {}), record["config"]["sparsity"]
    dims = record["pruned_weights"].items()
    return {name: PrunedWeight(dim, NMPattern.parse(patterns.get(name, sparsity))) for name, dim in dims}


def check_recorded(name: str, pruned: PrunedWeight, shape: Sequence[int]) -> None:
    """Refuses a weight that cannot have been pruned as the record says."""
    dim, pattern = pruned.dim, pruned.pattern
    if not 0 <= dim < len(shape) or 0 in shape or shape[dim] % pattern.group:
        raise ModelError(
            f"{REPORT_FILE} lists {name} as pruned to {pattern} along dimension {dim}, but its shape is "
            f"{list(shape)}: the folder is damaged, or the weight is divided among processes"
        )


def read_record(folder: Path) -> Record:
    path = folder / REPORT_FILE
    if not path.is_file():
        raise ModelError(
            f"{folder} was not written by permtriton (it holds no {REPORT_FILE}): give an output of permtriton compile"
            f". {PRUNED_ELSEWHERE}"
        )
    return dict(
        checked(ReadEntries, read_json(path), lambda problem: ModelError(f"{path}: {problem}: the file is damaged"))
    )


def find_record(source: Source) -> Record | None:
    """Returns ``permtriton.json`` of a folder or hub name; None if it has none, or if a GGUF file holds the weights."""
    path = source.find(REPORT_FILE)
    return None if path is None else read_record(path.parent)
