"""The demo's report, ``examples/report-demo.html``, from the committed records of its compilations.

A report needs the record of a folder and the headers of its weights, so the folders are made again without the weights.
"""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from permtriton import demo
from permtriton.comparison.record import read_comparison
from permtriton.model.headers import CONFIG_FILE, REPORT_FILE, WEIGHTS_FILE
from permtriton.reporting.compiled import read_folders
from permtriton.reporting.html_report import page_of
from permtriton.reporting.pages import html

METHODS = ("sparsegpt", "fast", "default")


def page(results: Path) -> str:
    """Returns the report of the compilations whose ``permtriton.json`` is in ``results/report-demo``."""
    with TemporaryDirectory() as place:
        folders = [_folder(Path(place) / f"demo-{name}", results / "report-demo" / f"{name}.json") for name in METHODS]
        return html(page_of(read_folders(folders), read_comparison(results / "compare-demo-tuned.json")))


def _folder(folder: Path, record: Path) -> Path:
    folder.mkdir()
    shutil.copy(record, folder / REPORT_FILE)
    shutil.copy(demo.FOLDER / CONFIG_FILE, folder)
    stored = (demo.FOLDER / WEIGHTS_FILE).read_bytes()
    header = json.loads(stored[8 : 8 + int.from_bytes(stored[:8], "little")])
    for entry in header.values():
        if "dtype" in entry:  # the demo is stored in 16 bits, and compiled in 32
            entry.update(dtype="F32", data_offsets=[2 * offset for offset in entry["data_offsets"]])
    text = json.dumps(header).encode()
    end = max(entry["data_offsets"][1] for entry in header.values() if "dtype" in entry)
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # a hole: nothing reads the weights
    return folder
