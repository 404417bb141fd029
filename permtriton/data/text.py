"""Calibration and held-out text as token ids."""

import inspect
import json
import os
import random
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton import demo
from permtriton.config import SURPLUS, CalibrationConfig, CommonConfig
from permtriton.data.media import KINDS, Processor, is_media, media_samples
from permtriton.data.padding import documents_in, unpadded
from permtriton.data.pairs import Pair, are_pairs, paired_windows, sources_of, with_labels
from permtriton.data.samples import Inputs, Samples
from permtriton.data.tokenize import token_ids
from permtriton.errors import CalibrationError, ConfigError, first_line, reading, shown
from permtriton.model.core import DECODER_IDS, core_of, takes_decoder_ids
from permtriton.model.forward import check_length, max_tokens
from permtriton.model.name import is_hub_name
from permtriton.model.seq2seq import arguments_of, samples_of
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
EVALUATION_WINDOWS = {"c4": 256}  # at most
# Sources whose documents are customarily encoded as one text -> what joins them; wikitext2 has lines for documents.
JOINED = {"wikitext2": "\n\n"}
EVALUATION_JOINED = {**JOINED, "c4": " "}
SUFFIXES = (".txt", ".jsonl", ".json", ".parquet", ".safetensors")
Documents = Sequence[Any]  # each a text, token ids, or a `Pair` of them
IGNORED = -100  # the label of transformers for a token that does not count
OF_IDS = ("input_ids", DECODER_IDS, "labels")  # the arguments that hold token ids
INTEGERS = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def calibration_ids(
    config: CalibrationConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    seed: int,
    documents: Documents | None = None,
) -> Tensor:
    """Draws calibration sequences, int64 ``[samples, sequence_length]``: the first of `all_windows`."""
    return all_windows(config, tokenizer, vocabulary, seed, documents)[: config.samples]


def all_windows(
    config: CalibrationConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    seed: int,
    documents: Documents | None = None,
    surplus: int = SURPLUS,
    *,
    paired: bool = True,
) -> Tensor:
    """Draws all sequences of the text that is encoded, of many documents about ``surplus`` times the wanted ones.

    Args:
        config: Source, wanted number, and length of the sequences.
        tokenizer: The model's tokenizer; may be None where the source holds ``input_ids``.
        vocabulary: Number of rows of the model's embedding; every id must be below it.
        documents: What is drawn from, where it is in memory; the source then only names it.
        surplus: At least `SURPLUS`. It does not change which sequences come first.
        paired: Whether documents with labels are pairs; else their labels are left out.

    Returns:
        int64 ``[at least samples, sequence_length]``: windows that do not overlap, in random order. Where each is drawn
            from one document they may overlap, and there are as many as are wanted.

    Raises:
        CalibrationError: The source cannot be read or holds too little text, or ids are outside the vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = config.samples * config.sequence_length
    if documents is None:
        documents = _documents(
            config.calibration, HUB_DATASETS, JOINED, "calibration.txt", config.text_column, config.split
        )
    documents = documents if paired else sources_of(documents)
    if are_pairs(documents):
        if config.one_document:
            raise ConfigError("`one_document=true` has no effect on pairs of a source and its labels: leave it out")
        encode = partial(_encode_pair, tokenizer=tokenizer, vocabulary=vocabulary, source=config.calibration)
        length, name = config.sequence_length, config.calibration
        return paired_windows(documents, encode, length, config.samples, generator, name, surplus)
    if config.one_document:
        return _in_vocabulary(_one_document_each(config, documents, tokenizer, seed), vocabulary, config.calibration)
    cut_off = config.sequence_length if surplus > SURPLUS else 0  # what is left over at the ends of both parts
    stream, ends = _encode(config.calibration, documents, tokenizer, vocabulary, surplus * wanted + cut_off, generator)
    end = next((each for each in ends if each >= SURPLUS * wanted), ends[-1])  # of what is mixed, whatever follows
    windows = end // config.sequence_length
    if windows < config.samples:
        raise CalibrationError(
            f"{config.calibration} holds {stream.numel():,} tokens, {windows} sequences of {config.sequence_length}, "
            f"but {config.samples} are needed. Lower `samples=` or `sequence_length=`, or give more text"
        )
    slack = end - windows * config.sequence_length
    offset = int(torch.randint(0, slack + 1, (1,), generator=generator))
    order = torch.randperm(windows, generator=generator)
    mixed = stream[offset : offset + windows * config.sequence_length].view(windows, -1)[order]
    count = (stream.numel() - end) // config.sequence_length
    rest = stream[end : end + count * config.sequence_length].view(count, config.sequence_length)
    return torch.cat([mixed, rest])


def _one_document_each(
    config: CalibrationConfig, documents: Documents, tokenizer: PreTrainedTokenizerBase | None, seed: int
) -> Tensor:
    """Returns sequences each drawn from one document with more tokens, int64 ``[samples, sequence_length]``.

    Documents are drawn until one is long enough, with replacement, by Python's generator: for c4 and a seed, these are
    the sequences that the code of SparseGPT and Wanda draws. No end token is added, as there.
    """
    generator, length, short = random.Random(seed), config.sequence_length, set[int]()
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
        ids = _encode_one(documents[number], tokenizer, config.calibration, ended=False)
        if ids.numel() <= length:
            short.add(number)
            continue
        start = generator.randint(0, ids.numel() - length - 1)
        sequences.append(ids[start : start + length])
    return torch.stack(sequences)


def evaluation_ids(
    source: str,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    sequence_length: int,
    documents: Documents | None = None,
    *,
    paired: bool = True,
) -> Tensor:
    """Returns held-out text as consecutive windows, int64 ``[windows, sequence_length]``.

    Args:
        source: ``demo``, ``wikitext2``, ``c4`` or a local file.
        tokenizer: The model's tokenizer; may be None where the source holds ``input_ids``.
        vocabulary: Number of rows of the model's embedding; every id must be below it.
        sequence_length: Tokens per window; a shorter text gives one shorter window.
        documents: As for `calibration_ids`.
        paired: As for `all_windows`.

    Raises:
        CalibrationError: As for `calibration_ids`.
    """
    if documents is None:
        documents = _documents(source, HUB_EVALUATION, EVALUATION_JOINED, "heldout.txt")
    documents = documents if paired else sources_of(documents)
    if are_pairs(documents):
        encode = partial(_encode_pair, tokenizer=tokenizer, vocabulary=vocabulary, source=source)
        return paired_windows(documents, encode, sequence_length, None, None, source)
    stream, _ = _encode(source, documents, tokenizer, vocabulary, None, None)
    length = min(sequence_length, stream.numel())
    if length < 2:
        raise CalibrationError(f"{source} holds {stream.numel()} tokens: at least 2 are needed to evaluate")
    return stream[: stream.numel() // length * length].view(-1, length)[: EVALUATION_WINDOWS.get(source)]


def calibration_samples(
    config: CommonConfig, tokenizer: Processor | None, model: PreTrainedModel, documents: Documents | None = None
) -> Samples:
    """Draws the calibration samples of a compilation, with what is left of a text as spare ones.

    Args:
        config: Source, number and length of the samples, and the seed of the draw.
        tokenizer: The model's tokenizer; may be None where the source holds ``input_ids``. Of a model that reads images
            or sound, its processor.
        documents: As for `calibration_ids`.

    Raises:
        CalibrationError: As for `calibration_ids` or `permtriton.data.media.media_samples`, or the sequences are
            longer than the model can take.
    """
    source, count = config.calibration.calibration, config.calibration.samples
    if is_media(model, source):
        for name in ("text_column", "split", "one_document"):
            if value := getattr(config.calibration, name):
                raise ConfigError(
                    f"`{name}={value}` has no effect on {source}, which is no text: leave it out, or the protocol that "
                    "sets it"
                )
        generator = torch.Generator().manual_seed(config.seed)
        return check_samples(model, media_samples(source, model, tokenizer, count, generator))
    check_length(model, config.calibration.sequence_length)
    ids = all_windows(
        config.calibration, tokenizer, vocabulary_of(model), config.seed, documents, config.surplus,
        paired=takes_decoder_ids(model),
    )  # fmt: skip
    spare = samples_of(model, ids[count:]) if len(ids) > count else None
    return replace(samples_of(model, ids[:count]), spare=spare)


def fitted(
    config: CalibrationConfig, given: Container[str], model: PreTrainedModel, progress: Progress
) -> CalibrationConfig:
    """Returns the options of calibration, with the default sequence length lowered to what the model can take.

    Args:
        given: names of the options that were asked for: a length among them is left as it is.

    Raises:
        ConfigError: a length was asked for, and the model reads no text.
    """
    if "sequence_length" in given and model.main_input_name in KINDS:
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
    """Returns samples that a caller made, after checking that the model can take them, as it reads them.

    Arguments and errors are those of `check_inputs`.
    """
    samples = check_inputs(model, inputs)
    spare = None if samples.spare is None else check_samples(model, samples.spare)
    return replace(samples, inputs=arguments_of(model, samples.inputs), spare=spare)


def check_inputs(model: PreTrainedModel, inputs: Inputs) -> Samples:
    """Returns samples that a caller made, labels included, after checking that the model can take them.

    Args:
        inputs: Token ids, int64 ``[samples, tokens]``, or what `Samples` holds.

    Raises:
        CalibrationError: A shape or a token id is wrong, a sequence is too long, a position is padding, or the model
            has no such argument.
    """
    samples = Samples.of(inputs)
    kinds = {name: values.dtype for name, values in samples.inputs.items() if name in OF_IDS}
    integers = [name for name, kind in kinds.items() if kind in INTEGERS]
    samples = replace(samples, inputs={**samples.inputs, **{name: samples.inputs[name].long() for name in integers}})
    reader = model if core_of(model) is model else model.base_model
    parameters = inspect.signature(reader.forward).parameters.values()
    taken = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    made = {"labels", DECODER_IDS} if takes_decoder_ids(model) else set()
    unknown = [name for name in samples.inputs if name not in (*taken, *made)]
    if taken and unknown:  # a wrapper may hand on all arguments
        raise CalibrationError(f"{unknown[0]} is no argument of {type(reader).__name__}: it takes {', '.join(taken)}")
    _check_values(model, samples)
    return samples


def _check_values(model: PreTrainedModel, samples: Samples) -> None:
    halves = takes_decoder_ids(model) and samples.ids is None
    for name, values in samples.inputs.items():
        if name in OF_IDS:
            _check_ids(model, name, values)
            check_length(model, values.shape[1], of_a_half=halves)
        elif not bool(values.isfinite().all()):
            bad = int((~values.isfinite()).sum())
            raise CalibrationError(f"{name}: {bad} of {values.numel()} values are NaN or infinite")
        elif name.endswith("attention_mask") and not bool(values.all()):
            raise CalibrationError(
                f"{name}: {int((values == 0).sum())} of {values.numel()} positions are padding, which would count like "
                "all others in what is measured: give samples of one length without padding"
            )


def _check_ids(model: PreTrainedModel, name: str, ids: Tensor) -> None:
    vocabulary = vocabulary_of(model)
    if ids.dtype != torch.int64 or ids.ndim != 2 or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise CalibrationError(
            f"{name} have shape {tuple(ids.shape)} and dtype {ids.dtype}: expected integers [samples, tokens] with "
            f"values from 0 to {vocabulary - 1}"
        )


def vocabulary_of(model: PreTrainedModel) -> int:
    """Returns the number of token ids that the model knows: the rows of its embedding, or of the smallest of several.

    Some models name no embedding, such as those of characters or of speech; their config counts the ids.

    Raises:
        CalibrationError: neither says it.
    """
    try:
        embedding = model.get_input_embeddings()
        tables = embedding if isinstance(embedding, nn.ModuleList) else [embedding]
        return min(int(table.get_parameter("weight").shape[0]) for table in tables)
    except (NotImplementedError, AttributeError):
        count = getattr(model.config.get_text_config(), "vocab_size", None)
    if not isinstance(count, int) or count < 1:
        raise CalibrationError(f"a {type(model).__name__} does not say which token ids it knows: give other samples")
    return count


def _encode(
    source: str,
    documents: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    wanted: int | None,
    generator: torch.Generator | None,
) -> tuple[Tensor, list[int]]:
    """Returns the ids of a source's documents as one stream, int64 ``[tokens]``, and where each of them ends.

    The documents are in random order where ``generator`` is given. Where ``wanted`` is given, encoding stops once there
    are so many tokens.
    """
    if not len(documents):
        raise CalibrationError(f"{source} is empty: no text to use")
    order = torch.randperm(len(documents), generator=generator).tolist() if generator else range(len(documents))
    pieces, ends = list[Tensor](), list[int]()
    for position in order:
        with reading(f"{source}: document {position + 1} cannot be read", CalibrationError):
            document = documents[position]
        piece = _encode_one(document, tokenizer, source)
        pieces.append(piece)
        ends.append(piece.numel() + (ends[-1] if ends else 0))
        if wanted is not None and ends[-1] >= wanted:
            break
    if not ends[-1]:
        raise CalibrationError(f"{source} is empty: no text to use")
    return _in_vocabulary(torch.cat(pieces), vocabulary, source), ends


def _encode_one(
    document: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    source: str,
    target: bool = False,
    *,
    ended: bool = True,
) -> Tensor:
    if isinstance(document, str):
        return token_ids(document, tokenizer, source, target, ended=ended)
    return _integers(document, source)


def _encode_pair(
    pair: Pair, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, source: str
) -> tuple[Tensor, Tensor]:
    ids, labels = _encode_one(pair.source, tokenizer, source), _encode_one(pair.labels, tokenizer, source, target=True)
    if labels.numel() and int(labels.min()) == IGNORED:
        raise CalibrationError(
            f"{source}: some labels are {IGNORED}, which marks tokens that must not count, but all are counted: leave "
            "these labels out"
        )
    _in_vocabulary(torch.cat([ids, labels]), vocabulary, source)
    return ids, labels


def _in_vocabulary(ids: Tensor, vocabulary: int, source: str) -> Tensor:
    low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if low < 0 or high >= vocabulary:
        raise CalibrationError(
            f"{source}: token ids run from {low} to {high}, but the model's vocabulary is 0 to {vocabulary - 1}: "
            "the tokenizer or the ids belong to another model"
        )
    return ids


def _integers(document: Any, source: str) -> Tensor:
    document = document.tolist() if hasattr(document, "tolist") else document
    if isinstance(document, list | tuple) and all(isinstance(i, int) and -(2**63) <= i < 2**63 for i in document):
        return torch.tensor(document, dtype=torch.int64)
    raise CalibrationError(
        f"{source} holds {shown(document)}: text must be a string, input_ids a list of integers from the vocabulary"
    )


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
            names = dataset.column_names
            documents = documents_in(dataset, names, text_column(names, source, column), source)
            return [joined[source].join(documents)] if source in joined else documents
        path = Path(source)
        if not os.path.isfile(source):  # which, unlike Path.is_file, takes names that are too long
            name = source if len(source) < 100 else shown(source)  # it may be a text itself
            raise CalibrationError(
                f"{name} is neither a file nor one of {', '.join(['demo', *hub])}: give one of these, "
                "a dataset on the hub (OWNER/NAME), a local .txt, .jsonl or .parquet or, in Python, a list of texts"
            )
        if path.suffix == ".txt":
            return [text] if (text := _read(path)).strip() else []
        if path.suffix in (".jsonl", ".json"):
            return _json_lines(path, column)
        if path.suffix == ".parquet":
            return _parquet(path, column)
        raise CalibrationError(
            f"{source}: its suffix is {path.suffix or 'missing'}; expected a .txt, .jsonl or .parquet file"
        )


def _from_hub(name: str, arguments: dict) -> "Dataset":
    require(f"the text {name}, which the hub has,", "datasets")
    from datasets import load_dataset

    try:
        return load_dataset(**arguments)
    except Exception as error:  # the hub client raises many kinds of errors, none of them a bug of permtriton
        raise CalibrationError(
            f"dataset {name} ({arguments['path']}) cannot be fetched: {type(error).__name__}: "
            f"{first_line(error)}. Check the network, or give a local file"
        ) from error


def _is_dataset(source: str) -> bool:
    """Whether a name can only be that of a dataset on the hub: it has an owner, no suffix of a file, and is none."""
    return is_hub_name(source) and "/" in source and Path(source).suffix not in SUFFIXES


def text_column(names: Sequence[str], source: str, wanted: str = "") -> str:
    """Returns the name of the column that holds token ids or texts.

    Args:
        wanted: its name, where it is known.

    Raises:
        CalibrationError: there is none.
    """
    if wanted:
        if wanted not in names:
            raise CalibrationError(f"`text_column={wanted}`: {source} has the columns {', '.join(names)}")
        return wanted
    for name in ("input_ids", "text"):
        if name in names:
            return name
    raise CalibrationError(
        f"{source} has the columns {', '.join(names)}: one must be text or input_ids, or name it by `text_column=`"
    )


def _parquet(path: Path, column: str) -> Sequence[Any]:
    require(str(path), "pyarrow")
    from pyarrow import parquet

    with reading(f"{path} is not a readable parquet file", CalibrationError):
        file = parquet.ParquetFile(path)
        name = text_column(file.schema_arrow.names, str(path), column)
        names = [name, *({"labels", "attention_mask"} & set(file.schema_arrow.names))]
        found = file.read(names).select(names).to_pydict()
    for number, row in enumerate(zip(*found.values(), strict=True), start=1):
        for text in filter(lambda each: isinstance(each, str), row):
            _without_nul(text, f"{path} row {number}")
    return with_labels(documents_in(found, names, name, str(path)), found.get("labels"))


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")  # without the mark that some editors put before it
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return _without_nul(text, str(path))


def _without_nul(text: str, place: str) -> str:
    """Refuses what is not text: nobody writes NULs, but other encodings and binary files are full of them."""
    if (position := text.find("\0")) >= 0:
        raise CalibrationError(f"{place} is no text, or not UTF-8: character {position} is a NUL")
    return text


def _json_lines(path: Path, column: str) -> list[str | list[int] | Pair]:
    documents: list[str | list[int] | Pair] = []
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # also integers of too many digits
            raise CalibrationError(f"{place} is not JSON: {first_line(error)}") from error
        value: Any = _document_in(row, column, place)
        for text in filter(lambda each: isinstance(each, str), (value, row.get("labels"))):
            _without_nul(text, place)
        if "labels" in row:
            if not _is_document(row["labels"]):
                raise CalibrationError(f'{place}: "labels" must be a string or integers')
            value = Pair(value, row["labels"])
        if documents and isinstance(value, Pair) != isinstance(documents[0], Pair):
            raise CalibrationError(f'{place}: expected "labels" in every line or in none')
        documents.append(value)
    return documents


def _document_in(row: Any, column: str, place: str) -> str | list[int]:
    """Returns the text of a row, or its token ids without their padding."""
    value: Any = None
    if isinstance(row, dict):
        value = row.get(column) if column else row.get("input_ids", row.get("text"))
    if not _is_document(value) or (not column and "input_ids" in row and isinstance(value, str)):
        needed = f'"{column}" (a string or integers)' if column else '"text" (a string) or "input_ids" (integers)'
        raise CalibrationError(f"{place} needs {needed}")
    if isinstance(value, list) and column in ("", "input_ids") and "attention_mask" in row:
        return unpadded(value, row["attention_mask"], place)
    return value


def _is_document(value: Any) -> bool:
    ids = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    return ids or isinstance(value, str)
