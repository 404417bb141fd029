"""Documents from the columns of a table: of a file, or of a dataset on the hub or in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from permtriton.errors import CalibrationError, reading, shown

COLUMNS = ("input_ids", "text", "messages", "conversations")  # the last two hold conversations, message by message


@dataclass(frozen=True)
class Unpadded(Sequence[Any]):
    """Token ids without the positions where the attention mask is 0; each document is made when it is read."""

    documents: Sequence[Any]
    masks: Sequence[Any]
    source: str

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, number: Any) -> list[int]:
        with reading(f"{self.source}: document {number + 1}: its attention_mask cannot be used", CalibrationError):
            pair = self.documents[number], self.masks[number]
            ids, mask = (values.tolist() if hasattr(values, "tolist") else values for values in pair)
            return [token for token, kept in zip(ids, mask, strict=True) if kept]


def documents_in(
    names: Sequence[str], column_of: Callable[[str], Sequence[Any]], source: str, chosen: str = ""
) -> Sequence[Any]:
    """Returns the documents of a table: texts, conversations, or token ids without their padding.

    Args:
        column_of: returns the column with a name.
        chosen: name of the column that holds the documents; empty for the first of `COLUMNS` that the table has.
    """
    column = chosen or next((name for name in COLUMNS if name in names), "text")
    if column not in names:
        raise CalibrationError(
            f"{source} has the columns {shown(list(names))}, not {column}: give text or input_ids, or "
            "conversations as messages; for calibration data, `text_column=` may name another column"
        )
    documents = column_of(column)
    if isinstance(documents, list) and None in documents:
        row = documents.index(None) + 1
        raise CalibrationError(
            f"{source}: row {row} has no {column} ({documents.count(None)} of {len(documents)} rows have none): remove "
            "such rows"
        )
    if column in COLUMNS and column != "text" and len(documents) and isinstance(documents[0], str):
        expected = "integers" if column == "input_ids" else "a list of messages, each with role and content"
        raise CalibrationError(f"{source}: document 1 is {shown(documents[0])}: expected {column} as {expected}")
    if column == "input_ids" and "attention_mask" in names:
        documents = Unpadded(documents, column_of("attention_mask"), source)
    return documents
