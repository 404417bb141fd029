"""How much time and memory the compiler takes to trace, plan and rewrite a model, by number of layers.

The model has the sizes of LLaMA-2-7B and is on the meta device. Every sample is measured in a process of its own, so
that peak memory is not shared. JSON with medians and all samples is written.

    python benchmarks/compile_time.py --layers 8,32,80
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULT = Path(__file__).resolve().parent / "results" / "compile-time-cpu.json"
CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
STAGES = ("trace", "provenance", "sites", "passes")  # stages that `measure` times and that the total contains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="8,32,80", help="numbers of layers, separated by commas")
    parser.add_argument("--repeats", type=int, default=3, help="samples per number of layers")
    parser.add_argument("--output", type=Path, default=RESULT, help="file for the JSON")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # number of layers for a single sample, see _sample
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.one)))
        return
    counts = [int(count) for count in args.layers.split(",")]
    samples = [_sample(count) for _ in range(args.repeats) for count in counts]
    rows = [_summary(count, [sample for sample in samples if sample["layers"] == count]) for count in counts]
    report = {
        "command": f"python benchmarks/compile_time.py --layers {args.layers} --repeats {args.repeats}",
        "config": CONFIG,
        "rows": rows,
        **{key: samples[0][key] for key in ("device", "system", "versions")},
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")


def measure(layers: int) -> dict[str, Any]:
    """Runs every stage once in this process and returns one sample: seconds per stage, peak memory, versions."""
    import platform

    import torch
    import torch.export
    from transformers import LlamaConfig, LlamaForCausalLM

    from permtriton.config import CommonConfig
    from permtriton.kernels.importance import ImportanceFactors
    from permtriton.passes.graph import absorb_folds
    from permtriton.passes.pipeline import permutation_passes, pruning_passes, run_passes
    from permtriton.passes.provenance import propagate
    from permtriton.passes.sites import find_sites
    from permtriton.passes.trace import trace
    from permtriton.passes.weight_folds import moves_of
    from permtriton.util.machine import device_name, peak_memory, versions

    cpu = torch.device("cpu")
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**CONFIG, num_hidden_layers=layers)).eval()
    imported = peak_memory(cpu)
    seconds: dict[str, float] = {}

    def timed(stage: str, run: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = run()
        seconds[stage] = round(time.perf_counter() - started, 3)
        return result

    graph_module, outputs = timed("trace", lambda: trace(model))
    provenance = timed("provenance", lambda: propagate(graph_module, outputs))
    plan = timed("sites", lambda: find_sites(provenance, model, CommonConfig()))

    def run_all_passes() -> None:
        """Runs the passes with reversed orders and masks by magnitude; the structure is verified after each pass."""
        indices = {
            space.name: torch.cat([torch.arange(start + size - 1, start - 1, -1) for start, size in space.spans])
            for space in plan.spaces
            if not space.frozen
        }
        ones = {name: ImportanceFactors(1, torch.ones(site.channels, device="meta")) for site, name in plan.linears()}
        permuted = run_passes(graph_module, permutation_passes(moves_of(plan, indices)))
        run_passes(absorb_folds(permuted), pruning_passes(plan, ones))

    timed("passes", run_all_passes)
    peak = peak_memory(cpu) - imported
    return {
        "layers": layers,
        "seconds": seconds,
        "peak_bytes": peak,
        "device": device_name(cpu),
        "system": platform.platform(),
        "versions": versions(),
    }


def _sample(layers: int) -> dict[str, Any]:
    """Returns a sample that is measured in a process of its own."""
    command = [sys.executable, __file__, "--one", str(layers)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _summary(layers: int, samples: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = {stage: [sample["seconds"][stage] for sample in samples] for stage in samples[0]["seconds"]}
    totals = [sum(sample["seconds"][stage] for stage in STAGES) for sample in samples]
    return {
        "layers": layers,
        "seconds": {stage: statistics.median(values) for stage, values in seconds.items()},
        "total_s": round(statistics.median(totals), 3),
        "peak_bytes": max(sample["peak_bytes"] for sample in samples),
        "samples_s": seconds,
    }


if __name__ == "__main__":
    main()
