"""The committed report in headless Chromium: no errors on the console, and nothing wider than a phone."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EXAMPLE = Path(__file__).parent.parent / "examples" / "report-demo.html"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (Debian: apt-get install chromium)")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
    "--v=0", "--hide-scrollbars", "--virtual-time-budget=3000", "--dump-dom",
)  # fmt: skip
MEASURE = """<script>
const root = document.documentElement, paper = getComputedStyle(root).getPropertyValue("--paper");
const figures = document.querySelectorAll("svg").length;
parent.postMessage([innerWidth, root.scrollWidth, figures, paper, root.scrollHeight].join(" "), "*");
</script>"""
# A window has a smallest width, a frame has none.
FRAME = """<!DOCTYPE html><meta name="color-scheme" content="light dark"><title>waiting</title>
<script>addEventListener("message", event => { document.title = "measured " + event.data; });</script>
<iframe src="measured.html" width="WIDTH" height="900" style="border: 0"></iframe>"""


def opened(page: Path, place: Path, *, dark: bool = False) -> tuple[str, list[str]]:
    """Loads a page and returns its document and what the console said."""
    assert CHROMIUM is not None
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [CHROMIUM, *OPTIONS, scheme, f"--user-data-dir={place / 'profile'}", "--window-size=1400,900"]
    result = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout, [line for line in result.stderr.splitlines() if ":CONSOLE" in line]


def measured(page: Path, place: Path, width: int, *, dark: bool = False) -> list[str]:
    """Returns, by an added script: widths of a frame and its page, number of figures, colour of the paper, height."""
    copy = place / "measured.html"
    copy.write_text(page.read_text(encoding="utf-8") + MEASURE, encoding="utf-8")
    frame = place / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    document, messages = opened(frame, place, dark=dark)
    assert messages == []
    found = re.search(r"<title>measured ([^<]*)</title>", document)
    assert found, document[:500]
    return found[1].split()


def test_it_loads_without_errors(tmp_path):
    document, messages = opened(EXAMPLE, tmp_path)
    assert messages == []
    assert document.count("<section") == document.count("</section>") == 4


def test_nothing_is_wider_than_the_window(tmp_path):
    window, document, figures, _, height = measured(EXAMPLE, tmp_path, 390)
    assert (int(window), int(document)) == (390, 390)
    assert int(figures) == 9  # six of them are masks
    assert int(height) <= 10_000


@pytest.mark.slow
def test_dark_and_light_differ(tmp_path):
    papers = {measured(EXAMPLE, tmp_path, 390, dark=dark)[3] for dark in (False, True)}
    assert papers == {"#fbfbf9", "#14171a"}
