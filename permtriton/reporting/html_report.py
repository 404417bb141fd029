"""``permtriton report``: reads compiled folders and writes one HTML page about them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from permtriton.checkpoint.record import described_sparsity
from permtriton.errors import ConfigError
from permtriton.evaluation.compare_results import read_comparison
from permtriton.reporting import pictures, sections
from permtriton.reporting.compiled import Compiled, read_folders
from permtriton.reporting.pages import Page, html
from permtriton.util.extras import require
from permtriton.util.output_files import check_file, real_path, write_file


def report(
    folders: Sequence[Path],
    output: Path | None,
    *,
    comparison: Path | None = None,
    masks: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a report about one or several compiled folders as one HTML file.

    Args:
        folders: outputs of ``permtriton compile`` or ``export``, shown side by side.
        output: file to write; None for ``FOLDER-report.html`` in the present folder, by the first folder's name.
        comparison: JSON report of ``permtriton compare``, or None.
        masks: name of the linear whose masks are drawn; None for the last one of the first layer.

    Returns:
        The absolute path of the file.

    Raises:
        ConfigError: there is no folder, or one of them does not prune the linear of the masks.
        ModelError: a folder or the comparison is missing or damaged.
        OutputError: the file exists and may not be replaced, or cannot be written.
    """
    require("a report", "jinja2")
    if not folders:
        raise ConfigError("no folder: give at least one output of permtriton compile")
    output = output or Path(f"{real_path(folders[0]).name}-report.html")
    check_file(output, overwrite=overwrite, reads=[*folders, *filter(None, [comparison])])
    comparison_report = read_comparison(comparison) if comparison else None
    opened = read_folders(folders)
    page = html(page_of(opened, comparison_report, pictures.mask_corners(opened, masks)))
    check_file(output, overwrite=overwrite)  # again: another may have been written meanwhile
    write_file(output, page.encode("utf-8", "replace"))
    return real_path(output)


def page_of(
    folders: Sequence[Compiled], comparison: Mapping[str, Any] | None, corners: Sequence[pictures.MaskCorner] = ()
) -> Page:
    """Returns what a report shows.

    Args:
        folders: compiled folders, at least one.
        comparison: content of the JSON report of ``permtriton compare``, or None.
        corners: the masks to draw.

    Raises:
        ModelError: a folder is damaged.
    """
    models = list(dict.fromkeys(folder.model for folder in folders))
    patterns = list(dict.fromkeys(described_sparsity(folder.record) for folder in folders))
    ways = f", {len(folders)} folders side by side" if len(folders) > 1 else ""
    warnings = []
    if len(models) > 1:
        warnings.append(f"The folders come from different models: {', '.join(models)}. Their numbers do not compare.")
    elif len(sections.measures_of(folders)) > 1:
        warnings.append(
            "The folders were measured on different texts, or in different ways. Their numbers do not compare."
        )
    lead, group = sections.verdict(folders), folders[0].pattern
    if all(each.pattern == group for each in folders):
        lead += f" Of every {group.group} consecutive weights of a row, {group.kept} are kept"
        lead += (
            f"{', but in linears with a pattern of their own' * any('patterns' in each.record for each in folders)}."
        )
    return Page(
        title=f"{', '.join(models)} at {', '.join(patterns)}{ways}",
        lead=lead,
        sections=[
            sections.result(folders, comparison),
            pictures.search(folders),
            pictures.importance(folders),
            *([pictures.masks(corners)] if corners else []),
            sections.orders(folders),
            sections.details(folders),
            sections.repeat(folders),
        ],
        warnings=warnings,
    )
