"""``permtriton report``: reads compiled folders and writes one HTML page about them. **Add a section in `page_of`.**"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from permtriton.checkpoint.read_record import described_sparsity
from permtriton.errors import ConfigError
from permtriton.evaluation import report_sections as sections
from permtriton.evaluation.compare_results import read_comparison
from permtriton.evaluation.report_folders import Compiled, MaskCorner, mask_corners, read_folders
from permtriton.util.extras import require
from permtriton.util.output_files import check_file, real_path, write_file


@dataclass(frozen=True)
class Page:
    """Everything that a report shows; ``lead`` sums it up, and ``warnings`` say which numbers do not compare."""

    title: str
    lead: str
    sections: Sequence[sections.Section]
    warnings: Sequence[str]


def report(
    folders: Sequence[Path],
    output: Path | None,
    *,
    comparison: Path | None = None,
    masks: str | None = None,
    overwrite: bool = False,
) -> Path:
    require("a report", "jinja2")
    if not folders:
        raise ConfigError("no folder: give at least one output of permtriton compile")
    output = output or Path(f"{real_path(folders[0]).name}-report.html")
    check_file(output, overwrite=overwrite, reads=[*folders, *filter(None, [comparison])])
    compared = read_comparison(comparison) if comparison else None
    compiled = read_folders(folders)
    page = html(page_of(compiled, compared, mask_corners(compiled, masks)))
    write_file(output, page.encode("utf-8", "replace"))
    return real_path(output)


def page_of(
    folders: Sequence[Compiled], comparison: Mapping[str, Any] | None, corners: Sequence[MaskCorner] = ()
) -> Page:
    models = list(dict.fromkeys(folder.model for folder in folders))
    patterns = list(dict.fromkeys(described_sparsity(folder.record) for folder in folders))
    count = f", {len(folders)} folders side by side" if len(folders) > 1 else ""
    warnings = []
    if len(models) > 1:
        warnings.append(f"The folders come from different models: {', '.join(models)}. Their numbers do not compare.")
    elif len(sections.measures_of(folders)) > 1:
        warnings.append(
            "The folders were measured on different texts, or in different ways. Their numbers do not compare."
        )
    lead, group = sections.verdict(folders), folders[0].pattern
    if all(folder.pattern == group for folder in folders):
        lead += f" Of every {group.group} consecutive weights of a row, {group.kept} are kept"
        mixed = any("patterns" in folder.record for folder in folders)
        lead += ", but in linears with a pattern of their own." if mixed else "."
    return Page(
        title=f"{', '.join(models)} at {', '.join(patterns)}{count}",
        lead=lead,
        sections=[
            sections.result(folders, comparison),
            sections.search(folders),
            sections.importance(folders),
            *([sections.masks(corners)] if corners else []),
        ],
        warnings=warnings,
    )


def html(page: Page) -> str:
    """Returns the page as HTML that needs no other file. All text is escaped; figures (SVG) are inserted unescaped."""
    from jinja2 import Environment, StrictUndefined

    files = resources.files("permtriton.evaluation")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((files / "report.html.jinja").read_text(encoding="utf-8")).render(
        page=page, css=(files / "report.css").read_text(encoding="utf-8"), version=metadata.version("permtriton")
    )
