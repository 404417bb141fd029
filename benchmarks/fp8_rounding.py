"""Measures what FP8 costs a compiled folder: weights alone, activations too, and three ways to round the weights.

python -m benchmarks.fp8_rounding FOLDER --calibration TEXT --eval-data TEXT --work WORK --output RESULT.json

The step ``round`` runs on the portable folder without its record, after ``mask``, which finds the zeros where they are.
A row that is in RESULT.json already is not measured again.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import permtriton
from permtriton.checkpoint.folder import Folder
from permtriton.model.headers import REPORT_FILE, WEIGHTS_FILE
from permtriton.util.machine import device_name, versions

SAMPLES, LENGTH, WINDOW = 32, 512, 1024  # as in benchmarks/real
ALONE = "each weight alone"
SWEEPS = {"scale of each row chosen": 0, "errors made up for": 4}  # way to round -> option of the step


def perplexity(folder: Path, arguments: argparse.Namespace, dtype: str = "float32") -> float:
    found = permtriton.evaluate(
        folder, str(arguments.eval_data), dtype=dtype, window=WINDOW, eval_windows=arguments.windows
    )
    assert found.perplexity is not None
    return found.perplexity


def rounded(way: str, seed: int, plain: Path, made: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes a folder whose weights are rounded in a way to ``made``; returns what the step reported."""
    data = {"calibration": str(arguments.calibration), "samples": SAMPLES, "sequence_length": LENGTH, "seed": seed}
    options = {"importance": "magnitude", "round_sweeps": SWEEPS[way], **data}
    report = permtriton.compile(plain, recipe="mask,round", output=made, overwrite=True, **options).report
    parts = report["steps"][-1]["parts"]
    errors = {f"error_at_{when}": sum(part[when] for part in parts) / len(parts) for when in ("start", "end")}
    return {**errors, "seconds": report["seconds"]["round"]}


def row(way: str, seed: int | None, plain: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the perplexities of a way to round the weights, with activations as they are and in FP8."""
    made = arguments.work / f"{way}-{seed}".replace(" ", "-")
    packed, found = made.with_name(f"{made.name}-packed-fp8"), {}
    if seed is not None:
        found = rounded(way, seed, plain, made, arguments)
    size = permtriton.export(arguments.folder if seed is None else made, packed, format="packed-fp8", overwrite=True)
    found |= {key: size[key] for key in ("ratio", "rounded", "further_zeros")}
    found["both"] = perplexity(packed, arguments)
    if arguments.weights:
        if seed is None:
            shutil.copytree(plain, made, dirs_exist_ok=True)
            stored = Folder.open(packed)
            save_file({name: stored.tensor(name) for name in stored.names()}, made / WEIGHTS_FILE, {"format": "pt"})
        found["weights"] = perplexity(made, arguments)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--calibration", type=Path, required=True, help="text that the step reads")
    parser.add_argument("--eval-data", type=Path, required=True, help="text to measure the perplexity on")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=[*SWEEPS], choices=[*SWEEPS], help="ways to round")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--weights", action="store_true", help="measure FP8 weights with other activations, too")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    plain = arguments.work / "plain"
    shutil.copytree(arguments.folder, plain, ignore=shutil.ignore_patterns(REPORT_FILE), dirs_exist_ok=True)
    rows = json.loads(arguments.output.read_text())["rows"] if arguments.output.exists() else []
    todo: list[tuple[str, int | None]] = [("float32", None), ("bfloat16", None), (ALONE, None)]
    todo += [(way, seed) for seed in arguments.seeds for way in arguments.ways]
    for way, seed in todo:
        if any((each["way"], each["seed"]) == (way, seed) for each in rows):
            continue
        if hasattr(torch, way):
            found = {"perplexity": perplexity(arguments.folder, arguments, way)}
        else:
            found = row(way, seed, plain, arguments)
        rows.append({"way": way, "seed": seed, "windows": arguments.windows, "window": WINDOW, **found})
        print(rows[-1], flush=True)
        report = {
            "command": f"python -m benchmarks.fp8_rounding {' '.join(sys.argv[1:])}",
            "device": device_name(torch.device("cpu")),
            "versions": versions(),
            "rows": rows,
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
