"""The command ``permtriton compare``: compares methods, or the settings of an ablation, and prints the table."""

from collections.abc import Sequence
from typing import Any

from permtriton.arguments import CompareArgs
from permtriton.cli.console import change, print_json, say, show
from permtriton.cli.options import Flags, HelpAll, Json, Model, takes
from permtriton.cli.processor import suit_processor
from permtriton.evaluation.compare import Comparison
from permtriton.evaluation.compare_results import Row, Rows, cell, columns
from permtriton.recipe import all_options
from permtriton.util.bars import BarProgress, err
from permtriton.util.machine import keep_freed_memory


@takes(all_options().keys() - {"sparsity", "importance", "layout", "seed"})  # rows of the table set these four
def compare(model: Model, args: CompareArgs, flags: Flags, json: Json = False, help_all: HelpAll = False) -> None:
    keep_freed_memory()
    comparison = Comparison.of(model, args, flags)
    progress = BarProgress()
    suit_processor(comparison.source, progress)

    def show(report: dict[str, Any]) -> None:
        if json:
            print_json(report)
        else:
            _print(report, *columns(report), media=report["media"])

    comparison.run(progress, _say, show)


def _say(row: Row) -> None:
    measure = "cosine" if row.by_seed[0]["perplexity"] is None else "perplexity"
    err.print(f"{row.name}: {measure} {row.mean:.3f} ({row.seconds:.0f} s)", highlight=False)


def _print(report: dict[str, Any], headers: Sequence[str], rows: Rows, *, media: bool) -> None:
    seeds = f"{len(report['seeds'])} seeds" if len(report["seeds"]) > 1 else "one seed"
    tokens, window = report["tokens"], report["window"]
    measured = (
        f"{tokens // window} samples of {window} positions" if media else f"{tokens:,} tokens in windows of {window}"
    )
    measured += f", {report['special_tokens']}" if "special_tokens" in report else ""
    title = f"{report['model']} at {', '.join(report['patterns'])}, on {report['text']} ({measured}), {seeds}"
    show(title, ([cell(value) for value in row] for row in rows), *headers)
    if any(row["peak_bytes"] is None for row in report["rows"][1:]):
        say("no peak memory: this system cannot start its count anew for each row")
    say(verdict(report))


def verdict(report: dict[str, Any]) -> str:
    """Returns a line that says which row is the best, and its measure."""
    dense, *rows = report["rows"]
    is_perplexity = report["measure"] == "perplexity"
    best = (min if is_perplexity else max)(rows, key=lambda row: row["mean"])
    name = ", ".join(
        part for part in (best["method"], best["pattern"] * (len(report["patterns"]) > 1), best["setting"]) if part
    )
    if is_perplexity:
        return f"best: {name}, perplexity {change(dense['mean'], best['mean'])}"
    return f"best: {name}, cosine with the dense model {best['mean']:.4f}"
