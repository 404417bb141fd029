"""Encodes documents as token ids, including texts that are too long for some tokenizers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from permtriton.data.documents import Documents
from permtriton.data.samples import Samples
from permtriton.data.special_tokens import NONE, SpecialTokens, special_tokens_of
from permtriton.errors import CalibrationError, reading, shown
from permtriton.model.tokenizer import tokenizer_of, unchanged

LONGEST_PIECE = 2**24  # characters
SPEAKERS = {"human": "user", "gpt": "assistant"}  # ShareGPT's names of roles


@dataclass(frozen=True)
class Encoder:
    """Encodes the documents of a source as token ids."""

    documents: Documents
    source: str  # where the documents come from, for errors
    tokenizer: PreTrainedTokenizerBase | None  # the model's tokenizer; may be None if the documents are token ids
    vocabulary: int  # number of token ids that the model knows
    special_tokens: str = "auto"  # the option
    halves: bool = False  # whether each row holds two sequences, as an encoder-decoder reads them

    @cached_property
    def around(self) -> SpecialTokens | None:
        """Special tokens around each sequence; None if the documents are token ids, which are used unchanged."""
        first = self.documents[0] if len(self.documents) else ""
        is_conversation = isinstance(first, list | tuple) and any(isinstance(turn, Mapping) for turn in first)
        if not isinstance(first, str) and not is_conversation:
            return None
        return special_tokens_of(self.tokenizer, self.special_tokens, halves=self.halves)

    @property
    def special(self) -> SpecialTokens:
        """`around`, or empty if it is None. If empty, each whole text gets special tokens and an end token instead."""
        return self.around or NONE

    def samples(self, rows: Tensor) -> Samples:
        """Returns samples of text, int64 ``[rows, tokens of text]``, with the special tokens around each."""
        return Samples({"input_ids": self._checked(self.special.around(rows))}, special=self.around)

    def stream(self, limit: int | None = None, generator: torch.Generator | None = None) -> tuple[Tensor, list[int]]:
        """Returns the ids of the documents as one stream, int64 ``[tokens]``, and where each document ends.

        Args:
            limit: number of tokens after which no further document is encoded; None for all.
            generator: draws the order of the documents; None keeps it.
        """
        count, parts, ends = len(self.documents), list[Tensor](), [0]
        for number in torch.randperm(count, generator=generator).tolist() if generator else range(count):
            ids = self.one(number)
            parts.append(torch.cat([torch.tensor(self.special.end, dtype=ids.dtype), ids]) if parts else ids)
            ends.append(ends[-1] + parts[-1].numel())
            if limit is not None and ends[-1] >= limit:
                break
        if not ends[-1]:
            raise CalibrationError(f"{self.source} is empty: no text to use")
        return self._checked(torch.cat(parts)), ends[1:]

    def one(self, number: int, *, ended: bool = True) -> Tensor:
        """Returns the ids of a document, not yet checked against the vocabulary; ``ended`` is as in `_text`."""
        place = f"{self.source}: document {number + 1}"
        with reading(f"{place} cannot be read", CalibrationError):
            document = self.documents[number]
        if isinstance(document, str):
            if "\0" in document:  # nobody writes NULs, but other encodings and binary files are full of them
                raise CalibrationError(f"{place} is no text, or not UTF-8: character {document.index(chr(0))} is a NUL")
            return self.special.bare(self._text(document, ended=ended))
        document = document.tolist() if hasattr(document, "tolist") else document
        if isinstance(document, list | tuple) and document and all(isinstance(turn, Mapping) for turn in document):
            return self.special.bare(self._conversation(document, place))
        if isinstance(document, list | tuple) and all(type(i) is int and -(2**63) <= i < 2**63 for i in document):
            return torch.tensor(document, dtype=torch.int64)
        raise CalibrationError(
            f"{place} is {shown(document)}: text must be a string, input_ids a list of integers from the vocabulary"
        )

    def _text(self, text: str, *, ended: bool) -> Tensor:
        """Returns the ids of a text, int64 ``[tokens]``, with special tokens around the text if `special` is empty.

        A text is tokenized as a whole unless `pieces` cuts it. If so, the ids of the pieces are joined, and the special
        tokens stand around all of them.

        Args:
            ended: whether, if `special` is empty, the ids also end with the end token.
        """
        if (tokenizer := tokenizer_of(self.tokenizer)) is None:
            raise CalibrationError(
                f"{self.source} holds text, but the model has no tokenizer: give a .jsonl with input_ids"
            )
        whole = not self.special
        problem = f"{self.source} cannot be tokenized by the model's tokenizer"
        with reading(problem, CalibrationError), unchanged(tokenizer):
            parts = list(pieces(text))
            if len(parts) > 1:
                around = special_tokens_of(tokenizer) if whole else NONE
                inner = [tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] for part in parts]
                listed = [around.before, *inner, around.after]
                ids = torch.cat([torch.tensor(part, dtype=torch.int64) for part in listed])
            else:
                encoded = tokenizer(text, add_special_tokens=whole, verbose=False)
                ids = torch.tensor(encoded["input_ids"], dtype=torch.int64)
            end, last = tokenizer.eos_token_id, ids[-2:].tolist()
            behind = last[:1] == [end] and last[-1] in tokenizer.all_special_ids  # e.g. a language after the end token
            if not (ended and whole) or end is None or not last or last[-1] == end or behind:
                return ids
            return torch.cat([ids, torch.tensor([end], dtype=torch.int64)])

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
            ids = tokenizer.apply_chat_template(named, tokenize=True, return_dict=True)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)

    def _checked(self, ids: Tensor) -> Tensor:
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if low < 0 or high >= self.vocabulary:
            raise CalibrationError(
                f"{self.source}: token ids run from {low} to {high}, but the model's vocabulary is 0 to "
                f"{self.vocabulary - 1}: the tokenizer or the ids belong to another model"
            )
        return ids


def pieces(text: str, longest: int = LONGEST_PIECE) -> Iterator[str]:
    """Yields a text in pieces, usually in a single one.

    On a long text, some tokenizers take too much time and memory. A text of more than ``longest`` characters is cut at
    line breaks, into pieces of at most so many characters, unless a single line is longer. Only at the cuts can the
    tokens differ from those of the text as a whole.
    """
    start = 0
    while len(text) - start > longest:
        end = text.rfind("\n", start, start + longest) + 1 or text.find("\n", start + longest) + 1 or len(text)
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]
