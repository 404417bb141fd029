"""The command ``permtriton export``: rewrites a checkpoint in another format and prints the sizes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from permtriton import api
from permtriton.checkpoint.formats import HELP, Format
from permtriton.cli.console import print_json, show
from permtriton.cli.options import Json, output_flag
from permtriton.util.machine import format_bytes

ROUNDED_ALONE = (
    "compiled with --save-format {}, or with round as the last step, weights make up for each other's errors"
)
Output: Any = output_flag("Folder to write; FOLDER-FORMAT here by default.")


def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that permtriton compile or export wrote.")],
    format: Annotated[str, typer.Option(help=HELP)] = Format.PACKED,
    output: Output = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output.")] = False,
    json: Json = False,
) -> None:
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
        if report["rounded"]:
            yield "rounded", f"{report['rounded']}, each weight alone: {ROUNDED_ALONE.format(report['format'])}"
        yield "kept weights that became zeros", f"{report['further_zeros']:,}"
    for name, file in report["files"].items():
        yield name, format_bytes(file["bytes"])
    yield "seconds", f"{report['seconds']:.1f}"
    yield "loads with", report["loads_with"]
    yield "written to", report["output"]
