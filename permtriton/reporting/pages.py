"""The report as one HTML page: what it consists of, and how it is written."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata, resources
from pathlib import Path

from permtriton.durable import replace_file
from permtriton.errors import OutputError


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
    """Writes a page as `permtriton.durable.replace_file` does: an earlier file stays until the new one is whole.

    Returns:
        The absolute path of the file.

    Raises:
        OutputError: the file exists and may not be replaced, or cannot be written.
    """
    check_file(output, overwrite=overwrite)
    text = html(page).encode("utf-8", "replace")
    try:
        replace_file(output, lambda temporary: temporary.write_bytes(text))
    except OSError as error:
        raise OutputError(f"output {output} cannot be written: {error.strerror or error}") from error
    return output.resolve()


def check_file(output: Path, *, overwrite: bool) -> None:
    """Refuses, before any work, an output file that could not be written at the end.

    Raises:
        OutputError: it exists and ``overwrite`` is off, or is no file, or its folder does not exist.
    """
    if output.is_dir():
        raise OutputError(f"output {output} is a folder: give the name of an .html file")
    if output.exists() and not overwrite:
        raise OutputError(f"output {output} exists: choose another file, or replace it with --overwrite")
    if not output.resolve().parent.is_dir():
        raise OutputError(f"output {output}: the folder {output.resolve().parent} does not exist; make it first")
