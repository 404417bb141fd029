"""The command ``permtriton report``: writes an HTML page about compiled folders."""

from pathlib import Path
from typing import Annotated, Any

import typer

from permtriton.cli.options import Overwrite, output_flag
from permtriton.evaluation import report as reporting
from permtriton.util.bars import err
from permtriton.util.machine import format_bytes

Output: Any = output_flag("HTML file to write; FOLDER-report.html here by default.")


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders that permtriton compile or export wrote; several are shown side by side."),
    ],
    comparison: Annotated[
        Path | None, typer.Option(help="JSON report of permtriton compare, whose table is shown, too.")
    ] = None,
    masks: Annotated[
        str | None,
        typer.Option(
            metavar="LINEAR",
            help="Draw the masks of this linear, such as model.layers.3.mlp.down_proj, in place of the last one of the "
            "first layer.",
        ),
    ] = None,
    output: Output = None,
    overwrite: Overwrite = False,
) -> None:
    written = reporting.report(folders, output, comparison=comparison, masks=masks, overwrite=overwrite)
    shown = output or written.name
    err.print(f"{shown} ({format_bytes(written.stat().st_size)})", highlight=False, markup=False, soft_wrap=True)
