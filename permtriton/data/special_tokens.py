"""The special tokens, such as <bos>, that a tokenizer puts around a text when a user runs the model on the text."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from permtriton.errors import CalibrationError, ConfigError, reading
from permtriton.model.tokenizer import tokenizer_of, unchanged


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens around each sequence that is cut out of a text; by default there are none."""

    before: tuple[int, ...] = ()  # ids before the text
    after: tuple[int, ...] = ()  # ids after the text
    end: tuple[int, ...] = ()  # ids between the documents of one sequence
    words: str = "without special tokens"  # the special tokens, in words
    # special tokens around an encoder-decoder's labels, the second half of a row; None where a row is one sequence
    labels: "SpecialTokens | None" = None

    def __len__(self) -> int:
        return sum(self._sizes)

    @property
    def _sizes(self) -> tuple[int, int]:
        """Number of special tokens around the text, and around the labels."""
        return len(self.before) + len(self.after), len(self.labels or ())

    def room(self, tokens: int, option: str) -> int:
        """Returns how many tokens of text fit in a row of ``tokens``; ``option`` names ``tokens`` in an error."""
        least = len(self) + 1 if self.labels is None else 2 * max(self._sizes) + 2
        if self and tokens < least:
            raise ConfigError(
                f"`{option}={tokens}`: the tokenizer puts {len(self)} special tokens around a text ({self.words}), and "
                f"they count: expected at least {least}, or `special_tokens=none`"
            )
        return tokens - len(self)

    def around(self, rows: Tensor) -> Tensor:
        """Returns rows of ids, int64 ``[rows, tokens of text]``, with the special tokens around each."""
        if self.labels is None:
            return self._joined(rows)
        size, label_size = self._sizes
        first = (rows.shape[1] + size + label_size) // 2 - size
        return torch.cat([self._joined(rows[:, :first]), self.labels._joined(rows[:, first:])], 1)

    def _joined(self, rows: Tensor) -> Tensor:
        before, after = (torch.tensor(ids, dtype=rows.dtype).expand(len(rows), -1) for ids in (self.before, self.after))
        return torch.cat([before, rows, after], 1)

    def bare(self, ids: Tensor) -> Tensor:
        """Returns ids without the special tokens with which a document itself, such as a chat, begins or ends."""
        size, end = len(self.before), len(self.end)
        ids = ids[size:] if tuple(ids[:size].tolist()) == self.before else ids
        return ids[:-end] if end and tuple(ids[-end:].tolist()) == self.end else ids


NONE = SpecialTokens()


def special_tokens_of(tokenizer: Any, choice: str = "auto", *, halves: bool = False) -> SpecialTokens:
    """Returns the special tokens that a tokenizer puts around a single text.

    Args:
        halves: whether the model is an encoder-decoder, whose rows hold an input sequence and then its labels.
    """
    tokenizer = tokenizer_of(tokenizer)
    if choice == "none" or tokenizer is None:
        return NONE
    with reading("the model's tokenizer does not tokenize", CalibrationError), unchanged(tokenizer):
        special = _around_text(tokenizer, "text")
        if not halves:
            return special
        labels = _around_text(tokenizer, "text_target")
    if not special and not labels:
        return special
    if (labels.before, labels.after) == (special.before, special.after):
        words = special.words.replace("each", "each half", 1)
    else:
        words = f"{special.words}, its labels {labels.words.removeprefix('each ')}"
    return replace(special, labels=labels, words=words)


def _around_text(tokenizer: Any, argument: str) -> SpecialTokens:
    """Returns the special tokens around a text that is given as ``argument`` of the tokenizer's call."""
    whole, bare = (tokenizer(**{argument: "a text"}, add_special_tokens=flag)["input_ids"] for flag in (True, False))
    starts = range(len(whole) - len(bare) + 1)
    start = next((number for number in starts if whole[number : number + len(bare)] == bare), None)
    if start is None or len(whole) == len(bare):
        return NONE
    before, after = tuple(whole[:start]), tuple(whole[start + len(bare) :])
    last = tokenizer.eos_token_id
    parts = [
        f"{verb} with {' '.join(tokenizer.convert_ids_to_tokens(list(ids)))}"
        for verb, ids in (("beginning", before), ("ending", after))
        if ids
    ]
    return SpecialTokens(before, after, after or (() if last is None else (last,)), f"each {' and '.join(parts)}")
