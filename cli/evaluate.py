"""The command ``permtriton evaluate``: measures a model, prints the results and writes them."""

import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from permtriton.arguments import EvaluateArgs
from permtriton.cli.console import out, print_json, show
from permtriton.cli.options import Json, Overwrite, output_option, takes
from permtriton.cli.processor import suit_processor
from permtriton.errors import OutputError
from permtriton.evaluation.compare_results import Cell, cell
from permtriton.evaluation.evaluate import Evaluated, evaluate_with
from permtriton.evaluation.measures import DISTANCES
from permtriton.evaluation.task_request import versions
from permtriton.model.source import Source
from permtriton.util.bars import BarProgress
from permtriton.util.output_files import check_report_file, write_report_file

TOKEN = "--token"
HEADERS = ("measure", "value", "standard error", "dense")
REPORT_KEYS = ("model", "against", "protocol", "tokens_per_second")


@takes()
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model folder, a hub name, a .gguf file, or demo; dense, or written by permtriton in any format.",
        ),
    ],
    args: EvaluateArgs,
    json: Json = False,
    output: Annotated[Path | None, output_option(help="JSON file to write the results to as well.")] = None,
    overwrite: Overwrite = False,
) -> None:
    args = args.with_protocol(model)
    if output is not None:
        reads: list[Any] = [read for read in (model, args.against, args.eval_data, args.tasks_dir) if read]
        check_report_file(output, REPORT_KEYS, overwrite=overwrite, reads=reads)
    progress = BarProgress()
    suit_processor(Source(model, **args.loading), progress)
    measured = evaluate_with(model, replace(args, progress=progress))
    report = {
        "model": model,
        "against": args.against,
        **asdict(measured),
        "tokens": measured.tokens,
        "limit": args.limit,
        "command": shlex.join(["permtriton", *_without_token(sys.argv[1:])]),
        "versions": versions(args),
        "system": platform.platform(),
    }
    rows = list(_rows(measured))
    if output is not None:
        try:
            write_report_file(output, report)
        except OutputError as error:
            _print(report, rows, json=json)
            raise OutputError(f"{error}; the result is printed above") from error
    _print(report, rows, json=json)


def _without_token(words: Sequence[str]) -> list[str]:
    """Returns the typed arguments without the token of the hub, which is never written anywhere."""
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


def _print(report: dict[str, Any], rows: list[tuple[Cell, ...]], *, json: bool) -> None:
    if json:
        print_json(report)
        return
    title = report["model"] + (f", on {report['text']}: {report['protocol']}" if report["text"] else "")
    shown = [number for number in range(len(HEADERS)) if number < 2 or any(row[number] is not None for row in rows)]
    cells = ([cell(row[number]) for number in shown] for row in rows)
    show(title, cells, *(HEADERS[number] for number in shown))
    speed = f"; {report['tokens_per_second']:,.0f} tokens per second" if report["text"] else ""
    out.print(f"{report['seconds']:.1f} s{speed} on {report['device']}", highlight=False)
