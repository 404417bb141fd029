"""The command ``permtriton evaluate``: measures a model, prints the results and writes them."""

import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from permtriton.cli.console import out, print_json, saved, table
from permtriton.cli.threads import spare_threads
from permtriton.comparison.summary import Cell, cell
from permtriton.comparison.tables import Result, check_table, write_table
from permtriton.evaluation.evaluate import evaluate
from permtriton.evaluation.fidelity import DISTANCES
from permtriton.evaluation.measure import Evaluated
from permtriton.evaluation.task_request import TaskRequest
from permtriton.model.source import Source
from permtriton.util.bars import BarProgress

TOKEN = "--token"
HEADERS = ("measure", "value", "standard error", "dense")
RESULT = Result(HEADERS, ("model", "against", "protocol", "tokens_per_second"))


def run(
    model: str,
    against: str | None,
    eval_data: str | None,
    tasks: TaskRequest,
    batch: int | None,
    output: Path | None,
    *,
    overwrite: bool,
    json: bool,
    **loading: Any,
) -> None:
    """Measures a model, prints the results and writes them.

    Args:
        loading: how the model is read, as `permtriton.evaluate` takes it.

    Raises:
        PermTritonError: as `permtriton.evaluate`, or an output that cannot be written.
    """
    if output is not None:
        reads: list[str | Path] = [each for each in (model, against, eval_data, tasks.folder) if each]
        check_table(output, overwrite=overwrite, like=RESULT, reads=reads)
    progress = BarProgress()
    read = {each.name for each in fields(Source)}
    source = Source(model, **{name: value for name, value in loading.items() if name in read})
    spare_threads(source, progress)
    measured = evaluate(
        model,
        eval_data,
        against=against,
        tasks="none" if tasks.names is None else tasks.names,
        limit=tasks.limit,
        tasks_dir=tasks.folder,
        batch_size=batch,
        progress=progress,
        **loading,
    )
    report = {
        "model": model,
        "against": against,
        **asdict(measured),
        "tokens": measured.tokens,
        "limit": tasks.limit,
        "command": shlex.join(["permtriton", *_without_token(sys.argv[1:])]),
        "versions": tasks.versions(),
        "system": platform.platform(),
    }
    rows = list(_rows(measured))
    if output is not None:
        write_table(output, HEADERS, rows, report)
    with saved(*filter(None, [output])):
        if json:
            print_json(report)
        else:
            _print(report, rows)


def _without_token(words: Sequence[str]) -> list[str]:
    """Returns what was typed without the token of the hub, which is never written anywhere."""
    return [
        word
        for before, word in zip(("", *words), words, strict=False)
        if TOKEN not in (before, word) and not word.startswith(f"{TOKEN}=")
    ]


def _rows(measured: Evaluated) -> Iterator[tuple[Cell, ...]]:
    """Yields the cells under `HEADERS` of each measure."""
    if measured.perplexity is not None:
        yield "perplexity", measured.perplexity, None, measured.dense_perplexity
    for name, distance in DISTANCES.items():
        if (value := getattr(measured, name)) is not None:
            yield distance.words, value, None, distance.dense
    for task in measured.tasks:
        for metric, score in task.scores.items():
            yield f"{task.name}, {metric} ({task.samples} samples)", score.value, score.stderr, None


def _print(report: dict[str, Any], rows: list[tuple[Cell, ...]]) -> None:
    title = report["model"] + (f", on {report['text']}: {report['protocol']}" if report["text"] else "")
    shown = [number for number in range(len(HEADERS)) if any(row[number] is not None for row in rows)]
    printed = table(title, *(HEADERS[number] for number in shown))
    for row in rows:
        printed.add_row(*(cell(row[number]) for number in shown))
    out.print(printed)
    speed = f"; {report['tokens_per_second']:,.0f} tokens per second" if report["text"] else ""
    out.print(f"{report['seconds']:.1f} s{speed} on {report['device']}", highlight=False)
