"""Prunes a model on a GPU by our recipes, and measures each there, as ``python -m benchmarks.real`` does on a CPU.

    python -m benchmarks.real.gpu --model MODEL --ids IDS --held-out TEST.safetensors --output FILE.json

MODEL is a folder, or a GGUF file, of which a folder in float32 is made once, beside FILE. IDS is what the rows are
calibrated on: a text (.txt, or .jsonl of ids), of which --samples sequences of --length tokens are drawn as on a CPU,
and further ones for the steps that read such; or a .safetensors file, whose ``input_ids`` ``[samples, tokens]`` are
all taken, and nothing else. All windows of TEST are evaluated, and the first --kl-windows of them against the dense
model.

Every command is a process of its own, and a row is written as soon as it is pruned, and again when it is measured. One
that fails or is cut off after --seconds is listed with its error; the same command then goes on with what is missing,
and keeps the errors of earlier tries. A file may hold rows of several IDS, if the rest of its inputs is the same.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.gpu.bench import commit, hardware
from benchmarks.gpu.checks import process
from benchmarks.real.__main__ import COST, given, last_line, names, write
from benchmarks.real.inputs import dequantized
from benchmarks.real.rows import DENSE, OURS, Job, command
from permtriton.checkpoint.folder import file_sha256
from permtriton.kernels.launch import triton
from permtriton.util.machine import versions

ROWS = (DENSE, *OURS)
PLACES = ("model", "ids", "held_out", "rows", "work", "output", "seconds", "commit")  # that `_command` names itself


class RowError(Exception):
    """A command of a row failed or was cut off; its message says which."""


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    for name in ("model", "ids", "held_out", "output"):
        setattr(args, name, getattr(args, name).resolve())
    work = (args.work or args.output.with_suffix("")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    model = dequantized(args.model, work / "model") if args.model.is_file() else args.model
    samples, length = _shape(args.ids) if args.ids.suffix == ".safetensors" else (args.samples, args.length)
    job = Job(model, args.ids, args.ids, samples, length, args.seed, Path())
    inputs = _inputs(args, model)
    report = json.loads(args.output.read_text()) if args.output.is_file() else {"rows": []}
    if report["rows"] and report["inputs"] != inputs:
        sys.exit(f"{args.output} holds rows of other inputs ({report['inputs']}): give another --output, or remove it")
    rows = {_key(row): row for row in report["rows"]}
    for name in args.rows:
        row = {**_asked(name, job), "command": _command(parser, args, name), **_machine(args)}
        kept = rows.get(_key(row), {})
        if "evaluation" in kept:
            print(f"{name}: measured before", flush=True)
            continue
        for each in measured(row, kept, job, args, work):
            rows[_key(row)] = each
            write(args.output, {"inputs": inputs, "rows": list(rows.values())})
        print(json.dumps(rows[_key(row)]), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder or GGUF file of the dense model")
    parser.add_argument("--ids", type=Path, required=True, help="calibration: a text, or ids in a .safetensors file")
    parser.add_argument("--held-out", type=Path, required=True, help="ids of the held-out windows, a .safetensors file")
    parser.add_argument(
        "--rows", type=names(ROWS), default=[DENSE, "sparsegpt", "fast", "default", "best"],
        help="some of the rows, separated by commas",
    )  # fmt: skip
    parser.add_argument("--samples", type=int, default=32, help="calibration sequences of a text")
    parser.add_argument("--length", type=int, default=512, help="tokens of a calibration sequence of a text")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--kl-windows", type=int, default=8, help="windows on which the KL to the dense model is taken")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--seconds", type=float, default=600, help="that a row may take")
    parser.add_argument("--work", type=Path, help="folder for models; by default that of the output's name")
    parser.add_argument("--commit", help="of this checkout, where neither git nor the file COMMIT is there to ask")
    parser.add_argument("--output", type=Path, required=True, help="the result file; what is there is added to")
    return parser


def measured(
    row: Mapping[str, Any], kept: Mapping[str, Any], job: Job, args: argparse.Namespace, work: Path
) -> Iterator[dict[str, Any]]:
    """Yields a row once it is pruned, and again once it is measured; or with its error.

    Args:
        row: what is known before.
        kept: what an earlier try left of it; empty without one.
    """
    until, row = time.monotonic() + args.seconds, dict(row)
    if tries := [*kept.get("earlier_errors", ()), *([kept["error"]] if "error" in kept else ())]:
        row["earlier_errors"] = tries
    folder = work / f"{row['name']}-{row.get('calibration', '')}-seed{job.seed}".replace(" ", "-")
    try:
        if row["name"] == DENSE:
            folder = job.model
        elif "pruning" in kept and folder.is_dir():
            row["pruning"] = kept["pruning"]
        else:
            row["pruning"] = pruned(row["name"], job, folder, args.device, until)
            yield row
        row["evaluation"] = evaluated(folder, job.model, args, until)
    except RowError as error:
        row["error"] = str(error)
    yield row


def pruned(name: str, job: Job, folder: Path, device: str, until: float) -> dict[str, Any]:
    """Prunes the model; returns what the whole command took, and what its record says of its stages and its memory.

    Raises:
        RowError: it failed or was cut off.
    """
    cost, _ = run([*command(name, job, folder), "--device", device], until)
    record = json.loads((folder / "permtriton.json").read_text())
    return {
        **cost,
        "peak_device_bytes": record["memory"]["peak"],
        "stages": record["seconds"],
        "calibration": record["calibration"],
        "generated": record.get("generated"),
        **{part: record[part] for part in ("device", "dtype", "determinism", "versions")},
    }


def evaluated(folder: Path, model: Path, args: argparse.Namespace, until: float) -> dict[str, Any]:
    """Measures a folder on the held-out windows; returns what was found, and the cost.

    Raises:
        RowError: it failed or was cut off.
    """
    windows, _ = _shape(args.held_out)
    words = ["-m", "benchmarks.real.evaluate", folder, model, args.held_out, windows, args.kl_windows, args.device]
    cost, printed = run([sys.executable, *words], until)
    return {**json.loads(printed.splitlines()[-1]), **cost}


def run(words: Sequence[object], until: float) -> tuple[dict[str, float], str]:
    """Runs a command until a time of `time.monotonic`; returns its seconds, CPU seconds, host peak and what it printed.

    Raises:
        RowError: it failed or was cut off.
    """
    left = max(until - time.monotonic(), 1)
    ran = process([sys.executable, "-S", str(COST), *map(str, words)], left, HF_HUB_OFFLINE="1")
    if ran.code != 0:
        print(ran.output[-4000:], flush=True)
    if ran.code is None:
        raise RowError(f"cut off after {ran.seconds:.0f} s")
    printed, _, cost = ran.output.rstrip("\n").rpartition("\n")
    if ran.code:
        raise RowError(f"exit code {ran.code}: {last_line(printed or cost)}")
    return json.loads(cost), printed


def _inputs(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Returns what all rows of a file share."""
    config = json.loads((model / "config.json").read_text())
    return {
        "model": args.model.name,
        "model_sha256": {file.name: file_sha256(file) for file in sorted(model.glob("*.safetensors"))},
        "dtype": config.get("dtype") or config["torch_dtype"],
        "held_out_sha256": file_sha256(args.held_out),
        "windows": list(_shape(args.held_out)),
        "kl_windows": args.kl_windows,
    }


def _asked(name: str, job: Job) -> dict[str, Any]:
    if name == DENSE:
        return {"name": name}
    calibration = f"{job.text.stem} {job.samples}x{job.length}"
    return {"name": name, "method": OURS[name], "calibration": calibration, "seed": job.seed}


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["name"], row.get("calibration"), row.get("seed")


def _command(parser: argparse.ArgumentParser, args: argparse.Namespace, name: str) -> str:
    files = {"--model": args.model.name, "--ids": args.ids.name, "--held-out": args.held_out.name}
    words = [word for flag in files.items() for word in flag]
    return shlex.join(["python", "-m", "benchmarks.real.gpu", *words, "--rows", name, *given(parser, args, PLACES)])


def _machine(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(torch.device(args.device)),
        "versions": {**versions(), "triton": getattr(triton, "__version__", None), "cuda": torch.version.cuda},
        "commit": args.commit or commit(),
    }  # fmt: skip


def _shape(file: Path) -> tuple[int, int]:
    with safe_open(file, "pt") as stored:
        rows, tokens = stored.get_slice("input_ids").get_shape()
    return rows, tokens


if __name__ == "__main__":
    main()
