"""Loads what makes a model's inputs, a tokenizer or a processor, and refuses one that would fill the memory."""

import struct
import unicodedata
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from permtriton.errors import ModelError, first_line, reading, shown, without_panics
from permtriton.model.gguf_file import complete_tokenizer
from permtriton.model.headers import read_json
from permtriton.model.source import PROCESSOR_FILES, Source
from permtriton.util.progress import NoProgress, Progress

TOKENIZER_FILE = "tokenizer.json"
TOKENIZERS = ("tokenizer_config.json", TOKENIZER_FILE, "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
MOST_TOKENS, MOST_GROWTH = 2**24, 1000


def load_processor(source: Source, model: PreTrainedModel, progress: Progress | None = None) -> Any:
    """Loads what makes a model's inputs: its tokenizer, or the processor of images or sound; None if there is none.

    Args:
        progress: as `load_tokenizer` takes it.

    Raises:
        ModelError: the folder holds one that cannot be loaded, or the connection to the hub is lost.
    """
    if model.main_input_name == "input_ids":
        return load_tokenizer(source, progress)
    problems: list[Exception] = []
    loaders: list[Any] = [
        transformers.AutoProcessor,
        transformers.AutoImageProcessor,
        transformers.AutoFeatureExtractor,
    ]
    if source.folder is not None and not source.holds("tokenizer_config.json"):
        loaders.append(loaders.pop(0))  # it would make an empty tokenizer up, which would then be saved
    for loader in loaders:
        try:
            return loader.from_pretrained(source.location, **source.loading)
        except Exception as error:  # they raise many kinds, also where a folder holds a processor of another kind
            problems.append(error)
    if _is_connection_lost(problems[0]) or any(map(source.find, PROCESSOR_FILES)):
        raise ModelError(f"{source.name}: its processor cannot be loaded: {first_line(problems[0])}") from problems[0]
    return None


def tokenizer_of(processor: Any) -> Any:
    """Returns the tokenizer of a processor, or None if it has none; a tokenizer as it is."""
    return getattr(processor, "tokenizer", None) if isinstance(processor, transformers.ProcessorMixin) else processor


def load_tokenizer(source: Source, progress: Progress | None = None) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer; returns None if there is none.

    Args:
        progress: what says which tokenizer of a GGUF file may give other ids than the original.

    Raises:
        ModelError: the folder holds a tokenizer that cannot be loaded, or the connection to the hub is lost.
    """
    try:
        with reading(f"{source.name}: its tokenizer cannot be loaded", ModelError), without_panics():
            _check_growth(source)
            tokenizer = AutoTokenizer.from_pretrained(source.location, **source.loading)
            _check_vocabulary(source, tokenizer)
            if source.gguf is not None:
                complete_tokenizer(source.gguf, tokenizer, progress or NoProgress())
            return tokenizer
    except ModelError as error:  # a missing tokenizer and a damaged one raise the same kinds
        found = any(map(source.find, TOKENIZERS)) or (source.gguf and "tokenizer.ggml.model" in source.gguf.header)
        if source.folder is None and (_is_connection_lost(error) or (not found and source.fetch(TOKENIZERS))):
            problem = f"{source.name}: its tokenizer cannot be fetched: {first_line(error.__cause__ or error)}"
            raise ModelError(f"{problem} Check the network, or give a local folder") from error
        if (lacks := _without_sentencepiece(source)) is not None:
            raise ModelError(
                f"{lacks} is a model of SentencePiece, which is read by packages that are not installed: pip install "
                "sentencepiece protobuf, or save the tokenizer as tokenizer.json"
            ) from error
        if found:
            raise
        return None


def _without_sentencepiece(source: Source) -> Path | None:
    """Returns the model of SentencePiece that is the only tokenizer, where its package is missing; None elsewhere.

    Transformers names the package of tiktoken, which cannot read it.
    """
    path = next(filter(None, map(source.find, SENTENCEPIECE)), None)
    if path is None or source.find(TOKENIZER_FILE) or find_spec("sentencepiece"):
        return None
    with suppress(OSError), path.open("rb") as file:
        if file.read(1) == b"\n":  # as their models begin; those of tiktoken are lines of text
            return path
    return None


def _check_growth(source: Source) -> None:
    """Refuses a tokenizer that replaces characters by many, again and again: any text would fill the memory."""
    if (path := source.find(TOKENIZER_FILE)) is None:
        return
    grown: list[tuple[str, float]] = []  # what a character may have become, "" for any -> by how many times longer
    for step in _steps_of(read_json(path).get("normalizer")):
        text, content = map(_folded, _replaced(step))
        if not content:
            continue
        again = [growth for before, growth in grown if not text or not before or set(text) <= set(before)]
        growth = max(len(content) / len(_replaced(step)[0] or "x"), 1) * max([1, *again])
        grown.append(("" if step["type"] in ("ByteLevel", "Precompiled") else content, growth))
        if growth > MOST_GROWTH:
            raise ModelError(
                f"{path}: its normalizers make text {growth:.0e} times as long: expected at most {MOST_GROWTH}"
            )


def _replaced(step: Mapping[str, Any]) -> tuple[str, str]:
    """Returns what a normalizer replaces, "" for any text, and by what at the longest; "" if it adds no characters."""
    kind, pattern = step.get("type"), step.get("pattern")
    if kind == "ByteLevel":
        return "", "byte"  # a character has at most four
    if kind == "Precompiled":
        with suppress(ValueError, TypeError, struct.error):  # the tokenizer itself refuses it
            table = b64decode(step.get("precompiled_charsmap", ""))
            (tree,) = struct.unpack_from("<I", table)  # what follows the tree are the replacements, each with a zero
            return "", max(table[4 + tree :].split(b"\0"), key=len).decode("latin1")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    content = step.get({"Replace": "content", "Prepend": "prepend"}.get(str(kind), ""))
    return text if isinstance(text, str) else "", content if isinstance(content, str) else ""


def _folded(text: str) -> str:
    """Returns a text as NFKD and lower case, which other normalizers may make of it."""
    return unicodedata.normalize("NFKD", text).casefold()


def _steps_of(normalizer: Any) -> Iterator[dict[str, Any]]:
    """Yields the normalizers of a sequence, and of those inside it, in their order."""
    if not isinstance(normalizer, dict):
        return
    yield normalizer
    inner = normalizer.get("normalizers")
    for each in inner if isinstance(inner, list) else []:
        yield from _steps_of(each)


def _check_vocabulary(source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses absurd ids and additions: saving lists all ids below the largest one, and the process would die of it.

    It also refuses a vocabulary of special tokens only, which transformers makes up where no file holds one.
    """
    vocabulary: dict[str, int] = {}
    with suppress(NotImplementedError):  # a tokenizer with code of its own
        vocabulary = tokenizer.get_vocab()
    added = getattr(tokenizer, "added_tokens_encoder", {})
    if vocabulary and {*vocabulary} <= {*tokenizer.all_special_tokens, *added, "\u2581"}:  # SentencePiece's space
        raise ModelError(
            f"{source.name}: its tokenizer has special tokens only, expected words or parts of words: the file of its "
            "vocabulary is missing or damaged"
        )
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", 0))
    if largest >= MOST_TOKENS:
        raise ModelError(
            f"{source.name}: its tokenizer gives {shown(token)} the id {largest}, expected less than {MOST_TOKENS}: it "
            "is damaged"
        )
    if (added := tokenizer.num_special_tokens_to_add()) > MOST_GROWTH:
        raise ModelError(
            f"{source.name}: its tokenizer adds {added} tokens to each text: expected at most {MOST_GROWTH}"
        )


def _is_connection_lost(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, LocalEntryNotFoundError | ConnectionError | TimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False
