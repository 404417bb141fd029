"""How far the same compilation differs between processors' instructions, threads, ranks and micro-batches.

    python -m benchmarks.variation [MODEL --eval-data TEXT --calibration TEXT ...] --output FILE

The texts of the committed results: WikiText-2's validation split, and the first 60,000 bytes of its test split.

Every setting compiles MODEL (the demo by default) anew, with the other options, which are those of compile. Compared
with the first setting: the share of the pruned linears' weights whose mask differs, the norm of the difference of all
weights relative to their norm, and on held-out text the KL from the first model, nats per token, and the perplexity.
All are evaluated in the first setting, so that only the weights differ.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.real.__main__ import processor
from permtriton.util.durable import replace_file
from permtriton.util.machine import versions

BASE = {"OMP_NUM_THREADS": "1"}
# name -> what differs from the first: environment, options, processes
SETTINGS: dict[str, tuple[dict[str, str], list[str], int]] = {
    "one process, one thread": ({}, [], 1),
    "the same again": ({}, [], 1),
    "two ranks": ({}, [], 2),
    "micro-batches of 1": ({}, ["--micro-batch-size", "1"], 1),
    "two threads": ({"OMP_NUM_THREADS": "2"}, [], 1),
    "AVX2": ({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, [], 1),
    "no vector instructions": ({"ATEN_CPU_CAPABILITY": "default"}, [], 1),
    "MKL as on any processor": ({"MKL_CBWR": "COMPATIBLE"}, [], 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--settings", help="some of them, separated by commas; all by default")
    parser.add_argument("--eval-data", default="demo", help="held-out text, as evaluate takes it")
    parser.add_argument("--window", default="256", help="tokens of a window of it")
    parser.add_argument("--output", type=Path, required=True)
    args, options = parser.parse_known_args()
    names = args.settings.split(",") if args.settings else list(SETTINGS)
    recipe = f", {options[options.index('--recipe') + 1]}" if "--recipe" in options else ""
    words = shlex.join(Path(word).name if os.sep in word else word for word in sys.argv[1:])
    report: dict[str, Any] = {
        "title": Path(args.model).name + recipe,
        "command": "python -m benchmarks.variation " + re.sub(r" --output[= ]\S+", "", words),
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "versions": versions(),
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as work:
        first = Path(work, "0")
        for number, name in enumerate([next(iter(SETTINGS)), *(each for each in names if each in list(SETTINGS)[1:])]):
            folder = Path(work, str(number))
            compiled(args.model, options, folder, *SETTINGS[name])
            (folder / "permtriton.json").unlink()  # evaluate would refuse the first as what others are compared with
            measured = evaluated(folder, first, ["--eval-data", args.eval_data, "--window", args.window])
            report["rows"].append({"setting": name, **compared(first, folder), **measured})
            print(json.dumps(report["rows"][-1]), flush=True)
            replace_file(args.output, lambda temporary: temporary.write_text(json.dumps(report, indent=1) + "\n"))


def compiled(
    model: str, options: list[str], folder: Path, environment: dict[str, str], further: list[str], ranks: int
) -> None:
    start = [sys.executable, "-m", "permtriton"]
    if ranks > 1:
        start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "-m", "permtriton"]
    here = ["--device", "cpu", "--eval-data", "none", "--output", str(folder)]
    printed_by([*start, "compile", model, *options, *further, *here], environment)


def printed_by(words: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(words, env={**os.environ, **BASE, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def compared(first: Path, other: Path) -> dict[str, Any]:
    """Returns how two compiled folders differ: the share of the masks, and the relative norm of all weights."""
    changed = pruned = norm = difference = 0.0
    for file in sorted(first.glob("*.safetensors")):
        other_tensors = load_file(other / file.name)
        for name, tensor in load_file(file).items():
            one, two = tensor.double(), other_tensors[name].double()
            norm, difference = norm + float(one.square().sum()), difference + float((one - two).square().sum())
            if tensor.ndim == 2 and int((tensor == 0).sum()) * 2 >= tensor.numel():
                changed, pruned = changed + int(((one != 0) != (two != 0)).sum()), pruned + tensor.numel()
    return {"masks": changed / pruned, "weights": (difference / norm) ** 0.5}


def evaluated(folder: Path, first: Path, options: list[str]) -> dict[str, float]:
    """Returns the perplexity of a compiled folder, and its KL from another one, in nats per token."""
    words = [sys.executable, "-m", "permtriton", "evaluate", str(folder), "--against", str(first), *options, "--json"]
    report = json.loads(printed_by(words, {}))
    return {name: report[name] for name in ("kl", "perplexity")}


if __name__ == "__main__":
    main()
