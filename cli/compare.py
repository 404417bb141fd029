"""``permtriton compare``."""

import platform
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from permtriton import compare as library
from permtriton import load
from permtriton import report as report_parts
from permtriton.cli import options
from permtriton.cli.console import BarProgress, clear_errors, err, fail, out, print_json, table
from permtriton.errors import ConfigError, OutputError


def compare(
    model: options.ModelArgument,
    sparsity: options.Sparsity = None,
    recipe: options.Recipe = None,
    skip_indivisible: options.SkipIndivisible = None,
    calibration: options.Calibration = None,
    samples: options.Samples = None,
    sequence_length: options.SequenceLength = None,
    eval_text: options.EvalText = None,
    block_size: options.BlockSize = None,
    epochs: options.Epochs = None,
    learning_rate: options.LearningRate = None,
    batch_size: options.BatchSize = None,
    micro_batch_size: options.MicroBatchSize = None,
    learn_layers: options.LearnLayers = None,
    seeds: Annotated[str, typer.Option(help="Seeds, divided by commas.", rich_help_panel=options.RUNNING)] = "0",
    methods: Annotated[
        str | None, typer.Option(help="Some of the methods, divided by commas.", rich_help_panel=options.METHOD)
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    config: options.ConfigFile = None,
    json: options.Json = False,
    output: Annotated[
        Path | None, typer.Option(help="File to write the JSON report to as well.", rich_help_panel=options.RUNNING)
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Prune MODEL with every method on the same text and show how much each one hurts. Saves no model."""
    arguments = dict(locals())
    with clear_errors():
        chosen = options.build_config(model, recipe, config, arguments)
        numbers = _seeds(seeds)
        if output is not None and not output.resolve().parent.is_dir():
            raise OutputError(f"output {output}: the folder {output.resolve().parent} does not exist; make it first")
        source = load.Source(model, dtype, device, trust_remote_code)
        loaded, tokenizer = load.load_original(source)
        windows, text = options.held_out_windows(source, eval_text, tokenizer, loaded)
        if windows is None:
            fail(f"nothing to compare on: {text}", 2)
        results = library.compare(
            loaded,
            tokenizer,
            chosen,
            windows,
            seeds=numbers,
            methods=[m.strip() for m in methods.split(",")] if methods else tuple(library.METHODS),
            progress=BarProgress(),
            finished=lambda row: err.print(f"{row.method}: {row.mean:.3f} ({row.seconds:.0f} s)", highlight=False),
        )
        report = {
            "model": model,
            "measure": "perplexity" if loaded.can_generate() else "cosine",
            "text": text,
            "tokens": int(windows.numel()),
            "seeds": numbers,
            "config": chosen.to_dict(),
            "versions": report_parts.versions(),
            "device": report_parts.device_name(loaded.device),
            "system": platform.platform(),
            "rows": [
                {
                    "method": r.method,
                    "values": r.values,
                    "mean": r.mean,
                    "spread": r.spread,
                    "seconds": round(r.seconds, 1),
                }
                for r in results
            ],
        }
        if output is not None:
            temporary = output.with_name(f".{output.name}.tmp")
            temporary.write_text(dumps(report, indent=1) + "\n", encoding="utf-8")
            temporary.replace(output)
        if json:
            print_json(report)
        else:
            _print(report)


def _seeds(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
        if min(numbers) >= 0:
            return numbers
        raise ValueError
    except ValueError:
        raise ConfigError(
            f"seeds {text!r} is not understood: write whole numbers divided by commas, such as 0,1,2"
        ) from None


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
