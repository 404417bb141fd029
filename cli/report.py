"""The command ``permtriton report``: writes an HTML page about compiled folders."""

from collections.abc import Sequence
from pathlib import Path

from permtriton import api
from permtriton.util.bars import err
from permtriton.util.machine import format_bytes


def run(
    folders: Sequence[Path], output: Path | None, comparison: Path | None, masks: str | None, *, overwrite: bool
) -> None:
    """Writes the page and says where it is; arguments and errors are those of `permtriton.report`."""
    written = api.report(folders, output, comparison=comparison, masks=masks, overwrite=overwrite)
    shown = output or written.name
    err.print(f"{shown} ({format_bytes(written.stat().st_size)})", highlight=False, markup=False, soft_wrap=True)
