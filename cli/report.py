"""The command ``permtriton report``: writes an HTML page about compiled folders."""

from collections.abc import Sequence
from pathlib import Path

from permtriton.cli.console import err
from permtriton.machine import format_bytes
from permtriton.reporting import html_report as library


def run(folders: Sequence[Path], output: Path | None, comparison: Path | None, *, overwrite: bool) -> None:
    """Writes the page and says where it is.

    Args:
        output: file to write; None for ``FOLDER-report.html`` in the present folder, by the first folder's name.
        comparison: JSON report of ``permtriton compare``, or None.

    Raises:
        PermTritonError: as `permtriton.reporting.html_report.report`.
    """
    target = output or Path(f"{folders[0].resolve().name}-report.html")
    written = library.report(folders, target, comparison=comparison, overwrite=overwrite)
    err.print(f"{target} ({format_bytes(written.stat().st_size)})", highlight=False, markup=False, soft_wrap=True)
