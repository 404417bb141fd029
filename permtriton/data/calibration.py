"""Draws the calibration samples of a compilation: sequences of text, or rows of tensors."""

import random
from collections.abc import Container
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from permtriton.config import OF_TEXT, SURPLUS, CalibrationConfig, CommonConfig
from permtriton.data.check_samples import vocabulary_of
from permtriton.data.documents import Documents, named_documents
from permtriton.data.in_memory import documents_of, name_of
from permtriton.data.media import MEDIA_INPUTS, Processor, is_media, stored_samples, tensors_of
from permtriton.data.samples import Samples
from permtriton.data.tokenize import Encoder
from permtriton.errors import CalibrationError, ConfigError
from permtriton.model.core import divides_text
from permtriton.model.forward import check_length, max_tokens
from permtriton.model.seq2seq import end_token
from permtriton.util import ranks
from permtriton.util.progress import Progress

Config = TypeVar("Config", bound=CommonConfig)


def calibration_samples(
    config: Config,
    tokenizer: Processor | None,
    model: PreTrainedModel,
    data: Any = None,
    overrides: Container[str] = (),
) -> tuple[Samples, Config]:
    """Draws calibration samples, with the remaining sequences of a text as ``surplus``.

    Args:
        data: data in memory, as `permtriton.data.in_memory.selected` returns them; None to read what the config names.
            Texts and lists of token ids are joined and cut into sequences. Tensors are samples already, and the first
            ``samples`` rows are taken.
        overrides: names of the options that the user set; if ``samples`` is not among them, all rows of tensors are
            taken, but of a DataLoader only as many as the default of ``samples``.

    Returns:
        The samples, and the config with the name of ``data`` and the number and length of its rows.
    """
    if data is None:
        return ranks.on_first(lambda: _drawn(config, tokenizer, model)), config
    calibration = replace(config.calibration, calibration=name_of(data))
    if (documents := documents_of(data)) is not None:
        config = replace(config, calibration=calibration)
        return _drawn(config, tokenizer, model, documents), config
    if calibration.one_document:
        raise ConfigError("`one_document=true` has no effect on samples in memory, which are taken unchanged")
    needed = calibration.samples if "samples" in overrides else None
    samples = tensors_of(data, model, calibration.samples if isinstance(data, DataLoader) else needed)
    if needed is not None:
        _check_count("data", len(samples), needed)
    length = samples.longest if samples.is_text else calibration.sequence_length
    return samples, replace(config, calibration=replace(calibration, samples=len(samples), sequence_length=length))


def _drawn(
    config: CommonConfig, tokenizer: Processor | None, model: PreTrainedModel, documents: Documents | None = None
) -> Samples:
    calibration, count = config.calibration, config.calibration.samples
    source = calibration.calibration
    if is_media(model, source):
        for name in OF_TEXT:
            if value := getattr(calibration, name):
                raise ConfigError(
                    f"`{name}={value}` has no effect on {source}, which is no text: leave it out, or the protocol that "
                    "sets it"
                )
        stored = stored_samples(source, model)
        _check_count(source, len(stored), count)
        order = torch.randperm(len(stored), generator=torch.Generator().manual_seed(config.seed))
        drawn = stored[order if stored.is_text else order[:count]]
    else:
        check_length(model, calibration.sequence_length)
        if documents is None:
            documents = named_documents(source, column=calibration.text_column, split=calibration.split)
        vocabulary, halves = vocabulary_of(model), divides_text(model)
        encoder = Encoder(documents, source, tokenizer, vocabulary, calibration.special_tokens, halves)
        drawn = all_windows(calibration, encoder, config.seed, config.surplus)
    return replace(drawn[:count], surplus=drawn[count:] if len(drawn) > count else None)


def _check_count(source: str, count: int, needed: int) -> None:
    if count < needed:
        raise CalibrationError(
            f"{source} holds {count} samples, but {needed} are needed: lower `samples=`, or give more data"
        )


def stand_in(config: CalibrationConfig, model: PreTrainedModel) -> Tensor:
    """Returns token ids in the shape of calibration text, for a forecast without the text."""
    return torch.full((config.samples, config.sequence_length), end_token(model) or 0)


def fitted(
    config: CalibrationConfig, overrides: Container[str], model: PreTrainedModel, progress: Progress
) -> CalibrationConfig:
    """Returns ``config`` with a sequence length that the model can take, unless the user set it (``overrides``)."""
    if "sequence_length" in overrides and model.main_input_name in MEDIA_INPUTS:
        raise ConfigError(
            f"`sequence_length={config.sequence_length}` has no effect on a {type(model).__name__}, which reads no "
            "text: leave it out, or the protocol that sets it"
        )
    limit = max_tokens(model)
    if "sequence_length" in overrides or limit is None or limit >= config.sequence_length:
        return config
    progress.say(f"sequence length: {limit}, not {config.sequence_length}: the model has no more positions")
    return replace(config, sequence_length=limit)


def all_windows(config: CalibrationConfig, encoder: Encoder, seed: int, surplus: int = SURPLUS) -> Samples:
    """Encodes calibration text, and draws all its sequences in random order.

    Args:
        surplus: about how many tokens are encoded per token that is needed, if there is enough text; at least
            `SURPLUS`. The first sequences do not depend on it.

    Returns:
        At least ``samples`` rows of ``sequence_length`` tokens: windows that do not overlap, each with the special
            tokens that the tokenizer puts around a text. With ``one_document``, windows may overlap, and there are
            exactly ``samples``.
    """
    length = encoder.special.room(config.sequence_length, "sequence_length")
    if config.one_document:
        return encoder.samples(_one_document_each(config, encoder, length, seed))
    return encoder.samples(_mixed_windows(config, encoder, length, seed, surplus))


def _mixed_windows(config: CalibrationConfig, encoder: Encoder, length: int, seed: int, surplus: int) -> Tensor:
    """Returns windows of documents that are joined in random order, int64 ``[at least samples, length]``."""
    generator, tokens = torch.Generator().manual_seed(seed), config.samples * length
    cut_off = length if surplus > SURPLUS else 0  # for the tokens that remain when two parts are cut into windows
    stream, ends = encoder.stream(surplus * tokens + cut_off, generator)
    end = next((end for end in ends if end >= SURPLUS * tokens), ends[-1])  # end of the part that is shuffled
    windows = end // length
    if windows < config.samples:
        raise CalibrationError(
            f"{config.calibration} holds {stream.numel():,} tokens, {windows} sequences of {config.sequence_length}, "
            f"but {config.samples} are needed. Lower `samples=` or `sequence_length=`, or give more text"
        )
    slack = end - windows * length
    offset = int(torch.randint(0, slack + 1, (1,), generator=generator))
    order = torch.randperm(windows, generator=generator)
    mixed = stream[offset : offset + windows * length].view(windows, -1)[order]
    count = (stream.numel() - end) // length
    return torch.cat([mixed, stream[end : end + count * length].view(count, length)])


def _one_document_each(config: CalibrationConfig, encoder: Encoder, length: int, seed: int) -> Tensor:
    """Returns sequences, each a random window of one longer document, int64 ``[samples, length]``.

    Documents are drawn with replacement, by Python's generator, until one is long enough: for c4 and a seed, these are
    the sequences that the code of SparseGPT and Wanda draws. Like that code, this adds no end token.
    """
    generator, short = random.Random(seed), set[int]()
    sequences = list[Tensor]()
    while len(sequences) < config.samples:
        if len(short) == len(encoder.documents):
            raise CalibrationError(
                f"{config.calibration} has no document with more than {length:,} tokens, to draw a sequence from: "
                "lower `sequence_length=`, give longer documents, or leave `one_document=` and `protocol=` out"
            )
        number = generator.randint(0, len(encoder.documents) - 1)
        if number in short:
            continue
        ids = encoder.one(number, ended=False)
        if ids.numel() <= length:
            short.add(number)
            continue
        start = generator.randint(0, ids.numel() - length - 1)
        sequences.append(ids[start : start + length])
    return torch.stack(sequences)
