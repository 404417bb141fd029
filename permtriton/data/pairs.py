"""Pairs of a source and its labels, such as a sentence and its translation, as rows of token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from permtriton.errors import CalibrationError


@dataclass(frozen=True)
class Pair:
    """A source and its labels; each is a text or a list of token ids."""

    source: str | list[int]
    labels: str | list[int]


@dataclass(frozen=True)
class Pairs(Sequence[Pair]):
    """The pairs of two columns, each made when it is asked for."""

    sources: Sequence[Any]
    labels: Sequence[Any]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, number: Any) -> Any:
        return Pair(self.sources[number], self.labels[number])


def with_labels(sources: Sequence[Any], labels: Sequence[Any] | None) -> Sequence[Any]:
    """Returns pairs where there are labels, unless these are classes."""
    if labels is None or not len(labels) or not (labels[0] is None or hasattr(labels[0], "__len__")):
        return sources
    return Pairs(sources, labels)


def are_pairs(documents: Sequence[object]) -> bool:
    """Whether a source's documents are pairs; either all are, or none is."""
    return len(documents) > 0 and isinstance(documents[0], Pair)


def sources_of(documents: Sequence[Any]) -> Sequence[Any]:
    """Returns documents without their labels, which a model that reads no pairs does without."""
    if isinstance(documents, Pairs):
        return documents.sources
    return [pair.source for pair in documents] if are_pairs(documents) else documents


def paired_windows(
    pairs: Sequence[Pair],
    encode: Callable[[Pair, int], tuple[Tensor, Tensor]],
    tokens: int,
    wanted: int | None,
    generator: torch.Generator | None,
    name: str,
    surplus: int = 1,
) -> Tensor:
    """Returns pairs as rows of token ids, int64 ``[rows, tokens]``: the sources, then the labels, in a half each.

    Rows need no padding: as many pairs are joined as fill both halves, and what is left over in the last of them is
    cut off. Both halves of a row are therefore of the same pairs.

    Args:
        encode: returns the token ids of the source and the labels of a pair and its number, int64 ``[...]`` each.
        wanted: number of rows; None for as many as there are.
        generator: draws the order of the pairs; None keeps it.
        name: where the pairs come from, for errors.
        surplus: most rows that are made where there are pairs enough, as a multiple of the wanted ones.

    Raises:
        CalibrationError: there are too few pairs for the wanted rows, or for one.
    """
    sizes = (tokens // 2, tokens - tokens // 2)
    order = torch.randperm(len(pairs), generator=generator).tolist() if generator else range(len(pairs))
    rows: list[Tensor] = []
    halves = [torch.empty(0, dtype=torch.int64)] * 2
    for position in order:
        if wanted is not None and len(rows) == surplus * wanted:
            break
        halves = [torch.cat(both) for both in zip(halves, encode(pairs[position], position), strict=True)]
        if all(half.numel() >= size for half, size in zip(halves, sizes, strict=True)):
            rows.append(torch.cat([half[:size] for half, size in zip(halves, sizes, strict=True)]))
            halves = [half[:0] for half in halves]
    if len(rows) < (wanted or 1):
        raise CalibrationError(
            f"{name} holds {len(pairs):,} pairs, which fill {len(rows)} sequences of {tokens} tokens, but "
            f"{wanted or 1} are needed. Lower `samples=` or `sequence_length=`, or give more pairs"
        )
    return torch.stack(rows)
