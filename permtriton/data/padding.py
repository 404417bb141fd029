"""Token ids without their padding, as a tokenizer that was told to pad gives them beside an ``attention_mask``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from permtriton.errors import CalibrationError, reading


def unpadded(ids: Any, mask: Any, place: str) -> list[int]:
    """Returns the token ids at whose positions the mask is not 0.

    Args:
        place: where the ids come from, for the error.

    Raises:
        CalibrationError: the mask does not fit the ids.
    """
    with reading(f"{place}: its attention_mask cannot be used", CalibrationError):
        ids, mask = (each.tolist() if hasattr(each, "tolist") else each for each in (ids, mask))
        return [each for each, kept in zip(ids, mask, strict=True) if kept]


@dataclass(frozen=True)
class Unpadded(Sequence[list[int]]):
    """The token ids of a column without their padding, each document's made when it is asked for."""

    ids: Sequence[Any]
    masks: Sequence[Any]
    source: str

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: Any) -> Any:
        return unpadded(self.ids[number], self.masks[number], f"{self.source}: document {number + 1}")


def documents_in(table: Any, names: Sequence[str], column: str, source: str) -> Sequence[Any]:
    """Returns the documents in a column; those in ``input_ids`` without their padding.

    Args:
        table: columns by name, such as a ``datasets.Dataset``.
        names: names of all columns.
        source: where the table comes from, for errors.
    """
    padded = column == "input_ids" and "attention_mask" in names
    return Unpadded(table[column], table["attention_mask"], source) if padded else table[column]
