"""The report as one HTML page: what it consists of, and its text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata, resources


@dataclass(frozen=True)
class Picture:
    """A figure with its words.

    Attributes:
        svg: the figure.
        alt: what it shows, for those who cannot see it.
        caption: what it shows and how to read it.
        legend: colour and name of each series; empty where they are labelled.
    """

    svg: str
    alt: str
    caption: str
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Table:
    """A table. Cells of a row that are all the same, but for the first one, are shown once.

    Attributes:
        caption: what it shows.
        head: names of its columns.
        rows: cells of each row; the first one names the row.
        colours: colour of each row; empty for none.
        folded: whether the reader has to open it.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    colours: Sequence[str] = ()
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A section with its heading; what is empty is left out.

    Attributes:
        id: anchor.
        title: heading.
        text: what the section is about.
        pictures: figures, side by side where there is room.
        tables: tables, side by side where there is room.
        code: blocks of code.
    """

    id: str
    title: str
    text: str
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    code: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """Everything that a report shows.

    Attributes:
        title: name of the model and its pattern.
        lead: the summary in a sentence.
        sections: all sections.
        warnings: what limits the report.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    warnings: Sequence[str] = field(default=())


def numbers(values: Sequence[float | None], digits: int = 3) -> list[str]:
    """Returns the cells of a column: the same decimals for all, so that the smallest number has ``digits`` digits."""
    smallest = min((abs(value) for value in values if value), default=1.0)
    decimals = min(max(digits - 1 - math.floor(math.log10(smallest)), 0), 6)
    return ["–" if value is None else f"{value:,.{decimals}f}" for value in values]


def html(page: Page) -> str:
    """Returns a page that needs no other file. All text is escaped; figures are taken as they are."""
    from jinja2 import Environment, StrictUndefined

    files = resources.files("permtriton.reporting")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((files / "page.html.jinja").read_text(encoding="utf-8")).render(
        page=page, css=(files / "page.css").read_text(encoding="utf-8"), version=metadata.version("permtriton")
    )
