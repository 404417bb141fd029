"""The Markdown pages: links lead somewhere, every source file has its line, and the glossary is short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(page for page in ROOT.rglob("*.md") if not str(page.relative_to(ROOT)).startswith("."))
NAMED = {"permtriton": ROOT / "permtriton", "passes": ROOT / "passes"}  # folders whose README names every file


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            linked = page.parent / name if name else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("folder", NAMED.values(), ids=NAMED)
def test_every_file_has_its_line(folder):
    lines = [line for line in (folder / "README.md").read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    named = {Path(name).name for line in lines for name in re.findall(r"`([\w/]+\.py)`", line.split("|")[1])}
    files = {path.name for path in folder.rglob("*.py") if path.name != "__init__.py"}
    passes = {f"{name}.py" for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert files - named - passes == set()
    assert {name for name in named if name not in files} <= {"main.py", "options.py"}  # of cli/


def test_the_glossary_is_short_and_names_each_word_once():
    glossary = (ROOT / "permtriton" / "README.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    words = re.findall(r"^\| ([\w ]+) \|", glossary, re.MULTILINE)[1:]
    assert 20 < len(words) <= 30
    assert len(set(words)) == len(words)


def test_every_environment_variable_is_on_the_page():
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    sources = [path for folder in ("permtriton", "cli", "kernels", "passes") for path in (ROOT / folder).rglob("*.py")]
    used = {
        name
        for path in sources
        for name in re.findall(
            r"""(?:environ[\w.]*[(\[]|ASYNC_LOAD = |environ", \{)["']([A-Z_]+)["']""", path.read_text()
        )
        + re.findall(r"""["']([A-Z_]+)["'] in os.environ""", path.read_text())
    }
    assert len(used) > 10
    assert used - set(re.findall(r"`([A-Z_]+)`", page)) == set()
