"""The command ``permtriton compare``: compares methods, or the settings of an ablation, and prints the table."""

from typing import Any

from permtriton.arguments import CompareArgs
from permtriton.cli.console import print_json, quality, say, show
from permtriton.cli.options import Flags, HelpAll, Json, Model, takes
from permtriton.cli.processor import suit_processor
from permtriton.evaluation import compare as comparing
from permtriton.evaluation.compare_results import cell, columns, row_name
from permtriton.model.source import Source
from permtriton.recipe import all_options
from permtriton.util.bars import BarProgress
from permtriton.util.machine import keep_freed_memory


@takes(all_options().keys() - {"sparsity", "importance", "layout", "seed"})  # rows of the table set these four
def compare(model: Model, args: CompareArgs, flags: Flags, json: Json = False, help_all: HelpAll = False) -> None:
    keep_freed_memory()
    progress = BarProgress()
    suit_processor(Source(model, **args.loading), progress)
    report = comparing.compare(model, args, flags, progress)
    (print_json if json else _print)(report)


def _print(report: dict[str, Any]) -> None:
    seeds = f"{len(report['seeds'])} seeds" if len(report["seeds"]) > 1 else "one seed"
    tokens, window = report["tokens"], report["window"]
    of_text = f"{tokens:,} tokens in windows of {window}"
    measured = f"{tokens // window} samples of {window} positions" if report["media"] else of_text
    measured += f", {report['special_tokens']}" if "special_tokens" in report else ""
    title = f"{report['model']} at {', '.join(report['patterns'])}, on {report['text']} ({measured}), {seeds}"
    table = columns(report)
    show(title, (map(cell, row) for row in zip(*table.values(), strict=True)), *table)
    say(verdict(report))


def verdict(report: dict[str, Any]) -> str:
    measure, (dense, *rows) = report["measure"], report["rows"]
    best = (min if measure == "perplexity" else max)(rows, key=lambda row: row["mean"])
    name = row_name(best, with_pattern=len(report["patterns"]) > 1)
    return f"best: {name}, {quality(measure, dense['mean'], best['mean'])}"
