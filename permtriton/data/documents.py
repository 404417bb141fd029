"""Reads the documents of a text: the demo's, a dataset on the hub, or a local file."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from permtriton import demo
from permtriton.data.columns import documents_in
from permtriton.errors import CalibrationError, ConfigError, reading, shown
from permtriton.model.name import is_hub_name
from permtriton.util.extras import require

if TYPE_CHECKING:
    from datasets import Dataset

# Name -> arguments of datasets.load_dataset: the subsets that PermLLM, Wanda and SparseGPT calibrate on.
HUB_DATASETS: dict[str, dict[str, Any]] = {
    "c4": {"path": "allenai/c4", "data_files": {"train": "en/c4-train.00000-of-01024.json.gz"}, "split": "train"},
    "wikitext2": {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1", "split": "train"},
    "pile": {"path": "NeelNanda/pile-10k", "split": "train"},  # parquet; larger copies need a zstd decoder
}
# Arguments for held-out text: the parts that the code of GPTQ, SparseGPT and Wanda evaluates on.
HUB_EVALUATION: dict[str, dict[str, Any]] = {
    "wikitext2": {**HUB_DATASETS["wikitext2"], "split": "test"},
    "c4": {
        "path": "allenai/c4",
        "data_files": {"validation": "en/c4-validation.00000-of-00008.json.gz"},
        "split": "validation[:1100]",
    },
}
# Sources whose documents papers encode as one text -> the separator; the documents of wikitext2 are lines.
JOINED = {"wikitext2": "\n\n"}
EVALUATION_JOINED = {**JOINED, "c4": " "}
UTF_8 = "utf-8-sig"  # drops a byte order mark
SUFFIXES = (".txt", ".jsonl", ".json", ".parquet", ".safetensors")
Documents = Sequence[Any]  # each a text, a conversation (list of messages), or token ids


def named_documents(source: str, *, held_out: bool = False, column: str = "", split: str = "") -> Documents:
    """Returns the documents of a text, each a string, a conversation, or token ids.

    Args:
        source: ``demo``, a key of `HUB_DATASETS` or `HUB_EVALUATION`, a dataset on the hub, or a local file.
        held_out: whether models are measured on the documents; if not, models are calibrated on them.
        column: column of a table that holds the documents; empty for the first of `permtriton.data.columns.COLUMNS`.
        split: part of a dataset on the hub; empty for its part ``train`` or, for held-out text, ``test``.
    """
    hub, joined = (HUB_EVALUATION, EVALUATION_JOINED) if held_out else (HUB_DATASETS, JOINED)
    if split and source not in hub and not _is_dataset(source):
        raise ConfigError(f"`split={split}` has an effect on a dataset on the hub only, not on {source}: leave it out")
    if column and (source == "demo" or source.endswith(".txt")):
        raise ConfigError(f"`text_column={column}` has no effect on {source}, which has no columns: leave it out")
    with reading(f"{source} cannot be read", CalibrationError):
        if source == "demo":
            file = "heldout.txt" if held_out else "calibration.txt"
            return [(demo.FOLDER / file).read_text(encoding="utf-8")]
        if source in hub or _is_dataset(source):
            arguments = hub.get(source, {"path": source, "split": "test" if held_out else "train"})
            dataset = _from_hub(source, arguments | ({"split": split} if split else {}))
            documents = documents_in(dataset.column_names, dataset.__getitem__, source, column)
            return [joined[source].join(documents)] if source in joined else documents
        path = Path(source)
        if not os.path.isfile(source):  # Path.is_file raises for names that are too long
            name = source if len(source) < 100 else shown(source)  # the user may have given a text itself
            raise CalibrationError(
                f"{name} is neither a file nor one of {', '.join(['demo', *hub])}: give one of these, "
                "a dataset on the hub (OWNER/NAME), a local .txt, .jsonl or .parquet or, in Python, a list of texts"
            )
        if path.suffix == ".txt":
            return [text] if (text := path.read_text(encoding=UTF_8)).strip() else []
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

    advice = "check the network, or give a local file by `calibration=` or `eval_data=`"
    with reading(f"dataset {name} ({arguments['path']}) cannot be fetched ({advice})", CalibrationError):
        return load_dataset(**arguments)


def _is_dataset(source: str) -> bool:
    """Whether a name can only denote a dataset on the hub: it has an owner and no file suffix, and is no path."""
    return is_hub_name(source) and "/" in source and Path(source).suffix not in SUFFIXES


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSON file: one per line, a single one, or an array of objects and texts.

    A text in an array, or a single text, becomes ``{"text": text}``.
    """
    text, rows = path.read_text(encoding=UTF_8), list[dict[str, Any]]()
    with suppress(ValueError):  # not a single JSON value: read by lines
        whole = json.loads(text)
        array = whole if isinstance(whole, list) else [whole]
        if all(isinstance(row, str | dict) for row in array):
            return [{"text": row} if isinstance(row, str) else row for row in array]
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            with reading(f"{path} line {number} is not JSON", CalibrationError):
                rows.append(json.loads(line))
            if not isinstance(rows[-1], dict):
                raise CalibrationError(
                    f"{path} line {number} is {shown(rows[-1])}: expected a text or input_ids by name"
                )
    return rows
