"""What was tried beside the default, as pairs of rows of result files: the table of docs/tried.md."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple


class Trial(NamedTuple):
    """Something that was tried: a row of a result file without it, and one with it."""

    what: str
    file: str
    without: str
    having: str


TRIALS = (
    Trial(
        "`refit` in place of SparseGPT, both in the heuristic order",
        "compare-demo-refit.json",
        "heuristic + sparsegpt",
        "heuristic + refit",
    ),
    Trial(
        "4 rounds of exchanges after the fit (the default) in place of none",
        "compare-demo-exchanges.json",
        "refit_exchanges 0",
        "refit_exchanges 4",
    ),
    Trial(
        "8 rounds of exchanges in place of 4",
        "compare-demo-exchanges.json",
        "refit_exchanges 4",
        "refit_exchanges 8",
    ),
    Trial(
        "residual targets of 0.25 (the default) in place of none",
        "compare-demo-residual-targets.json",
        "refit_residual_targets 0.0",
        "refit_residual_targets 0.25",
    ),
    Trial("the same", "residual-smollm2.json", "default without residual targets", "default"),
    Trial(
        "residual targets of 1 in place of none",
        "compare-demo-residual-targets.json",
        "refit_residual_targets 0.0",
        "refit_residual_targets 1.0",
    ),
    Trial(
        "dense targets alone in place of a share of 0.75",
        "compare-demo-refit-share.json",
        "refit_dense_targets 0.75",
        "refit_dense_targets 1.0",
    ),
    Trial(
        "no dense targets in place of a share of 0.75",
        "compare-demo-refit-share.json",
        "refit_dense_targets 0.75",
        "refit_dense_targets 0.0",
    ),
    Trial("the metric of the outputs in `refit`", "metric-smollm2.json", "default without the metric", "default"),
    Trial(
        "all kept weights trained in 40 steps of a sequence each in place of vectors (`tune`)",
        "kept-weights-smollm2.json",
        "heuristic + refit + tune",
        "default",
    ),
    Trial(
        "`fast`, which is `refit` alone, in place of SparseGPT in the heuristic order",
        "real-smollm2-cpu.json",
        "heuristic + sparsegpt",
        "fast",
    ),
    Trial(
        "an order of channels before `refit` and `tune`",
        "metric-smollm2.json",
        "default without an order, tune",
        "default, tune",
    ),
    Trial("row weights in the default recipe", "real-smollm2-16x512.json", "default", "default with row weights"),
    Trial("rotations of the heads and of the residual stream", "rotation-demo.json", "folded", "both"),
    Trial("the same", "rotation-smollm2.json", "folded", "both"),
    Trial("rotations of the heads alone, 8 x 512 tokens", "rotation-smollm2.json", "folded", "heads"),
    Trial("the same, 32 x 512 tokens", "rotation-smollm2-32x512.json", "unfolded", "heads"),
)
HEADING = "tried | model | seeds | KL, nats | perplexity"


def table(results: Path) -> str:
    """Returns a row for each of `TRIALS`: the means over the seeds that both of its rows have."""
    lines = [HEADING, "|".join(["---"] * (HEADING.count("|") + 1))]
    for trial in TRIALS:
        report = json.loads((results / trial.file).read_text(encoding="utf-8"))
        before, after = _by_seed(report, trial.without), _by_seed(report, trial.having)
        seeds = before.keys() & after.keys()
        kl, perplexity, new_kl, new_perplexity = (
            fmean(rows[seed][number] for seed in seeds) for rows in (before, after) for number in (0, 1)
        )
        model = "demo" if "demo" in trial.file else "SmolLM2-135M"
        numbers = f"{kl:.3f} → {new_kl:.3f} ({new_kl / kl - 1:+.0%}) | {perplexity:.2f} → {new_perplexity:.2f}"
        what = f"[{trial.what}](../benchmarks/results/{trial.file})"
        lines.append(f"{what} | {model} | {len(seeds)} | {numbers}")
    return "\n".join(f"| {line} |" for line in lines)


def _by_seed(report: dict[str, Any], name: str) -> dict[int, tuple[float, float]]:
    """Returns seed -> KL and perplexity of a row of a comparison, of the real model, or of a rotation."""
    found = {}
    for row in report["rows"]:
        if name in (row.get("setting") or row.get("method"), row.get("name"), row.get("variant")):
            each = zip(report["seeds"], row["by_seed"], strict=True) if "by_seed" in row else [(row["seed"], row)]
            for seed, measured in each:
                measured = measured.get("evaluation", measured)
                found[seed] = measured["kl"], measured["perplexity"]
    assert found, name
    return found
