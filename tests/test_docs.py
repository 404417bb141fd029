"""The Markdown pages: links lead somewhere, every source file has its line, and the glossary is short."""

import json
import math
import re
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.architectures import table as architectures

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


PROMISING = ("docs/reliability.md", "docs/formats.md", "docs/fine-tuning.md", "docs/evaluation.md", "SECURITY.md")


@pytest.mark.parametrize("page", PROMISING)
def test_every_promise_names_its_tests(page):
    rows = (ROOT / page).read_text(encoding="utf-8").partition("\n| promise | test |\n|---|---|\n")[2].splitlines()
    named = [re.findall(r"`(\w+)`", row.split("|")[2]) for row in rows]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    assert rows
    assert all(named)
    assert [name for names in named for name in names if f"\ndef {name}(" not in sources] == []


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
    words = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = json.loads((ROOT / "benchmarks/results/real-smollm2-cpu.json").read_text())["rows"]

    def mean(name: str, part: str, key: str) -> float:
        return fmean(row[part][key] for row in rows if row["name"] == name)

    ours, theirs = "default", "llm-compressor sparsegpt"
    dense, worse, better = (mean(name, "evaluation", "perplexity") for name in ("dense", theirs, ours))
    assert f"perplexity rises from {dense:.1f} to {worse:.1f} with the SparseGPT of [llm-compressor]" in words
    less = 1 - math.log(better / dense) / math.log(worse / dense)
    assert (
        f"and to {better:.1f} with the default recipe of permtriton: the rise in log perplexity is {less:.0%} smaller"
        in words
    )
    seconds = [mean(name, "pruning", "cpu_seconds") for name in (ours, theirs)]
    peaks = [
        max(row["pruning"]["peak_bytes"] for row in rows if row["name"] == name) / 2**30 for name in (ours, theirs)
    ]
    assert f"{seconds[0]:.0f} CPU seconds against {seconds[1]:.0f}, and {peaks[0]:.1f} GiB of memory" in words
    assert f"GiB of memory against {peaks[1]:.1f}" in words


def test_a_class_is_looked_up():
    assert "100% of the linear weights" in architectures.described("LEDForConditionalGeneration")
    assert "refused" in architectures.described("DbrxForCausalLM")
    assert len((ROOT / "docs" / "architectures.md").read_text(encoding="utf-8").splitlines()) < 80
