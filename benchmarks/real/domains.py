"""Is it the text? Prunes SmolLM2 on texts of several domains, and measures each result on other domains, too.

    python -m benchmarks.real.domains --texts FOLDER [--rows "sparsegpt,default"] [--calibrations python,mix]

Calibration texts: ``wikitext`` (valid.txt of FOLDER), ``python`` (four fifths of Python's language reference, which
every Python holds as pydoc's topics), ``written`` (by the dense model itself) and ``mix`` (equal parts of the three).
Held-out texts: WikiText-2's test.txt, and the other fifth of the reference. A folder that ``python -m benchmarks.real``
left in the folder for work is measured as it is. A row is written as soon as it is measured, and the same command
continues with what is missing.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from benchmarks.real.__main__ import ROOT, about, commit, evaluated, names, pruned, shared_options, write
from benchmarks.real.inputs import calibration_file, held_out_file, made_model
from benchmarks.real.rows import DENSE, ROWS, Job
from permtriton.data.generated import first_token, generated_text, written
from permtriton.model.load import load_model
from permtriton.model.source import Source
from permtriton.model.tokenizer import load_tokenizer
from permtriton.util.progress import NoProgress

RESULT = ROOT / "benchmarks" / "results" / "domains-smollm2-cpu.json"
CALIBRATIONS = ("wikitext", "python", "written", "mix")
WRITTEN, LENGTH = 80, 512  # texts that the dense model writes, and their tokens
CALIBRATED_ON = 0.8  # share of the reference
WINDOW = 1024  # tokens of a held-out window


def main() -> None:
    parser = shared_options(__doc__)
    parser.add_argument("--rows", type=names(ROWS), default=["sparsegpt", "default"], help=f"of {', '.join(ROWS)}")
    parser.add_argument(
        "--calibrations", type=names(CALIBRATIONS), default=CALIBRATIONS, help=f"of {', '.join(CALIBRATIONS)}"
    )
    parser.add_argument("--windows", type=int, default=32, help="held-out windows of each text")
    parser.add_argument("--threads", type=int, default=1, help="threads of every process")
    parser.add_argument("--output", type=Path, default=RESULT, help="the result file")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    model = made_model(args.work)
    texts = calibration_texts(args.work, args.texts, model, args.calibrations)
    held_out = {
        "wikitext": held_out_file(args.work, model, args.texts / "test.txt", WINDOW),
        "python": held_out_file(args.work, model, args.work / "python-test.txt", WINDOW),
    }
    report = json.loads(args.output.read_text()) if args.output.is_file() else {"rows": []}
    rows = {(row["calibration"], row["name"], row["seed"]): row for row in report["rows"]}
    wanted = [(name, kind, seed) for seed in args.seeds for kind in args.calibrations for name in args.rows]
    for name, kind, seed in [(DENSE, "", 0), *wanted]:
        if (kind, name, seed) in rows:
            continue
        row: dict[str, Any] = {"calibration": kind, "name": name, "seed": seed}
        folder, slug = model, name.replace(" ", "-")
        if kind == "wikitext" and (made := args.work / f"{slug}-seed{seed}").is_dir():
            folder = made
        elif name != DENSE:
            folder = args.work / f"{slug}-{kind}-seed{seed}"
            ids = calibration_file(args.work, model, texts[kind], args.samples, args.length, seed)
            job = Job(model, texts[kind], ids, args.samples, args.length, seed, args.peers)
            row["pruning"] = {**pruned(name, job, folder, args.threads), "commit": commit()}
        row["perplexity"] = {
            on: evaluated(folder, model, file, args.windows, 0, args.threads)["perplexity"]
            for on, file in held_out.items()
        }
        rows[kind, name, seed] = row
        write(
            args.output,
            {**about(parser, args, "benchmarks.real.domains"), "windows": args.windows, "rows": list(rows.values())},
        )
        print(json.dumps(row), flush=True)


def calibration_texts(work: Path, texts: Path, model: Path, wanted: Sequence[str]) -> dict[str, Path]:
    """Returns the file of each calibration text, and makes ``python-test.txt``; the model writes only if it must."""
    reference = "\n\n".join(topics[name] for name in sorted(topics))
    cut = reference.index("\n\n", int(CALIBRATED_ON * len(reference)))
    found = {name: work / f"{name}.txt" for name in CALIBRATIONS}
    found["wikitext"] = texts / "valid.txt"
    held_out = set(reference[cut:].split("\n\n"))  # topics repeat each other's paragraphs
    found["python"].write_text(
        "\n\n".join(part for part in reference[:cut].split("\n\n") if part not in held_out), encoding="utf-8"
    )
    (work / "python-test.txt").write_text(reference[cut:], encoding="utf-8")
    if {"written", "mix"}.isdisjoint(wanted):
        return found
    if not found["written"].is_file():
        found["written"].write_text(_written(model), encoding="utf-8")
    parts = [found[name].read_text(encoding="utf-8") for name in CALIBRATIONS[:-1]]
    size = min(map(len, parts))
    found["mix"].write_text("\n\n".join(part[:size] for part in parts), encoding="utf-8")
    return found


def _written(folder: Path) -> str:
    """Returns texts that the dense model writes from the token with which a text begins."""
    source = Source(str(folder))
    model, tokenizer = load_model(source), load_tokenizer(source)
    starts = torch.full((written(WRITTEN), 1), first_token(model, tokenizer))
    ids = generated_text(model, starts, WRITTEN, LENGTH, 0, NoProgress())
    return "\n\n".join(tokenizer.batch_decode(ids, skip_special_tokens=True))


if __name__ == "__main__":
    main()
