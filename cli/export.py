"""The command ``permtriton export``: rewrites a checkpoint in another format and prints the sizes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from permtriton import api
from permtriton.cli.console import print_json, show
from permtriton.util.machine import format_bytes


def run(folder: Path, format: str, output: Path | None, *, overwrite: bool, json: bool) -> None:
    """Rewrites a checkpoint in another format and prints the sizes; errors are those of `permtriton.export`."""
    report = api.export(folder, output, format=format, overwrite=overwrite, progress=True)
    if json:
        print_json(report)
    else:
        show("Export", _rows(report))


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "pruned weights", f"{report['weights']} at {report['sparsity']}"
    yield "dense bytes", f"{report['dense_bytes']:,}"
    yield f"{report['format']} bytes", f"{report['stored_bytes']:,}"
    yield "ratio", f"{report['ratio']:.4f}"
    if "quantized" in report:
        yield "linears in 8 bits", f"{report['quantized']}"
        yield "kept weights that became zeros", f"{report['further_zeros']:,}"
    for name, file in report["files"].items():
        yield name, format_bytes(file["bytes"])
    yield "seconds", f"{report['seconds']:.1f}"
    yield "loads with", report["loads_with"]
    yield "written to", report["output"]
