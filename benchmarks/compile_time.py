"""How long the compiler takes to understand a model, by number of layers, and how much memory.

The model has the sizes of LLaMA-2-7B and lies on the meta device. Every run is a fresh process, whose peak memory is
its own; medians over the runs are printed, and JSON with every sample is written.

    python benchmarks/compile_time.py --layers 8,32,80 --output compile-time.json
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
STAGES = ("trace", "provenance", "sites", "passes")  # what is summed up; a further stage is added here and in `measure`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="8,32,80", help="numbers of layers, with commas")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each number of layers")
    parser.add_argument("--output", type=Path, help="file for the JSON; standard output where it is left out")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # what the fresh processes are started with
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.one)))
        return
    counts = [int(count) for count in args.layers.split(",")]
    runs = [_fresh(count) for _ in range(args.repeats) for count in counts]
    rows = [_summary(count, [run for run in runs if run["layers"] == count]) for count in counts]
    _print_table(rows)
    told = {
        "command": f"python benchmarks/compile_time.py --layers {args.layers} --repeats {args.repeats}",
        "config": CONFIG,
        "rows": rows,
        **{key: runs[0][key] for key in ("device", "system", "versions")},
    }
    text = json.dumps(told, indent=1) + "\n"
    if args.output is None:
        print(text, end="")
    else:
        args.output.write_text(text)


def measure(layers: int) -> dict[str, Any]:
    """Runs every stage once in this process."""
    import platform

    import torch
    import torch.export
    from transformers import LlamaConfig, LlamaForCausalLM

    from permtriton import NMPattern
    from permtriton.passes.pipeline import run_passes, stand_in_passes
    from permtriton.passes.provenance import channel_unions, propagate
    from permtriton.passes.sites import find_sites
    from permtriton.report import device_name, versions
    from permtriton.trace import trace

    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**CONFIG, num_hidden_layers=layers)).eval()
    imported = _peak()
    seconds: dict[str, float] = {}

    def timed(stage: str, run: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = run()
        seconds[stage] = round(time.perf_counter() - started, 3)
        return result

    traced = timed("trace", lambda: trace(model))
    found = timed("provenance", lambda: propagate(traced.graph_module, traced.outputs, traced.hidden))
    pattern = NMPattern(2, 4)
    plan = timed("sites", lambda: find_sites(found, model, traced.hidden_node, pattern))
    passes = stand_in_passes(plan, traced.graph_module, pattern)
    timed("passes", lambda: run_passes(traced.graph_module, passes))  # their structure verified after each
    peak = _peak() - imported
    timed("unions", lambda: channel_unions(traced.graph_module).partition())  # what verifying one pass costs besides
    return {
        "layers": layers,
        "seconds": seconds,
        "peak_bytes": peak,
        "device": device_name(torch.device("cpu")),
        "system": platform.platform(),
        "versions": versions(),
    }


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _fresh(layers: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", str(layers)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _summary(layers: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    samples = {stage: [run["seconds"][stage] for run in runs] for stage in runs[0]["seconds"]}
    totals = [sum(run["seconds"][stage] for stage in STAGES) for run in runs]
    return {
        "layers": layers,
        "seconds": {stage: statistics.median(values) for stage, values in samples.items()},
        "total_s": round(statistics.median(totals), 3),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "samples_s": samples,
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="LLaMA-2-7B sizes on the meta device, seconds", title_justify="left")
    for column in ("layers", *STAGES, "total", "a layer", "peak GB", "unions"):
        table.add_column(column, justify="right")
    for row in rows:
        seconds = row["seconds"]
        table.add_row(
            str(row["layers"]),
            *(f"{seconds[stage]:.2f}" for stage in STAGES),
            f"{row['total_s']:.2f}",
            f"{row['total_s'] / row['layers']:.3f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{seconds['unions']:.2f}",
        )
    Console(stderr=True).print(table)


if __name__ == "__main__":
    main()
