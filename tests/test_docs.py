"""The Markdown pages: links lead somewhere, every source file has its line, and the glossary is short."""

import json
import math
import re
from pathlib import Path

import pytest

import permtriton
from benchmarks.architectures import table as architectures
from permtriton.cli.main import COMMANDS, command_named
from permtriton.driver.pipeline import compile_model
from permtriton.model.headers import REPORT_FILE

from . import zoo

ROOT = Path(__file__).parent.parent
PAGES = sorted(page for page in ROOT.rglob("*.md") if not str(page.relative_to(ROOT)).startswith("."))


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


def first_column(page: Path) -> str:
    lines = page.read_text(encoding="utf-8").splitlines()
    return "\n".join(line.split("|")[1] for line in lines if line.startswith("| "))


def test_every_package_has_its_line():
    """The files are described by their first lines."""
    library = ROOT / "permtriton"
    named = {name.rstrip("/") for name in re.findall(r"`([\w/.]+)`", first_column(library / "README.md"))}
    held = {str(path.parent.relative_to(library)) for path in library.rglob("*.py")} - {"."}
    held |= {path.name for path in library.glob("*.py")} - {"__init__.py", "__main__.py"}
    above = {name.split("/")[0] for name in named if "/" in name}
    assert named - above - {"cli", "kernels", "passes"} == held - above - {"cli", "kernels", "passes"}
    for path in (path for folder in (library, ROOT / "passes") for path in folder.rglob("*.py")):
        assert path.name == "__init__.py" or path.read_text(encoding="utf-8").startswith('"""'), path


@pytest.mark.slow
def test_every_entry_of_a_record_is_on_the_page(tmp_path):
    """And of the quantization config; what no folder may hold is on neither table."""
    config = permtriton.config_from({"importance": "magnitude", "layout": "fused"}, "heuristic,mask")
    compile_model(zoo.build("llama"), None, config, ids=zoo.token_ids(4, 16)).save_pretrained(tmp_path / "out")
    permtriton.export(tmp_path / "out", tmp_path / "packed")
    page = (ROOT / "docs/formats.md").read_text(encoding="utf-8")

    def named(section: str) -> set[str]:
        rows = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0].split("\n| ")
        return {name for row in rows[2:] for name in re.findall(r"`(\w+)`", row.partition("|")[0])}

    record = json.loads((tmp_path / "packed" / REPORT_FILE).read_text())
    assert named("`permtriton.json`") > record.keys()
    stored = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert named("`quantization_config` in `config.json`") == stored.keys()


def test_every_environment_variable_is_on_the_page():
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
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


def test_what_the_pages_say_of_classes_is_what_was_found():
    _, records = architectures.load()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = re.sub(r"<!-- table.*?<!-- end -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for sentence in re.split(r"(?<=[.:;])\s", text):
            if not (bad := re.search("cannot be traced|fails a check", sentence)) and " work." not in sentence:
                continue
            for name in re.findall(r"\b[A-Z][\w-]*(?: \d\b)?", sentence):
                stem = re.sub(r"\W", "", name).lower()
                of_name = [r for r in records if "unbuilt" not in r and re.match(rf"{stem}for", r["class"].lower())]
                if of_name:
                    assert any(map(architectures.problem, of_name)) == bool(bad), f"{page.name}: {name} in {sentence!r}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks/results").glob("*-smollm2*.json")), ids=lambda path: path.name
)
def test_no_row_of_the_real_model_counts_twice(path):
    rows = json.loads(path.read_text()).get("rows", [])
    found = [tuple(row.get(key) for key in ("name", "method", "variant", "setting", "seed")) for row in rows]
    assert len(found) == len(set(found))


def test_the_first_screen_says_what_was_measured():
    """The numbers are written by lint's check; here is that the words around them are true of them."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    said = page.partition("<!-- table real-words -->")[2].partition("<!-- end -->")[0]
    dense, theirs, ours = map(float, re.findall(r"(?:perplexity of|has|and) (\d+\.\d)", said)[:3])
    assert dense < ours < theirs
    assert f"{1 - math.log(ours / dense) / math.log(theirs / dense):.0%} smaller" in said
    assert page.index("make demo") < page.index("<picture>") < page.index("```python") < page.index("## Limits")
    assert "make test" in page[: page.index("<picture>")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_lost_has_one_unit(page):
    """The rise in log perplexity as a share of SparseGPT's."""
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"\| gap \||\bGap: |the gap that", text)


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "examples").glob("*.py"))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands_have_the_flags_that_they_name(page):
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for line in re.findall(r"permtriton (\w+) ((?:.|\\\n)*?)(?=[#\n]|$)", "\n".join(blocks)):
        name, words = line
        if name not in COMMANDS:
            continue
        known = {flag for each in command_named(name).params for flag in (*each.opts, *each.secondary_opts)}
        assert set(re.findall(r"(?<!\S)--[\w-]+", words)) <= known | {"--help"}, line
