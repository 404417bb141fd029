"""Loads what makes a model's inputs, a tokenizer or a processor."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import transformers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from permtriton.errors import ModelError, first_line, reading
from permtriton.model.gguf_file import complete_tokenizer, read_quickly
from permtriton.model.source import PROCESSOR_FILES, Source
from permtriton.util.progress import NoProgress, Progress

TOKENIZERS = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
# files that `save_pretrained` of a tokenizer writes
REMADE = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json")


def load_processor(source: Source, model: PreTrainedModel, progress: Progress | None = None) -> Any:
    """Loads what makes a model's inputs: its tokenizer, or the processor of images or sound; None if there is none."""
    if model.main_input_name == "input_ids":
        return load_tokenizer(source, progress)
    problems: list[Exception] = []
    loaders = ["AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor"]
    if not source.find("tokenizer_config.json"):
        loaders.append(loaders.pop(0))  # AutoProcessor last: it would make up an empty tokenizer
    for loader in loaders:
        try:
            return getattr(transformers, loader).from_pretrained(source.folder, **source.loading)
        except Exception as error:  # of many kinds, also if the folder has a processor of another kind
            problems.append(error)
    if any(map(source.find, PROCESSOR_FILES)) or source.has(PROCESSOR_FILES[0]):
        raise ModelError(f"{source.name}: its processor cannot be loaded: {first_line(problems[0])}") from problems[0]
    return None


def tokenizer_of(processor: Any) -> Any:
    """Returns a processor's tokenizer, or None if the processor has none; returns a tokenizer unchanged."""
    return getattr(processor, "tokenizer", None) if isinstance(processor, transformers.ProcessorMixin) else processor


@contextmanager
def unchanged(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Restores a tokenizer's truncation and padding at the end of the ``with`` block, as calls may reset both."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    truncation, padding = getattr(backend, "truncation", None), getattr(backend, "padding", None)
    try:
        yield
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def load_tokenizer(source: Source, progress: Progress | None = None) -> PreTrainedTokenizerBase | None:
    try:
        with reading(f"{source.name}: its tokenizer cannot be loaded", ModelError), read_quickly(source.gguf):
            tokenizer = AutoTokenizer.from_pretrained(source.folder, **source.loading)
            _check_vocabulary(source, tokenizer)
            if source.gguf is not None:
                complete_tokenizer(source.gguf, tokenizer, progress or NoProgress())
            return tokenizer
    except ModelError:  # a missing tokenizer and a damaged one raise the same errors
        in_gguf = source.gguf is not None and "tokenizer.ggml.model" in source.gguf.header
        if in_gguf or any(map(source.find, TOKENIZERS)) or source.has(TOKENIZERS[0]):
            raise
        return None


def _check_vocabulary(source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a vocabulary of special tokens only, which transformers makes up where no file holds one."""
    vocabulary: dict[str, int] = {}
    with suppress(NotImplementedError):  # a tokenizer with custom code
        vocabulary = tokenizer.get_vocab()
    added = getattr(tokenizer, "added_tokens_encoder", {})
    if vocabulary and {*vocabulary} <= {*tokenizer.all_special_tokens, *added, "\u2581"}:  # SentencePiece's space
        raise ModelError(
            f"{source.name}: its tokenizer has special tokens only, expected words or parts of words: the file of its "
            "vocabulary is missing or damaged"
        )
