"""Reads ``permtriton.json`` and the JSON of ``permtriton compare``, and refuses what has another form."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from permtriton.errors import ModelError
from permtriton.model.load import REPORT_FILE
from permtriton.model.stored import read_json
from permtriton.permutation import is_permutation

LARGEST = 2**63  # of an integer: longer ones are damage, and cannot be formatted as floats

Form = Any
"""A type, a tuple of types, ``[form]`` for a list, or a dict: key -> form, where ... stands for every other key.

A key of a record may be missing, because older versions did not write it; a key of an entry in a list may not.
"""

NUMBER, OPTIONAL_NUMBER, OPTIONAL_TEXT = (int, float), (int, float, type(None)), (str, type(None))
_TEXTS, _NUMBERS = {...: str}, {...: NUMBER}
_PLACED = {"channels": int, "placement": str, "moved": int}
RECORD: Form = {
    "model": str,
    "command": str,
    "versions": _TEXTS,
    "device": str,
    "dtype": str,
    "config": {"sparsity": str, ...: (str, int, float, bool)},
    "calibration": {"sha256": str, "shape": [int]},
    "parameters": int,
    "pruned_parameters": int,
    "sparsity_by_layer": _NUMBERS,
    "retained_importance": {...: {"before": NUMBER, "after": NUMBER}},
    "permutations": [
        {
            "name": str, "segments": int, "tied": int, "reason": str, "norm": OPTIONAL_TEXT, "gathers": int,
            "bytes_per_token": int, "producers": [str], "readers": [str], **_PLACED,
        }
    ],
    "sites": [{"name": str, "linears": [str], "permutation": str, "index": [int], **_PLACED}],
    "rows": [{"linears": [str], "index": [int]}],
    "skipped": _TEXTS,
    "barriers": [str],
    "hidden_states": {"permuted": bool},
    "steps": [
        {
            "name": str, "unit": str, "history": [{...: OPTIONAL_NUMBER}], "kept": (int, type(None)), "left": _TEXTS,
            "parts": [{"name": str, "start": NUMBER, "end": NUMBER}],
        }
    ],
    "evaluation": {"measure": str, "dense": NUMBER, "compiled": NUMBER, "text": str},
    "proof": {
        "fold_difference": NUMBER, "lowered_graph": str, "verified_inputs": [str], "unverified_inputs": _TEXTS,
    },
    "verification": {"tensors": int, "pruned_weights": int, "reloaded": str},
    "seconds": _NUMBERS,
    "memory": {"peak": int},
    "export": {"format": str, "ratio": NUMBER, "loads_with": str, "dense_bytes": int, "stored_bytes": int},
}  # fmt: skip
_IN_CARD = "model command versions device config calibration parameters pruned_parameters evaluation proof verification"
CARD_RECORD: Form = {key: RECORD[key] for key in (*_IN_CARD.split(), "export")}  # what the model card shows
COMPARISON: Form = {
    "model": str,
    "measure": str,
    "text": str,
    "tokens": int,
    "seeds": [int],
    "patterns": [str],
    "ablation": OPTIONAL_TEXT,
    "config": {"sparsity": str},
    "versions": _TEXTS,
    "device": str,
    "rows": [
        {
            "method": str, "pattern": str, "setting": str, "mean": NUMBER, "spread": NUMBER, "values": [NUMBER],
            "kl": OPTIONAL_NUMBER, "cosine": OPTIONAL_NUMBER, "tasks": _NUMBERS, "seconds": NUMBER,
            "compile_seconds": OPTIONAL_NUMBER, "peak_bytes": (int, type(None)),
        }
    ],
}  # fmt: skip
# What earlier versions did not write.
EARLIER_COMPARISON: dict[str, Any] = {"measure": "measure", "seeds": [0], "patterns": [], "ablation": None}
EARLIER_ROW: dict[str, Any] = {
    "pattern": "", "setting": "", "kl": None, "cosine": None, "tasks": {}, "compile_seconds": None, "peak_bytes": None,
}  # fmt: skip


def read_record(folder: Path, form: Form = RECORD) -> dict[str, Any]:
    """Returns ``permtriton.json`` of a folder; keys that its version did not write are missing.

    Args:
        folder: folder that permtriton wrote.
        form: keys to check; others are left as they are.

    Raises:
        ModelError: the folder or the file is missing, cannot be read, or has another form than permtriton writes.
    """
    path = folder / REPORT_FILE
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: give an output of permtriton compile or export")
    if not path.is_file():
        raise ModelError(
            f"{folder} was not written by permtriton (it holds no {REPORT_FILE}): give an output of permtriton compile"
        )
    record = read_json(path)
    check_form(record, form, str(path))
    for key in ("sites", "rows") if form is RECORD else ():
        for number, entry in enumerate(record.get(key, [])):
            if not is_permutation(torch.tensor(entry["index"], dtype=torch.int64)):
                raise ModelError(f"{path}: {key}[{number}].index is not a permutation: the file is damaged")
    return record


def read_comparison(path: Path) -> dict[str, Any]:
    """Returns the JSON report of ``permtriton compare``; what its version did not write is empty.

    Raises:
        ModelError: the file is missing, cannot be read, or has another form.
    """
    comparison = {**EARLIER_COMPARISON, **read_json(path)}
    rows = comparison.get("rows")
    if not rows or not isinstance(rows, list):
        raise ModelError(f"{path} has no rows: expected a file that permtriton compare --output wrote")
    comparison["rows"] = [{**EARLIER_ROW, **row} if isinstance(row, dict) else row for row in rows]
    check_form(comparison, COMPARISON, str(path))
    for number, row in enumerate(comparison["rows"]):
        if not row["values"] or row["tasks"].keys() != comparison["rows"][0]["tasks"].keys():
            raise ModelError(f"{path}: rows[{number}] has no values or other tasks than rows[0]: the file is damaged")
        if row["pattern"] and row["compile_seconds"] is None:
            raise ModelError(f"{path}: rows[{number}]: compile_seconds is missing: the file is damaged")
    return comparison


def check_form(value: Any, form: Form, where: str, *, complete: bool = False) -> None:
    """Checks a value of a JSON file.

    Args:
        value: what the file holds.
        form: what is expected.
        where: file and keys, for the error.
        complete: whether every key of ``form`` must be there.

    Raises:
        ModelError: naming the first place that has another form.
    """
    if isinstance(form, list):
        _expect(isinstance(value, list), value, "a list", where)
        for number, item in enumerate(value):
            check_form(item, form[0], f"{where}[{number}]", complete=True)
    elif isinstance(form, Mapping):
        _expect(isinstance(value, dict), value, "an object", where)
        if missing := [key for key in form if complete and key is not ... and key not in value]:
            raise ModelError(f"{where}: {missing[0]} is missing: the file is damaged")
        for key, item in value.items():
            if key in form or ... in form:
                check_form(item, form.get(key, form.get(...)), f"{where}: {key}", complete=... in form)
    else:
        types = form if isinstance(form, tuple) else (form,)
        allowed = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        in_range = not isinstance(value, int) or abs(value) < LARGEST
        _expect(allowed and in_range, value, " or ".join(kind.__name__ for kind in types), where)


def _expect(right: bool, value: Any, expected: str, where: str) -> None:
    if not right:
        raise ModelError(f"{where} is {str(value)[:60]!r}: expected {expected}; the file is damaged")
