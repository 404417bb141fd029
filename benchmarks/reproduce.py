"""The tables of docs/reproduce.md, from the reports of ``permtriton compare`` in ``results/reproduce``."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

UNIT = "sparsegpt"  # whose loss counts as 1
PAPER = {  # name in the paper -> methods of the page's command, of the demo's comparison, of SmolLM2's
    "dense": ("dense", "dense", "dense"),
    "Wanda": ("wanda", "wanda", "wanda"),
    "Wanda + CP": ("wanda + heuristic (fused)", "wanda + heuristic (fused)", "wanda + heuristic (fused)"),
    "PermLLM, Wanda": ("wanda + permllm", "wanda + permllm", "published (2 of 50 epochs)"),
    "with our gradient, Wanda": ("wanda + learned (fused)", "wanda + learned (fused)", "wanda + learned (fused)"),
    "RIA": ("ria", "ria", "ria"),
    "RIA + CP": ("ria + heuristic (fused)", "ria + heuristic (fused)", "ria + heuristic (fused)"),
    "PermLLM, RIA": ("ria + permllm", "ria + permllm", "ria + published (2 of 50 epochs)"),
    "SparseGPT": ("sparsegpt", "sparsegpt", "sparsegpt"),
}
SMOLLM2 = ("real-smollm2-cpu", "real-smollm2-fused-cpu")
DEMO = ("recipe", "permllm-ria", "permllm-wanda", "learned")  # comparisons of three seeds


def main_table(results: Path) -> str:
    """Returns the methods of the paper as the page's command, the demo's and SmolLM2's longer benchmark have them."""
    report = _read(results / "reproduce" / "table.json")
    real = [row for name in SMOLLM2 for row in _read(results / f"{name}.json")["rows"]]
    perplexities = [
        {row["method"]: row["mean"] for row in report["rows"]},
        {row["method"]: row["mean"] for name in DEMO for row in _read(results / f"compare-demo-{name}.json")["rows"]},
        {name: _mean(real, name) for *_, name in PAPER.values()},
    ]
    seconds = {row["method"]: row["compile_seconds"] for row in report["rows"]}
    lines = []
    for paper, methods in PAPER.items():
        cells = [_with_loss(found, name) for found, name in zip(perplexities, methods, strict=True)]
        took = seconds[methods[0]]
        lines.append([paper, f"`{methods[0]}`", cells[0], f"{took:.0f}", *cells[1:]])
    heading = "paper | method | demo, this command | seconds | demo, 64 x 256 tokens | SmolLM2-135M"
    caption = (
        "Perplexity, and in brackets the rise in log perplexity as a share of SparseGPT's. This command: "
        f"{_run(report)} The demo on 64 x 256 tokens, 12 epochs: three seeds "
        "([recipe](../benchmarks/results/compare-demo-recipe.json), "
        "[PermLLM](../benchmarks/results/compare-demo-permllm-wanda.json), "
        "[on RIA](../benchmarks/results/compare-demo-permllm-ria.json), "
        "[learned](../benchmarks/results/compare-demo-learned.json)). "
        "[SmolLM2](benchmarks.md#a-real-language-model): 32 x 512 tokens; "
        "PermLLM for 2 epochs in place of 50, with our gradient for 4; three seeds of SparseGPT and of the [fused rows "
        "of Wanda](../benchmarks/results/real-smollm2-fused-cpu.json), one of the others."
    )
    return _table(heading, lines, caption)


def table(results: Path, name: str) -> str:
    """Returns the rows of one comparison. Text, machine and versions are those of the main table, which names them.

    Raises:
        ValueError: they are not.
    """
    report = _read(results / "reproduce" / f"{name}.json")
    if (found := _run(report)) != (main := _run(_read(results / "reproduce" / "table.json"))):
        raise ValueError(f"{name}.json was measured on {found} table.json on {main}")
    dense, *rows = report["rows"]
    with_setting, tasks = report["ablation"] is not None, list(dense["tasks"])
    lines = [
        [
            f"`{row['method']}`", *([f"`{row['setting']}`"] * with_setting), f"{row['mean']:.3f}", f"{row['kl']:.3f}",
            *(f"{row['tasks'][task]:.2f}" for task in tasks), f"{row['compile_seconds']:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    heading = (
        f"method | {'setting | ' * with_setting}perplexity | KL | {''.join(f'{task} | ' for task in tasks)}seconds"
    )
    accuracy = "".join(f", {task} {value:.2f}" for task, value in dense["tasks"].items())
    return _table(heading, lines, f"Dense: {dense['mean']:.3f}{accuracy}.")


def _run(report: Mapping[str, Any]) -> str:
    config, versions, text = report["config"], report["versions"], Path(report["text"]).name
    return (
        f"{report['tokens']:,} tokens of {text}; {config['samples']} x {config['sequence_length']} calibration tokens, "
        "one seed; "
        f"{report['device']}; torch {versions['torch']}, transformers {versions['transformers']}; seconds are "
        "beside other work."
    )


def _with_loss(perplexities: Mapping[str, float], name: str) -> str:
    found, dense, unit = (perplexities[each] for each in (name, "dense", UNIT))
    loss = f" ({math.log(found / dense) / math.log(unit / dense):.2f})"
    return f"{found:.2f}{loss * (name != 'dense')}"


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return fmean(row["evaluation"]["perplexity"] for row in rows if row["name"] == name)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _table(heading: str, rows: Sequence[Sequence[str]], caption: str) -> str:
    lines = [heading, "|".join(["---"] * (heading.count("|") + 1)), *(" | ".join(cells) for cells in rows)]
    return "\n".join([*(f"| {line} |" for line in lines), "", caption])
