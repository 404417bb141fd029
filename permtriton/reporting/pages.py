"""The report as one HTML page: what it consists of, and how it is written."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata, resources
from pathlib import Path

from permtriton.output_files import check_file, write_file


@dataclass(frozen=True)
class Picture:
    """A figure with its words.

    Attributes:
        svg: the figure.
        alt: what it shows, for those who cannot see it.
        caption: what it shows and how to read it.
    """

    svg: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Part:
    """A piece of a section; what is empty is left out.

    Attributes:
        title: heading.
        text: a sentence or two.
        pictures: figures, side by side where there is room.
        caption: what the table shows.
        head: names of its columns.
        rows: cells of each row; the first one names the row.
        code: blocks of code.
    """

    title: str = ""
    text: str = ""
    pictures: Sequence[Picture] = ()
    caption: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    code: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """A section with its heading.

    Attributes:
        id: anchor.
        title: heading.
        text: what the section is about.
        parts: what follows.
    """

    id: str
    title: str
    text: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Card:
    """One number of the summary.

    Attributes:
        label: what it belongs to.
        value: the number.
        text: what it means.
    """

    label: str
    value: str
    text: str


@dataclass(frozen=True)
class Page:
    """Everything that a report shows.

    Attributes:
        title: name of the model and its pattern.
        lead: the summary in a sentence.
        cards: numbers of the summary.
        sections: all sections.
        warnings: what limits the report.
    """

    title: str
    lead: str
    cards: Sequence[Card]
    sections: Sequence[Section]
    warnings: Sequence[str] = field(default=())


def html(page: Page) -> str:
    """Returns a page that needs no other file. All text is escaped; figures are taken as they are."""
    from jinja2 import Environment, StrictUndefined

    files = resources.files("permtriton.reporting")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string((files / "page.html.jinja").read_text(encoding="utf-8")).render(
        page=page, css=(files / "page.css").read_text(encoding="utf-8"), version=metadata.version("permtriton")
    )


def write(page: Page, output: Path, *, overwrite: bool) -> Path:
    """Writes a page as `permtriton.output_files.write_file` does.

    Returns:
        The absolute path of the file.

    Raises:
        OutputError: the file exists and may not be replaced, or cannot be written.
    """
    check_file(output, overwrite=overwrite)
    write_file(output, html(page).encode("utf-8", "replace"))
    return output.resolve()
