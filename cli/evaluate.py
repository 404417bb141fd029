"""The command ``permtriton evaluate``: measures a model, prints the results and writes them."""

import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from permtriton.arguments import EvaluateArgs
from permtriton.cli.console import out, print_json, show
from permtriton.cli.options import Json, Model, Overwrite, output_flag, takes
from permtriton.cli.processor import suit_processor
from permtriton.evaluation.compare_results import Cell, cell
from permtriton.evaluation.evaluate import Evaluated, evaluate_with, versions
from permtriton.evaluation.measures import DISTANCES
from permtriton.model.source import Source
from permtriton.util.bars import BarProgress
from permtriton.util.output_files import check_report_file, write_report_file

HEADERS = ("measure", "value", "standard error", "dense")
REPORT_KEYS = ("model", "against", "protocol", "tokens_per_second")
Output: Any = output_flag("JSON file to write the results to as well.")


@takes()
def evaluate(
    model: Model,
    args: EvaluateArgs,
    json: Json = False,
    output: Output = None,
    overwrite: Overwrite = False,
) -> None:
    args = args.with_protocol(model)
    if output is not None:
        check_report_file(output, REPORT_KEYS, overwrite=overwrite)
    progress = BarProgress()
    suit_processor(Source(model, **args.loading), progress)
    measured = evaluate_with(model, replace(args, progress=progress))
    words = [word.replace(args.token, "TOKEN") if args.token else word for word in sys.argv[1:]]
    report = {
        "model": model,
        "against": args.against,
        **asdict(measured),
        "tokens": measured.tokens,
        "limit": args.limit,
        "command": shlex.join(["permtriton", *words]),
        "versions": versions(args),
        "system": platform.platform(),
    }
    try:
        if output is not None:
            write_report_file(output, report)
    finally:  # a result that may have taken hours is printed in any case
        if json:
            print_json(report)
        else:
            _print(report, list(_rows(measured)))


def _rows(measured: Evaluated) -> Iterator[tuple[Cell, ...]]:
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
    columns = dict(zip(HEADERS, zip(*rows, strict=True), strict=True))
    table = {head: cells for head, cells in columns.items() if head == "value" or any(c is not None for c in cells)}
    show(title, (map(cell, row) for row in zip(*table.values(), strict=True)), *table)
    speed = f"; {report['tokens_per_second']:,.0f} tokens per second" if report["text"] else ""
    out.print(f"{report['seconds']:.1f} s{speed} on {report['device']}", highlight=False)
