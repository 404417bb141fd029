"""The command ``permtriton export``: rewrites a checkpoint in another format and prints the sizes."""

from pathlib import Path
from typing import Any

from permtriton import api
from permtriton.checkpoint.card import loss_in_words
from permtriton.cli.console import out, print_json, saved, table
from permtriton.util.machine import format_bytes


def run(folder: Path, format: str, output: Path | None, *, overwrite: bool, json: bool) -> None:
    """Rewrites a checkpoint in another format and prints the sizes; errors are those of `permtriton.export`."""
    report = api.export(folder, output, format=format, overwrite=overwrite, progress=True)
    with saved(Path(report["output"])):
        if json:
            print_json(report)
        else:
            _print(report)


def _print(report: dict[str, Any]) -> None:
    result = table("Export", "", "", show_header=False)
    result.add_row("pruned weights", f"{report['weights']} at {report['sparsity']}")
    result.add_row("dense bytes", f"{report['dense_bytes']:,}")
    result.add_row(f"{report['format']} bytes", f"{report['stored_bytes']:,}")
    result.add_row("ratio", f"{report['ratio']:.4f}")
    if "loss" in report:
        result.add_row("linears in 8 bits", f"{report['quantized']}")
        result.add_row("kept weights that became zeros", f"{report['further_zeros']:,}")
        result.add_row("what it costs", loss_in_words(report["loss"]))
    for name, file in report["files"].items():
        result.add_row(name, format_bytes(file["bytes"]))
    result.add_row("seconds", f"{report['seconds']:.1f}")
    result.add_row("reloaded", report["reloaded"])
    result.add_row("loads with", report["loads_with"])
    result.add_row("written to", report["output"])
    out.print(result)
