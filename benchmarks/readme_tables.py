"""Writes the tables of README.md from the committed result files, so that no number is typed by hand.

python benchmarks/readme_tables.py           rewrite README.md
python benchmarks/readme_tables.py --check   exit with 1 if README.md is not up to date
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def comparison_table(name: str) -> str:
    """Returns the method table of ``permtriton compare --output``."""
    report = _load(name)
    dense = report["rows"][0]["mean"]
    seeds = len(report["seeds"])
    lines = [f"| method | held-out perplexity, {seeds} seeds | against dense |", "|---|---|---|"]
    for row in report["rows"]:
        spread = f" ± {row['spread']:.3f}" if len(row["values"]) > 1 else ""
        lines.append(f"| {row['method']} | {row['mean']:.3f}{spread} | {row['mean'] / dense:.3f}x |")
    config, versions = report["config"], report["versions"]
    lines += [
        "",
        f"{report['tokens']:,} held-out tokens; calibration {config['samples']} x {config['sequence_length']} tokens, "
        f"{config['epochs']} epochs, batch {config['batch_size']}; {report['device']}; torch {versions['torch']}, "
        f"transformers {versions['transformers']}, permtriton {versions['permtriton']}. ± is the sample standard "
        "deviation over seeds; a seed draws the calibration sequences and starts the learning.",
    ]
    return "\n".join(lines)


def learning_step_table(name: str) -> str:
    """Returns the rows of ``benchmarks/learning_step.py``, one JSON line each."""
    lines = [
        "| hidden, intermediate, layers, tokens | dense forward + backward | learning step | ratio | peak memory |",
        "|---|---|---|---|---|",
    ]
    text = (RESULTS / name).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    for row in rows:
        shape = row["shape"]
        sizes = f"{shape['hidden']}, {shape['intermediate']}, {shape['layers']}, {shape['tokens']}"
        memory = row["peak_memory_bytes"] / 2**30
        lines.append(
            f"| {sizes} {shape['dtype']} | {row['dense_s']:.2f} s | {row['learn_s']:.2f} s | {row['ratio']:.2f} "
            f"| {memory:.1f} GiB |"
        )
    versions = rows[-1]["versions"]
    lines += ["", f"{rows[-1]['device']}; torch {versions['torch']}; medians of {len(rows[-1]['learn_samples_s'])}."]
    return "\n".join(lines)


TABLES = {
    "demo-recipe": lambda: comparison_table("compare-demo-recipe.json"),
    "learning-step": lambda: learning_step_table("learning-step-cpu.jsonl"),
}


def rewritten(readme: str) -> str:
    """Returns ``readme`` with every ``<!-- table NAME -->`` section filled in."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
        if re.search(pattern, readme, re.DOTALL) is None:
            raise SystemExit(f"README.md has no section <!-- table {name} --> ... <!-- end -->")
        text = f"\\g<1>{table()}\n\\g<2>"
        readme = re.sub(pattern, text, readme, flags=re.DOTALL)
    return readme


def _load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = rewritten(before)
    if check:
        if before != after:
            sys.exit("README.md is not what benchmarks/readme_tables.py writes: run it")
    else:
        readme.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
