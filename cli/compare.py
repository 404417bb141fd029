"""The command ``permtriton compare``: compares the methods and prints the table."""

import platform
from json import dumps
from pathlib import Path
from typing import Any

from permtriton import compare as library
from permtriton import machine
from permtriton.cli.console import BarProgress, err, fail, out, print_json, table
from permtriton.cli.held_out import held_out_windows
from permtriton.config import CompileConfig
from permtriton.errors import ConfigError, OutputError
from permtriton.model import load


def run(
    source: load.Source,
    config: CompileConfig,
    eval_text: str | None,
    seeds: str,
    methods: str | None,
    output: Path | None,
    json: bool,
) -> None:
    """Compares the methods and prints one row per method.

    Args:
        source: model to prune.
        config: options that the methods do not set.
        eval_text: held-out text, as `permtriton.cli.held_out.held_out_windows` takes it.
        seeds: seeds, separated by commas.
        methods: names of methods, separated by commas; None for all.
        output: file to write the JSON report to, or None.
        json: whether to print JSON.

    Raises:
        PermTritonError: as `permtriton.compare.compare`, seeds that are not integers, or an output that cannot be
            written.
    """
    numbers = _seeds(seeds)
    if output is not None and not output.resolve().parent.is_dir():
        raise OutputError(f"output {output}: the folder {output.resolve().parent} does not exist; make it first")
    model, tokenizer = load.load_original(source)
    windows, text = held_out_windows(source, eval_text, tokenizer, model)
    if windows is None:
        fail(f"nothing to compare on: {text}", 2)
    results = library.compare(
        model,
        tokenizer,
        config,
        windows,
        seeds=numbers,
        methods=[m.strip() for m in methods.split(",")] if methods else tuple(library.METHODS),
        progress=BarProgress(),
        finished=lambda row: err.print(f"{row.method}: {row.mean:.3f} ({row.seconds:.0f} s)", highlight=False),
    )
    report = {
        "model": source.name,
        "measure": "perplexity" if model.can_generate() else "cosine",
        "text": text,
        "tokens": int(windows.numel()),
        "seeds": numbers,
        "config": config.to_dict(),
        "versions": machine.versions(),
        "device": machine.device_name(model.device),
        "system": platform.platform(),
        "rows": [_row(result) for result in results],
    }
    if output is not None:
        _write(report, output)
    if json:
        print_json(report)
    else:
        _print(report)


def _write(report: dict[str, Any], output: Path) -> None:
    temporary = output.with_name(f".{output.name}.tmp")
    temporary.write_text(dumps(report, indent=1) + "\n", encoding="utf-8")
    temporary.replace(output)


def _seeds(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
        if min(numbers) >= 0:
            return numbers
        raise ValueError
    except ValueError:
        raise ConfigError(
            f"seeds {text!r}: expected non-negative integers separated by commas, such as 0,1,2"
        ) from None


def _row(result: library.MethodResult) -> dict[str, Any]:
    return {
        "method": result.method,
        "values": result.values,
        "mean": result.mean,
        "spread": result.spread,
        "seconds": round(result.seconds, 1),
    }


def _print(report: dict[str, Any]) -> None:
    dense = report["rows"][0]["mean"]
    seeds, text = len(report["seeds"]), report["text"]
    title = f"{report['model']} at {report['config']['sparsity']}, {report['measure']} on {text}, {seeds} seeds"
    rows = table(title, "method", report["measure"], "against dense", "seconds")
    for row in report["rows"]:
        spread = f" ± {row['spread']:.3f}" if len(row["values"]) > 1 else ""
        change = f"{row['mean'] / dense:.3f}x" if row["method"] != "dense" else ""
        rows.add_row(row["method"], f"{row['mean']:.3f}{spread}", change, f"{row['seconds']:.0f}")
    out.print(rows)
