"""One text as token ids, however long it is and whatever its tokenizer does."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from permtriton.errors import CalibrationError, reading, without_panics
from permtriton.model.tokenizer import tokenizer_of

LONGEST_LINE, LONGEST_PIECE = 2**20, 2**24  # characters


def token_ids(
    text: str, tokenizer: PreTrainedTokenizerBase | None, source: str, target: bool = False, *, ended: bool = True
) -> Tensor:
    """Returns the ids of a text and the end token, int64 ``[tokens]``.

    A text is tokenized as a whole unless `pieces` cuts it. The pieces are then joined, and the special tokens that the
    tokenizer puts around a text stand around all of it.

    Args:
        source: where the text comes from, for errors.
        target: whether the text is what a decoder writes; translation models tokenize it as the target language.
        ended: whether the end token is added where the tokenizer adds none.

    Raises:
        CalibrationError: there is no tokenizer, or it fails.
    """
    if (tokenizer := tokenizer_of(tokenizer)) is None:
        raise CalibrationError(f"{source} holds text, but the model has no tokenizer: give a .jsonl with input_ids")
    with reading(f"{source} cannot be tokenized by the model's tokenizer", CalibrationError), without_panics():
        parts = list(pieces(text))
        if len(parts) > 1:
            before, after = _special_tokens(tokenizer)
            inner = [tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] for part in parts]
            ids = torch.cat([torch.tensor(each, dtype=torch.int64) for each in [before, *inner, after]])
        else:
            given = {"text_target" if target else "text": text}
            ids = torch.tensor(tokenizer(**given, verbose=False)["input_ids"], dtype=torch.int64)
        end = tokenizer.eos_token_id
        last = ids[-2:].tolist()
        behind = last[:1] == [end] and last[-1] in tokenizer.all_special_ids  # the end token, such as a language
        if not ended or end is None or not last or last[-1] == end or behind:
            return ids
        return torch.cat([ids, torch.tensor([end], dtype=torch.int64)])


def pieces(text: str, longest_line: int = LONGEST_LINE, longest_piece: int = LONGEST_PIECE) -> Iterator[str]:
    """Yields a text in pieces, most often as one.

    Time and memory of some tokenizers grow without limit on a long text. So a line of more than ``longest_line``
    characters is cut before the last white space among them, where words begin, or after them if there is none; and a
    text of more than ``longest_piece`` characters is cut at line breaks. Only at the cuts can the tokens differ from
    those of the text as a whole.
    """
    start = line = 0  # of the piece, and of the line in it
    while line < len(text):
        end = text.find("\n", line) + 1 or len(text)
        if end - start > longest_piece and line > start:
            yield text[start:line]
            start = line
        while end - line > longest_line:
            line = _last_space(text, line + 1, line + longest_line)
            yield text[start:line]
            start = line
        line = end
    if start < len(text) or not text:
        yield text[start:]


def _last_space(text: str, low: int, high: int) -> int:
    """Returns the position of the last white space from ``low`` to ``high``, or ``high`` if there is none."""
    return next((position for position in range(high, low - 1, -1) if text[position].isspace()), high)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Returns the ids that a tokenizer puts before and after a text."""
    text = "a text"
    whole, bare = tokenizer(text)["input_ids"], tokenizer(text, add_special_tokens=False)["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []
