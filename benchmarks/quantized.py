"""Measures what quantizing a compiled folder costs, and checks in every group that its zeros stayed.

python -m benchmarks.quantized FOLDER FP8=FOLDER-fp8 --dense DENSE --text TEXT --output RESULT.json

Needs the package compressed-tensors beside permtriton.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import permtriton
from permtriton.util.machine import device_name, versions

WEIGHT, PATTERN = "_proj.weight", (2, 4)
WINDOW = 1024  # tokens, as in benchmarks/real


def zeros(folder: Path, quantized: Path) -> dict[str, int]:
    """Returns how many zeros of ``folder`` stayed, how many were added, and how many groups keep too many weights."""
    kept, group = PATTERN
    counts = {"linears": 0, "zeros": 0, "lost_zeros": 0, "further_zeros": 0, "groups_above_pattern": 0}
    with safe_open(folder / "model.safetensors", "pt") as old, safe_open(quantized / "model.safetensors", "pt") as new:
        for name in (name for name in old.keys() if name.endswith(WEIGHT)):  # noqa: SIM118, safe_open is no mapping
            before, after = old.get_tensor(name) == 0, new.get_tensor(name).float() == 0
            counts["linears"] += 1
            counts["zeros"] += int(before.sum())
            counts["lost_zeros"] += int((before & ~after).sum())
            counts["further_zeros"] += int((after & ~before).sum())
            counts["groups_above_pattern"] += int(((~after).unflatten(1, (-1, group)).sum(-1) > kept).sum())
    return counts


def row(name: str, model: Path, text: Path, dtype: str) -> dict[str, Any]:
    """Returns the perplexity of a model, and the size of a folder's weights in bytes."""
    found = permtriton.evaluate(str(model), str(text), dtype=dtype, window=WINDOW)
    size = {"bytes": sum(path.stat().st_size for path in model.glob("*.safetensors"))} if model.is_dir() else {}
    return {"name": name, **size, "perplexity": found.perplexity, "windows": found.windows, "window": found.window}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("quantized", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--dense", type=Path, required=True, help="the model that the folder was compiled from")
    parser.add_argument("--text", type=Path, required=True, help="text to measure the perplexity on")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    folders = (("dense", arguments.dense), (arguments.folder.name, arguments.folder))
    rows = [row(name, path, arguments.text, "bfloat16") for name, path in folders]
    for name, _, path in (each.partition("=") for each in arguments.quantized):
        measured = row(name, Path(path), arguments.text, "auto")
        rows.append({**measured, **zeros(arguments.folder, Path(path))})
        print(rows[-1])
    report = {
        "command": f"python -m benchmarks.quantized {' '.join(sys.argv[1:])}",
        "device": device_name(torch.device("cpu")),
        "versions": versions(),
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
