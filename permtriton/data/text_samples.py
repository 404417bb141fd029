"""Draws calibration sequences and held-out windows from text, as token ids."""

import inspect
import json
import os
import random
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton import demo
from permtriton.config import OF_TEXT, SURPLUS, CalibrationConfig, CommonConfig
from permtriton.data.columns import documents_in
from permtriton.data.media import MEDIA_INPUTS, Processor, is_media, stored_samples
from permtriton.data.samples import Inputs, Samples
from permtriton.data.special_tokens import NONE, SpecialTokens, special_tokens_of
from permtriton.data.tokenize import Encoder
from permtriton.errors import CalibrationError, ConfigError, first_line, reading, shown
from permtriton.model.core import DECODER_IDS, core_of, divides_text, embedding_of, takes_decoder_ids
from permtriton.model.forward import check_length, max_tokens
from permtriton.model.name import is_hub_name
from permtriton.model.seq2seq import arguments_of, samples_of
from permtriton.model.tokenizer import tokenizer_of
from permtriton.util.extras import require
from permtriton.util.progress import Progress

if TYPE_CHECKING:
    from datasets import Dataset

# Name -> arguments of datasets.load_dataset: the subsets that PermLLM, Wanda and SparseGPT calibrate on.
HUB_DATASETS: dict[str, dict[str, Any]] = {
    "c4": {"path": "allenai/c4", "data_files": {"train": "en/c4-train.00000-of-01024.json.gz"}, "split": "train"},
    "wikitext2": {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1", "split": "train"},
    "pile": {"path": "NeelNanda/pile-10k", "split": "train"},  # parquet; larger copies need a zstd decoder
}
# The same for held-out text, as the code of GPTQ, SparseGPT and Wanda takes it.
HUB_EVALUATION: dict[str, dict[str, Any]] = {
    "wikitext2": {**HUB_DATASETS["wikitext2"], "split": "test"},
    "c4": {
        "path": "allenai/c4",
        "data_files": {"validation": "en/c4-validation.00000-of-00008.json.gz"},
        "split": "validation[:1100]",
    },
}
EVALUATION_WINDOWS = {"c4": 256}  # source -> most windows that are evaluated
# Sources whose documents papers encode as one text -> the separator; the documents of wikitext2 are lines.
JOINED = {"wikitext2": "\n\n"}
EVALUATION_JOINED = {**JOINED, "c4": " "}
SUFFIXES = (".txt", ".jsonl", ".json", ".parquet", ".safetensors")
Documents = Sequence[Any]  # each a text or token ids
OF_IDS = ("input_ids", DECODER_IDS, "labels")  # the arguments that hold token ids
INTEGERS = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def all_windows(
    config: CalibrationConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    seed: int,
    documents: Documents | None = None,
    surplus: int = SURPLUS,
    *,
    halves: bool = False,
) -> Samples:
    """Encodes calibration text, and draws all its sequences in random order.

    Args:
        tokenizer: The model's tokenizer; may be None where the source holds ``input_ids``.
        documents: Documents in memory, which the source then only names; None to read those of the source.
        surplus: About the ratio of encoded to wanted tokens, if there is enough text; at least `SURPLUS`. The first
            sequences do not depend on it.
        halves: Whether the model is an encoder-decoder, each row of which holds two sequences.

    Returns:
        At least ``samples`` rows of ``sequence_length`` tokens: windows that do not overlap, each with the special
            tokens that the tokenizer puts around a text. With ``one_document``, windows may overlap, and there are
            exactly ``samples``.
    """
    source = config.calibration
    if documents is None:
        documents = _documents(source, HUB_DATASETS, JOINED, "calibration.txt", config.text_column, config.split)
    special = _special_tokens(documents, tokenizer, config.special_tokens, halves=halves)
    encoder = Encoder(source, tokenizer, vocabulary, special or NONE)
    length = encoder.special.room(config.sequence_length, "sequence_length")
    if config.one_document:
        rows = _one_document_each(config, documents, encoder, length, seed)
    else:
        rows = _mixed_windows(config, documents, encoder, length, seed, surplus)
    return Samples({"input_ids": encoder.checked(encoder.special.around(rows))}, special=special)


def _special_tokens(
    documents: Documents, tokenizer: PreTrainedTokenizerBase | None, choice: str, *, halves: bool
) -> SpecialTokens | None:
    """Returns the special tokens around each sequence; None if documents are token ids, which are used unchanged."""
    first = documents[0] if len(documents) else ""
    is_text = isinstance(first, str) or (isinstance(first, list | tuple) and any(isinstance(m, Mapping) for m in first))
    return special_tokens_of(tokenizer, choice, halves=halves) if is_text else None


def _mixed_windows(
    config: CalibrationConfig, documents: Documents, encoder: Encoder, length: int, seed: int, surplus: int
) -> Tensor:
    """Returns windows of documents that are joined in random order, int64 ``[at least samples, length]``."""
    generator, tokens = torch.Generator().manual_seed(seed), config.samples * length
    cut_off = length if surplus > SURPLUS else 0  # tokens that both parts lose as remainders
    stream, ends = encoder.stream(documents, surplus * tokens + cut_off, generator)
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


def _one_document_each(
    config: CalibrationConfig, documents: Documents, encoder: Encoder, length: int, seed: int
) -> Tensor:
    """Returns sequences, each a random window of one longer document, int64 ``[samples, length]``.

    Documents are drawn with replacement, by Python's generator, until one is long enough: for c4 and a seed, these are
    the sequences that the code of SparseGPT and Wanda draws. Like that code, this adds no end token.
    """
    generator, short = random.Random(seed), set[int]()
    sequences = list[Tensor]()
    while len(sequences) < config.samples:
        if len(short) == len(documents):
            raise CalibrationError(
                f"{config.calibration} has no document with more than {length:,} tokens, to draw a sequence from: "
                "lower `sequence_length=`, give longer documents, or leave `one_document=` and `protocol=` out"
            )
        number = generator.randint(0, len(documents) - 1)
        if number in short:
            continue
        ids = encoder.one(documents[number], number, ended=False)
        if ids.numel() <= length:
            short.add(number)
            continue
        start = generator.randint(0, ids.numel() - length - 1)
        sequences.append(ids[start : start + length])
    return torch.stack(sequences)


def held_out_windows(
    source: str,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    sequence_length: int,
    documents: Documents | None = None,
    *,
    halves: bool = False,
    special_tokens: str = "auto",
) -> Samples:
    """Returns held-out text as consecutive windows, each with the special tokens that surround a text.

    Args:
        source: ``demo``, ``wikitext2``, ``c4`` or a local file.
        sequence_length: Tokens per window; a shorter text gives one shorter window.
    """
    if documents is None:
        documents = _documents(source, HUB_EVALUATION, EVALUATION_JOINED, "heldout.txt")
    special = _special_tokens(documents, tokenizer, special_tokens, halves=halves)
    around = special or NONE
    length = around.room(sequence_length, "window")
    encoder = Encoder(source, tokenizer, vocabulary, around)
    stream, _ = encoder.stream(documents)
    length = min(length, stream.numel())
    if length + len(around) < 2:
        raise CalibrationError(f"{source} holds {stream.numel()} tokens: at least 2 are needed to evaluate")
    rows = stream[: stream.numel() // length * length].view(-1, length)[: EVALUATION_WINDOWS.get(source)]
    return Samples({"input_ids": encoder.checked(around.around(rows))}, special=special)


def calibration_samples(
    config: CommonConfig, tokenizer: Processor | None, model: PreTrainedModel, documents: Documents | None = None
) -> Samples:
    """Draws the calibration samples of a compilation, with the remaining sequences of a text as ``surplus``."""
    source, count = config.calibration.calibration, config.calibration.samples
    if is_media(model, source):
        for name in OF_TEXT:
            if value := getattr(config.calibration, name):
                raise ConfigError(
                    f"`{name}={value}` has no effect on {source}, which is no text: leave it out, or the protocol that "
                    "sets it"
                )
        generator = torch.Generator().manual_seed(config.seed)
        return check_samples(model, stored_samples(source, model, count, generator))
    check_length(model, config.calibration.sequence_length)
    windows = all_windows(
        config.calibration, tokenizer, vocabulary_of(model), config.seed, documents, config.surplus,
        halves=divides_text(model),
    )  # fmt: skip
    surplus = samples_of(model, windows[count:]) if len(windows) > count else None
    return replace(samples_of(model, windows[:count]), surplus=surplus)


def fitted(
    config: CalibrationConfig, given: Container[str], model: PreTrainedModel, progress: Progress
) -> CalibrationConfig:
    """Returns ``config`` with a sequence length that the model can take, unless the user gave it (``given``)."""
    if "sequence_length" in given and model.main_input_name in MEDIA_INPUTS:
        raise ConfigError(
            f"`sequence_length={config.sequence_length}` has no effect on a {type(model).__name__}, which reads no "
            "text: leave it out, or the protocol that sets it"
        )
    limit = max_tokens(model)
    if "sequence_length" in given or limit is None or limit >= config.sequence_length:
        return config
    progress.say(f"sequence length: {limit}, not {config.sequence_length}: the model has no more positions")
    return replace(config, sequence_length=limit)


def check_samples(model: PreTrainedModel, inputs: Inputs) -> Samples:
    """Returns samples after `check_inputs`, with the arguments that the model's ``forward`` takes."""
    samples = check_inputs(model, inputs)
    surplus = None if samples.surplus is None else check_samples(model, samples.surplus)
    return replace(samples, inputs=arguments_of(model, samples.inputs), surplus=surplus)


def check_inputs(model: PreTrainedModel, inputs: Inputs) -> Samples:
    """Returns samples that a caller made, labels included, after checking that the model can take them."""
    samples = Samples.of(inputs)
    kinds = {name: values.dtype for name, values in samples.inputs.items() if name in OF_IDS}
    integers = [name for name, kind in kinds.items() if kind in INTEGERS]
    samples = replace(samples, inputs={**samples.inputs, **{name: samples.inputs[name].long() for name in integers}})
    reader = model if core_of(model) is model else model.base_model
    parameters = inspect.signature(reader.forward).parameters.values()
    taken = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    made = {"labels"} if divides_text(model) else set[str]()
    made |= {DECODER_IDS} if takes_decoder_ids(model) else set()
    unknown = [name for name in samples.inputs if name not in (*taken, *made)]
    if taken and unknown:  # a wrapper may hand on all arguments
        raise CalibrationError(f"{unknown[0]} is no argument of {type(reader).__name__}: it takes {', '.join(taken)}")
    for name, values in samples.inputs.items():
        if name in OF_IDS:
            vocabulary = vocabulary_of(model)
            if values.dtype != torch.int64 or values.ndim != 2 or values.min() < 0 or values.max() >= vocabulary:
                raise CalibrationError(
                    f"{name} have shape {tuple(values.shape)} and dtype {values.dtype}: expected integers "
                    f"[samples, tokens] with values from 0 to {vocabulary - 1}"
                )
            check_length(model, values.shape[1], of_a_half=divides_text(model) and samples.ids is None)
        elif not bool(values.isfinite().all()):
            bad = int((~values.isfinite()).sum())
            raise CalibrationError(f"{name}: {bad} of {values.numel()} values are NaN or infinite")
        elif name.endswith("attention_mask") and not bool(values.all()):
            raise CalibrationError(
                f"{name}: {int((values == 0).sum())} of {values.numel()} positions are padding, which would count like "
                "all others in what is measured: give samples of one length without padding"
            )
    return samples


def line_of_ids_without(samples: Samples | None, tokenizer: Processor | None) -> str:
    """Returns a warning if a user's token ids lack the token that the tokenizer puts before a text; else empty."""
    ids = None if samples is None or samples.special is not None else samples.inputs.get("input_ids")
    if ids is None or not (special := special_tokens_of(tokenizer)).before or bool((ids == special.before[0]).any()):
        return ""
    name = tokenizer_of(tokenizer).convert_ids_to_tokens(special.before[0])
    return (
        f"the token ids hold no {name}, which the tokenizer puts before a text: the model is measured without it, as "
        "hardly anyone runs it"
    )


def vocabulary_of(model: PreTrainedModel) -> int:
    """Returns the number of token ids that the model knows: the rows of its embedding, or of the smallest of several.

    Some models, such as those of characters or of speech, name no embedding; then it is the config's ``vocab_size``.
    """
    try:
        embedding = embedding_of(model)
        tables = embedding if isinstance(embedding, nn.ModuleList) else [embedding]
        return min(int(table.get_parameter("weight").shape[0]) for table in tables)
    except AttributeError:
        count = getattr(model.config.get_text_config(), "vocab_size", None)
    if not isinstance(count, int) or count < 1:
        raise CalibrationError(f"a {type(model).__name__} does not say which token ids it knows: give other samples")
    return count


def _documents(
    source: str, hub: dict[str, dict], joined: dict[str, str], demo_file: str, column: str = "", split: str = ""
) -> Sequence[Any]:
    if split and source not in hub and not _is_dataset(source):
        raise ConfigError(f"`split={split}` has an effect on a dataset on the hub only, not on {source}: leave it out")
    if column and (source == "demo" or source.endswith(".txt")):
        raise ConfigError(f"`text_column={column}` has no effect on {source}, which has no columns: leave it out")
    with reading(f"{source} cannot be read", CalibrationError):
        if source == "demo":
            return [(demo.FOLDER / demo_file).read_text(encoding="utf-8")]
        if source in hub or _is_dataset(source):
            arguments = hub.get(source, {"path": source, "split": "train" if hub is HUB_DATASETS else "test"})
            dataset = _from_hub(source, arguments | ({"split": split} if split else {}))
            documents = documents_in(dataset.column_names, dataset.__getitem__, source, column)
            return [joined[source].join(documents)] if source in joined else documents
        path = Path(source)
        if not os.path.isfile(source):  # Path.is_file fails on names that are too long
            name = source if len(source) < 100 else shown(source)  # it may be a text itself
            raise CalibrationError(
                f"{name} is neither a file nor one of {', '.join(['demo', *hub])}: give one of these, "
                "a dataset on the hub (OWNER/NAME), a local .txt, .jsonl or .parquet or, in Python, a list of texts"
            )
        if path.suffix == ".txt":
            return [text] if (text := _read(path)).strip() else []
        if path.suffix in (".jsonl", ".json"):
            rows = _json_lines(path)
            names = list(dict.fromkeys(chain(*rows)))
            return documents_in(names, lambda name: [row.get(name) for row in rows], source, column) if rows else []
        if path.suffix == ".parquet":
            require(source, "pyarrow")
            from pyarrow import parquet

            file = parquet.ParquetFile(path)
            return documents_in(
                file.schema_arrow.names, lambda name: file.read([name])[name].to_pylist(), source, column
            )
        raise CalibrationError(
            f"{source}: its suffix is {path.suffix or 'missing'}; expected a .txt, .json, .jsonl or .parquet file: "
            "write other tables as .jsonl, and unpack archives"
        )


def _from_hub(name: str, arguments: dict) -> "Dataset":
    require(f"the text {name}, which the hub has,", "datasets")
    from datasets import load_dataset

    try:
        return load_dataset(**arguments)
    except Exception as error:  # the hub client raises many kinds of errors, none of them a bug in permtriton
        raise CalibrationError(
            f"dataset {name} ({arguments['path']}) cannot be fetched: {type(error).__name__}: "
            f"{first_line(error)}. Check the network, or give a local file by `calibration=` or `eval_data=`"
        ) from error


def _is_dataset(source: str) -> bool:
    """Whether a name can only be that of a dataset on the hub: it has an owner and no file suffix, and is no file."""
    return is_hub_name(source) and "/" in source and Path(source).suffix not in SUFFIXES


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # without a byte order mark
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file: one per line, a single one, or an array; a text becomes ``{"text": text}``."""
    text, rows = _read(path), list[dict[str, Any]]()
    with suppress(ValueError, RecursionError):  # not a single JSON value: read by lines
        whole = json.loads(text)
        array = whole if isinstance(whole, list) else [whole]
        if all(isinstance(row, str | dict) for row in array):
            return [{"text": row} if isinstance(row, str) else row for row in array]
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:  # also for integers of too many digits
            raise CalibrationError(f"{path} line {number} is not JSON: {first_line(error)}") from error
        if not isinstance(rows[-1], dict):
            raise CalibrationError(f"{path} line {number} is {shown(rows[-1])}: expected a text or input_ids by name")
    return rows
