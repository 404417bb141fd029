"""Tasks for lm-eval, written as local files. Their YAML is JSON, which YAML includes."""

import json
from pathlib import Path

import datasets
import pytest

QUESTIONS = [
    {"context": "the quick brown fox", "choices": [" jumps over", " sleeps until"], "answer": 0},
    {"context": "the lazy dog and", "choices": [" over", " sleeps"], "answer": 1},
    {"context": "sleeps until", "choices": [" noon.", " jumps the fox", " dog"], "answer": 0},
    {"context": "jumps over the", "choices": [" quick", " noon", " lazy dog"], "answer": 2},
]
TEXTS = [{"text": "the quick brown fox jumps"}, {"text": "the lazy dog and sleeps until noon."}]
CHOICE = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    "metadata": {"version": 3.0},
}
ROLLING = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}


def write_task(folder: Path, name: str, task: dict, rows: list[dict], **changes: object) -> None:
    """Writes a task and its data into a folder; ``changes`` replace keys of the task."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}}}
    (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **task, **changes}))


def write_tasks(folder: Path) -> Path:
    """Writes one task of either kind; returns the folder."""
    write_task(folder, "foxes", CHOICE, QUESTIONS)
    write_task(folder, "dogs", ROLLING, TEXTS)
    return folder


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch) -> None:
    """Keeps what datasets makes of the tests' files out of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")
