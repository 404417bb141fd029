"""Documents from the columns of a table: of a file, or of a dataset on the hub or in memory."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from permtriton.errors import CalibrationError, reading, shown

COLUMNS = ("input_ids", "text", "messages", "conversations")  # the last two hold conversations, message by message


@dataclass(frozen=True)
class Pairs(Sequence[Any]):
    """Documents that are made of two columns; each document is made when it is read."""

    documents: Sequence[Any]
    others: Sequence[Any]
    source: str
    joined: Callable[[Any, Any, str], Any]  # values of both columns, and their place for errors -> document

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, number: Any) -> Any:
        return self.joined(self.documents[number], self.others[number], f"{self.source}: document {number + 1}")


def _unpadded(ids: Any, mask: Any, place: str) -> list[int]:
    """Returns the token ids at the positions where the attention mask is not 0."""
    with reading(f"{place}: its attention_mask cannot be used", CalibrationError):
        ids, mask = (values.tolist() if hasattr(values, "tolist") else values for values in (ids, mask))
        return [token for token, kept in zip(ids, mask, strict=True) if kept]


def _with_tools(messages: Any, tools: Any, place: str) -> Any:
    is_conversation = isinstance(messages, list) and all(isinstance(message, Mapping) for message in messages)
    return Conversation(messages, tools, place) if is_conversation else messages


class Conversation(list[Mapping[str, Any]]):
    """Messages, with the schemas of the tools that the chat template describes before the messages."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: Any, place: str) -> None:
        super().__init__(messages)
        listed = tools or []
        if isinstance(listed, str):
            with suppress(ValueError):  # text that is not JSON is refused below, because it is no list
                listed = json.loads(listed) or []
        if not isinstance(listed, list) or not all(isinstance(schema, Mapping) for schema in listed):
            raise CalibrationError(
                f"{place}: its tools are {shown(tools)}: expected a list of schemas, each an object, or such a list "
                "as JSON; correct them, or remove the column"
            )
        self.tools = [_without_nulls(schema) for schema in listed] or None


def _without_nulls(value: Any) -> Any:
    """Returns a schema without keys of value None: in a typed column, each row has the keys of all rows."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


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
        documents = Pairs(documents, column_of("attention_mask"), source, _unpadded)
    elif column not in ("input_ids", "text") and "tools" in names:
        documents = Pairs(documents, column_of("tools"), source, _with_tools)
    return documents
