"""Writes the tables of the Markdown pages from the committed result files and the code, so that none is typed by hand.

python benchmarks/readme_tables.py           rewrite the pages
python benchmarks/readme_tables.py --check   exit with 1 if a page is not up to date
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer.main import get_command

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # python benchmarks/readme_tables.py has only its own folder there

from benchmarks.gpu import table as gpu  # noqa: E402
from permtriton.cli.main import app  # noqa: E402
from permtriton.config import OPTIONS, PANELS, defaults  # noqa: E402

PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "NOTES.md", *sorted((ROOT / "docs").glob("*.md")))
RESULTS = ROOT / "benchmarks" / "results"


FUSED = " (fused)"
WHOLE_GAP = (
    "wanda + heuristic without row weights"  # the method whose gap to the dense model counts as 1 in each layout
)


def comparison_table(name: str) -> str:
    """Returns the method table of ``permtriton compare --output``: a row per method, both layouts side by side."""
    report = _load(name)
    rows = {row["method"]: row for row in report["rows"]}
    dense, seeds = rows.pop("dense")["mean"], len(report["seeds"])
    lines = [
        f"| method, {seeds} seeds | portable: perplexity | gap | seconds | fused: perplexity | gap | seconds |",
        "|---|---|---|---|---|---|---|",
        f"| dense | {dense:.3f} | 0 | | | | |",
    ]
    for method in (method for method in rows if not method.endswith(FUSED)):
        cells = [_cells(rows, method, layout, dense, seeds) for layout in ("", FUSED)]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    config, versions = report["config"], report["versions"]
    lines += [
        "",
        f"{report['tokens']:,} held-out tokens; calibration {config['samples']} x {config['sequence_length']} tokens; "
        f"{report['device']}; torch {versions['torch']}, transformers {versions['transformers']}, permtriton "
        f"{versions['permtriton']}. ± is the sample standard deviation over seeds; a seed draws the calibration "
        f"sequences. Gap: log(perplexity / dense) as a share of that of {WHOLE_GAP}, in the same layout. Seconds per "
        "seed, with the evaluation. Methods without an order are the same in both layouts.",
    ]
    return "\n".join(lines)


def _cells(rows: Mapping[str, Any], method: str, layout: str, dense: float, seeds: int) -> str:
    row = rows.get(method + layout)
    if row is None:
        return " | | "
    gap = math.log(row["mean"] / dense) / math.log(rows[WHOLE_GAP + layout]["mean"] / dense)
    spread = f" ± {row['spread']:.3f}" if seeds > 1 else ""
    return f"{row['mean']:.3f}{spread} | {gap:.2f} | {row['seconds'] / seeds:.0f}"


def learning_step_table(name: str) -> str:
    """Returns the rows of ``benchmarks/learning_step.py``, one JSON line each."""
    lines = [
        "| hidden, intermediate, layers, tokens | dense forward + backward | learning step | ratio | peak memory |",
        "|---|---|---|---|---|",
    ]
    rows = _load_lines(name)
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


def search_round_table(name: str) -> str:
    """Returns the rows of ``benchmarks/search_round.py``, one JSON line each."""
    lines = [
        "| hidden, intermediate, layers, samples x tokens | pairs | forward + backward | gains | ratio |",
        "|---|---|---|---|---|",
    ]
    rows = _load_lines(name)
    for row in rows:
        shape = row["shape"]
        sizes = f"{shape['hidden']}, {shape['intermediate']}, {shape['layers']}, {shape['samples']} x {shape['tokens']}"
        pairs = f"in blocks of {shape['search_block']}" if shape["search_block"] else "all"
        times = f"{row['forward_backward_s']:.0f} s | {row['gains_s']:.1f} s | {row['ratio']:.2f}"
        lines.append(f"| {sizes} {shape['dtype']} | {pairs} | {times} |")
    return "\n".join([*lines, "", f"{rows[-1]['device']}; torch {rows[-1]['versions']['torch']}."])


def swap_prediction_table(name: str) -> str:
    """Returns the rows of ``benchmarks/swap_prediction.py``, one JSON line each."""
    lines = ["| layout | gains | rank correlation | true over predicted, median |", "|---|---|---|---|"]
    rows = _load_lines(name)
    for row in rows:
        for damping, gains in (("damping 0", "first order"), ("damping 1", "less the curvature")):
            found = row[damping]
            correlation, ratio = found["rank_correlation"], found["median_true_over_predicted"]
            lines.append(f"| {row['layout']} | {gains} | {correlation:.2f} | {ratio:.2f} |")
    swaps = rows[-1]["damping 0"]["swaps"]
    caption = f"{swaps} single swaps each; {rows[-1]['device']}; torch {rows[-1]['versions']['torch']}."
    return "\n".join([*lines, "", caption])


def compile_time_table(name: str) -> str:
    """Returns the rows of ``benchmarks/compile_time.py``."""
    report = _load(name)
    stages = [stage for stage in report["rows"][0]["seconds"] if stage != "unions"]
    lines = [f"| layers | {' | '.join(stages)} | total | peak memory |", "|---" * (len(stages) + 3) + "|"]
    for row in report["rows"]:
        seconds = " | ".join(f"{row['seconds'][stage]:.1f} s" for stage in stages)
        lines.append(f"| {row['layers']} | {seconds} | {row['total_s']:.1f} s | {row['peak_bytes'] / 1e9:.2f} GB |")
    runs = len(report["rows"][0]["samples_s"]["trace"])
    return "\n".join([*lines, "", f"{report['device']}; torch {report['versions']['torch']}; medians of {runs}."])


def runtime_overhead_table(name: str) -> str:
    """Returns the rows of ``benchmarks/runtime_overhead.py``, one JSON line each."""
    lines = ["| dtype | unpermuted | norms permuted | norms permuted, gather before o |", "|---|---|---|---|"]
    rows = _load_lines(name)
    for row in rows:
        cells = [f"{row['ratio'][m]:.3f}x ({row['paired_ratio'][m]:.3f}x)" for m in ("norms", "norms and o_proj")]
        lines.append(f"| {row['shape']['dtype']} | {row['seconds']['dense']:.3f} s | {' | '.join(cells)} |")
    count = len(rows[-1]["samples_s"]["dense"])
    caption = (
        f"{rows[-1]['device']}; torch {rows[-1]['versions']['torch']}; {count} rounds: ratio of the medians (and "
        "the median of the ratios in a round)."
    )
    return "\n".join([*lines, "", caption])


def gpu_table() -> str:
    """Returns the newest result of ``python -m benchmarks.gpu``, or its goals where there is none."""
    results = [_load(path.name) for path in RESULTS.glob("gpu-*.json")]
    newest = max(results, key=lambda result: result["started"], default=None)
    return gpu.unmeasured() if newest is None else gpu.markdown(newest)


def config_options_table() -> str:
    """Returns every option of the config, under the headings of ``--help``."""
    lines = []
    for panel in PANELS:
        lines += [f"**{panel}**", "", "| option | values | default | only with | meaning |", "|---|---|---|---|---|"]
        for option in (option for option in OPTIONS.values() if option.panel == panel):
            needs = "; ".join(f"`{name} = {' or '.join(values)}`" for name, values in option.needs.items())
            lines.append(f"| `{option.name}` | {option.expected} | {defaults(option.name)} | {needs} | {option.help} |")
        lines.append("")
    return "\n".join(lines[:-1])


def other_options_table() -> str:
    """Returns the options of ``permtriton compile`` that are not the config's."""
    flags = [p for p in get_command(app).commands["compile"].params if p.opts[0].startswith("--")]
    lines = [f"| `{flag.opts[0]}` | {flag.help} |" for flag in flags if flag.name not in OPTIONS]
    return "\n".join(["| option | meaning |", "|---|---|", *lines])


TABLES = {
    "config-options": config_options_table,
    "other-options": other_options_table,
    "compile-time": lambda: compile_time_table("compile-time-cpu.json"),
    "runtime-overhead": lambda: runtime_overhead_table("runtime-overhead-cpu.jsonl"),
    "gpu": gpu_table,
    "demo-recipe": lambda: comparison_table("compare-demo-recipe.json"),
    "learning-step": lambda: learning_step_table("learning-step-cpu.jsonl"),
    "search-round": lambda: search_round_table("search-round-cpu.jsonl"),
    "swap-prediction": lambda: swap_prediction_table("swap-prediction-cpu.jsonl"),
}


SECTION = re.compile(r"<!-- table ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def rewritten(page: str) -> str:
    """Returns ``page`` with every ``<!-- table NAME -->`` section filled in."""
    return SECTION.sub(lambda found: f"<!-- table {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->", page)


def _load_lines(name: str) -> list[Any]:
    text = (RESULTS / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    before = {page: page.read_text(encoding="utf-8") for page in PAGES}
    found = sorted(name for text in before.values() for name in SECTION.findall(text))
    if found != sorted(TABLES):
        sys.exit(f"the pages have the tables {', '.join(found)}: expected each once of {', '.join(sorted(TABLES))}")
    for page, text in before.items():
        after = rewritten(text)
        if check and after != text:
            sys.exit(f"{page.relative_to(ROOT)} is not what benchmarks/readme_tables.py writes: run it")
        if not check:
            page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
