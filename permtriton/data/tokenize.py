"""Encodes documents as token ids, even texts of a length that some tokenizers cannot take."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from permtriton.data.special_tokens import NONE, SpecialTokens, special_tokens_of
from permtriton.errors import CalibrationError, reading, shown
from permtriton.model.tokenizer import tokenizer_of, unchanged

LONGEST_LINE, LONGEST_PIECE = 2**20, 2**24  # characters
SPEAKERS = {"human": "user", "gpt": "assistant"}  # ShareGPT's names of roles


@dataclass(frozen=True)
class Encoder:
    """Encodes the documents of a source as token ids."""

    source: str  # where the documents come from, for errors
    tokenizer: PreTrainedTokenizerBase | None  # the model's tokenizer; may be None where the documents are token ids
    vocabulary: int  # number of token ids that the model knows
    # special tokens that sequences get later, so that documents get none; empty if instead each document gets what its
    # tokenizer puts around a text, and an end token
    special: SpecialTokens = NONE

    def stream(
        self, documents: Sequence[Any], limit: int | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, list[int]]:
        """Returns the ids of documents as one stream, int64 ``[tokens]``, and where each of them ends.

        Args:
            limit: number of tokens after which no further document is encoded; None for all.
            generator: draws the order of the documents; None keeps it.
        """
        if not len(documents):
            raise CalibrationError(f"{self.source} is empty: no text to use")
        order = torch.randperm(len(documents), generator=generator).tolist() if generator else range(len(documents))
        parts, ends = list[Tensor](), list[int]()
        for position in order:
            with reading(f"{self.source}: document {position + 1} cannot be read", CalibrationError):
                document = documents[position]
            ids = self.one(document, position)
            parts.append(torch.cat([torch.tensor(self.special.end, dtype=ids.dtype), ids]) if parts else ids)
            ends.append(parts[-1].numel() + (ends[-1] if ends else 0))
            if limit is not None and ends[-1] >= limit:
                break
        if not ends[-1]:
            raise CalibrationError(f"{self.source} is empty: no text to use")
        return self.checked(torch.cat(parts)), ends

    def one(self, document: Any, number: int, *, ended: bool = True) -> Tensor:
        """Returns the ids of a document, not yet checked; ``ended`` is as for `token_ids`."""
        place = f"{self.source}: document {number + 1}"
        if isinstance(document, str):
            if "\0" in document:  # nobody writes NULs, but other encodings and binary files are full of them
                raise CalibrationError(f"{place} is no text, or not UTF-8: character {document.index(chr(0))} is a NUL")
            whole = not self.special
            ids = token_ids(document, self.tokenizer, self.source, ended=ended and whole, special=whole)
            return self.special.bare(ids)
        document = document.tolist() if hasattr(document, "tolist") else document
        if isinstance(document, list | tuple) and document and all(isinstance(turn, Mapping) for turn in document):
            return self.special.bare(self._conversation(document, place))
        if isinstance(document, list | tuple) and all(type(i) is int and -(2**63) <= i < 2**63 for i in document):
            return torch.tensor(document, dtype=torch.int64)
        raise CalibrationError(
            f"{place} is {shown(document)}: text must be a string, input_ids a list of integers from the vocabulary"
        )

    def _conversation(self, messages: Sequence[Mapping[str, Any]], place: str) -> Tensor:
        """Returns the ids of messages as the tokenizer's chat template writes them."""
        tokenizer = tokenizer_of(self.tokenizer)
        if not getattr(tokenizer, "chat_template", None):
            raise CalibrationError(
                f"{place} is a conversation, but the model's tokenizer has no chat template: give texts, or token ids"
            )
        with reading(f"{place}: the chat template cannot write it", CalibrationError):
            named = [
                {"role": SPEAKERS.get(m["from"], m["from"]), "content": m["value"]} if "from" in m else m
                for m in messages
            ]
            tools = getattr(messages, "tools", None)  # of a `Conversation`
            ids = tokenizer.apply_chat_template(named, tools=tools, tokenize=True, return_dict=True)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)

    def checked(self, ids: Tensor) -> Tensor:
        """Returns ids after checking that all of them are in the vocabulary."""
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if low < 0 or high >= self.vocabulary:
            raise CalibrationError(
                f"{self.source}: token ids run from {low} to {high}, but the model's vocabulary is 0 to "
                f"{self.vocabulary - 1}: the tokenizer or the ids belong to another model"
            )
        return ids


def token_ids(
    text: str,
    tokenizer: PreTrainedTokenizerBase | None,
    source: str,
    *,
    ended: bool = True,
    special: bool = True,
) -> Tensor:
    """Returns the ids of a text and the end token, int64 ``[tokens]``.

    A text is tokenized as a whole unless `pieces` cuts it. The pieces are then joined, and the special tokens that the
    tokenizer puts around a text stand around all of it.

    Args:
        ended: whether the end token is added where the tokenizer adds none.
        special: whether the special tokens that the tokenizer puts around a text are added.
    """
    if (tokenizer := tokenizer_of(tokenizer)) is None:
        raise CalibrationError(f"{source} holds text, but the model has no tokenizer: give a .jsonl with input_ids")
    problem = f"{source} cannot be tokenized by the model's tokenizer"
    with reading(problem, CalibrationError), unchanged(tokenizer):
        parts = list(pieces(text))
        if len(parts) > 1:
            around = special_tokens_of(tokenizer) if special else NONE
            inner = [tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] for part in parts]
            listed = [around.before, *inner, around.after]
            ids = torch.cat([torch.tensor(part, dtype=torch.int64) for part in listed])
        else:
            encoded = tokenizer(text, add_special_tokens=special, verbose=False)
            ids = torch.tensor(encoded["input_ids"], dtype=torch.int64)
        end = tokenizer.eos_token_id
        last = ids[-2:].tolist()
        behind = last[:1] == [end] and last[-1] in tokenizer.all_special_ids  # e.g. a language after the end token
        if not ended or end is None or not last or last[-1] == end or behind:
            return ids
        return torch.cat([ids, torch.tensor([end], dtype=torch.int64)])


def pieces(text: str, longest_line: int = LONGEST_LINE, longest_piece: int = LONGEST_PIECE) -> Iterator[str]:
    """Yields a text in pieces, usually in a single one.

    Time and memory of some tokenizers grow without limit on a long text. So a line of more than ``longest_line``
    characters is cut before the last white space among them, where words begin, or after them if there is none; and a
    text of more than ``longest_piece`` characters is cut at line breaks. Only at the cuts can the tokens differ from
    those of the text as a whole.
    """
    start = line = 0  # where the piece begins, and the line in it
    while line < len(text):
        end = text.find("\n", line) + 1 or len(text)
        if end - start > longest_piece and line > start:
            yield text[start:line]
            start = line
        while end - line > longest_line:
            cut = line + longest_line
            line = next((place for place in range(cut, line, -1) if text[place].isspace()), cut)
            yield text[start:line]
            start = line
        line = end
    if start < len(text) or not text:
        yield text[start:]
