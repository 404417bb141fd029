"""The demo's report, ``examples/report-demo.html``, from the committed records of its compilations.

A report needs the record of a folder and the headers of its weights, so the folders are made again without the weights.
The masks are those of the paper's six methods: ``python -m benchmarks.report_demo`` makes their file anew, in minutes.
"""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import permtriton
from permtriton import demo
from permtriton.evaluation.compare_methods import settings_of
from permtriton.evaluation.compare_results import read_comparison
from permtriton.evaluation.report import html, page_of
from permtriton.evaluation.report_folders import MaskCorner, read_folders
from permtriton.model.headers import CONFIG_FILE, REPORT_FILE, WEIGHTS_FILE

METHODS = ("sparsegpt", "fast", "default")
RESULTS = Path(__file__).parent / "results"
MASKS = Path("report-demo", "masks.json")
LINEAR, SIZE = "model.layers.0.mlp.down_proj", 128
MASKED = {  # name in the paper -> method
    f"{name}{suffix}": f"{name.lower()}{method}"
    for name in ("Wanda", "RIA")
    for suffix, method in (("", ""), (" + CP", " + heuristic (fused)"), (" + PermLLM", " + permllm"))
}


def page(results: Path) -> str:
    """Returns the report of the compilations whose ``permtriton.json`` is in ``results/report-demo``."""
    with TemporaryDirectory() as place:
        folders = [_folder(Path(place) / f"demo-{name}", results / "report-demo" / f"{name}.json") for name in METHODS]
        comparison = read_comparison(results / "compare-demo-tuned.json")
        # No command runs the step tune any more.
        comparison["rows"] = [row for row in comparison["rows"] if "tune" not in row["method"]]
        return html(page_of(read_folders(folders), comparison, mask_corners(results)))


def mask_corners(results: Path) -> list[MaskCorner]:
    """Returns the committed masks, which `write_masks` wrote."""
    report = json.loads((results / MASKS).read_text(encoding="utf-8"))
    return [MaskCorner(name, report["linear"], _unpacked(bits)) for name, bits in report["corners"].items()]


def write_masks(results: Path) -> None:
    """Prunes the demo by each method of the paper, and writes the corner of one mask of each."""
    options = {"samples": 16, "seed": 0}
    report: dict[str, Any] = {"command": "python -m benchmarks.report_demo", "linear": LINEAR, "options": options}
    corners = {}
    for name, method in MASKED.items():
        settings = {key: settings_of(method)[key] for key in ("importance", "recipe", "layout")}
        epochs = {"learn_epochs": 4} if "permllm" in method else {}
        compiled = permtriton.compile("demo", eval_data="none", **options, **epochs, **settings)
        report |= {key: compiled.report[key] for key in ("versions", "device")}
        corners[name] = _packed(compiled.mask(LINEAR)[:SIZE, :SIZE])
    text = json.dumps({**report, "learn_epochs": 4, "corners": corners}, indent=1)
    (results / MASKS).write_text(text + "\n", encoding="utf-8")


def _packed(kept: Tensor) -> list[str]:
    """Returns the rows of a mask as hexadecimal numbers, the first column in the highest bit."""
    return [f"{int(''.join(str(int(each)) for each in row), 2):0{SIZE // 4}x}" for row in kept.tolist()]


def _unpacked(rows: list[str]) -> Tensor:
    return torch.tensor([[digit == "1" for digit in f"{int(row, 16):0{SIZE}b}"] for row in rows])


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


if __name__ == "__main__":
    write_masks(RESULTS)
