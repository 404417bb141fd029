"""``permtriton export``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from permtriton import export as library
from permtriton import memory
from permtriton.cli import options
from permtriton.cli.console import BarProgress, clear_errors, out, print_json, table


def export(
    folder: Annotated[Path, typer.Argument(help="A folder that permtriton compile or export wrote.")],
    format: Annotated[
        str,
        typer.Option(
            help="packed: kept values and positions, 9/16 of the dense size at 2:4 and 16 bits; loads after import "
            "permtriton. dense: zeros stored too. plain: dense, or refused where transformers alone cannot load it "
            "(layout fused)."
        ),
    ] = "packed",
    output: Annotated[Path | None, typer.Option(help="Folder to write; FOLDER-FORMAT here by default.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output.")] = False,
    json: options.Json = False,
) -> None:
    """Rewrite a compiled checkpoint packed or dense, bit for bit the same weights."""
    with clear_errors():
        target = output or Path(f"{folder.resolve().name}-{format}")
        told = library.export(folder, target, format, overwrite=overwrite, progress=BarProgress())
        if json:
            print_json({"output": str(target), **told})
        else:
            _print(told, target)


def _print(told: dict[str, Any], target: Path) -> None:
    result = table("Export", "", "", show_header=False)
    result.add_row("pruned weights", f"{told['weights']} at {told['sparsity']}")
    result.add_row("dense bytes", f"{told['dense_bytes']:,}")
    result.add_row(f"{told['format']} bytes", f"{told['stored_bytes']:,}")
    result.add_row("ratio", f"{told['ratio']:.4f}")
    for name, file in told["files"].items():
        result.add_row(name, memory.format_bytes(file["bytes"]))
    result.add_row("seconds", f"{told['seconds']:.1f}")
    result.add_row("loads with", told["loads_with"])
    result.add_row("written to", str(target))
    out.print(result)
