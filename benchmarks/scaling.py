"""Measures the parts of a compilation on this machine, and projects memory and time for larger models on GPUs.

    python benchmarks/scaling.py measure > benchmarks/results/scaling-cpu.json
    python benchmarks/scaling.py project > benchmarks/results/scaling-projection.json

``measure`` times each stage on small random LLaMAs, and the single operators that stages consist of
(`scaling_parts.py`). What each stage does is counted by `scaling_work.py`; the times of the operators then predict
those of the stages, which checks the counting. ``project`` divides the same counts, for LLaMA's sizes, by rates that
are assumed for an H100, and takes the memory from permtriton's own estimate. Nothing that it prints was measured.
"""

import argparse
import json
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from scaling_parts import measure
from scaling_work import KINDS, Sizes, seconds, stages, work
from shared import PATTERN
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from permtriton import find_plan
from permtriton.config import CompileConfig
from permtriton.data.samples import Samples
from permtriton.machine import versions
from permtriton.memory import Devices, estimate
from permtriton.model.forward import TOKENS_WITHOUT_LOGITS
from permtriton.model.plan import Plan

# name -> hidden size, intermediate size, layers, heads, key/value heads
MODELS = {
    "7B": (4096, 11008, 32, 32, 32),
    "13B": (5120, 13824, 40, 40, 40),
    "70B": (8192, 28672, 80, 64, 8),
}
GPUS = (1, 4, 8)
CAPACITY = {"H100": 80e9, "H200": 141e9}  # bytes
USABLE = 0.9  # of a GPU's memory: the context, the allocator's holes, buffers of NCCL
CALIBRATION = (128, 1024)  # sequences and tokens, permtriton's defaults

# Assumed rates of one H100 or H200, per second, and why.
ASSUMED: dict[str, tuple[float, str]] = {
    "products": (400e12, "40% of the 989 TFLOP/s of the data sheet (dense bfloat16)"),
    "wide": (40e12, "60% of 67 TFLOP/s (float32 without TF32, which torch does not use by default)"),
    "factors": (15e12, "22% of 67 TFLOP/s: the factors of one matrix do not fill a GPU"),
    "moved": (2.7e12, "80% of the 3.35 TB/s of an H100"),
    "distances": (0.5e12, "8 bytes per difference from the L2 cache, at 4 TB/s"),
    "searched": (0.5e6, "2 us for a step: a reduction and dependent loads in one warp"),
    "gains": (3e12, "the goal of the kernel in NOTES.md"),
    "operators": (125e3, "8 us to launch one"),
    "summed": (360e9, "80% of the 450 GB/s that NVLink has in each direction"),
    "joined": (2e9, "gloo over the loopback interface"),
    "gathered": (360e9, "as for sums"),
}
UPDATES = {"importance": "obs", "weight_update": "sparsegpt+reconstruct"}
# stage -> the stage of permtriton's estimate, and the options with which it occurs
ESTIMATED: dict[str, tuple[str, dict[str, str]]] = {
    "statistics (wanda)": ("calibration", {}),
    "statistics (obs)": ("hessians", {"importance": "obs"}),
    "Fisher rows": ("row weights", {}),
    "heuristic order": ("heuristic", {}),
    "one search round": ("search", {"permutation": "searched"}),
    "one learning epoch": ("learning", {"permutation": "learned"}),
    "SparseGPT": ("hessians", UPDATES),
    "reconstruct": ("reconstruct", UPDATES),
}


@dataclass(frozen=True)
class Place:
    """Where the weights are in a stage.

    Attributes:
        how: ``whole`` (each GPU has them all), ``sharded``, ``host`` (it runs on the CPU), or ``no`` (too large).
        bytes: needed on each GPU; what is too much where nothing fits.
    """

    how: str
    bytes: int


def place(model: PreTrainedModel, plan: Plan, stage: str, gpus: int, usable: int) -> Place:
    """Decides where the weights are, as `permtriton.memory.estimate` says for a compilation with this stage."""
    key, options = ESTIMATED[stage]
    config = CompileConfig.from_options({"permutation": "heuristic"} | options)
    samples = Samples.of(torch.empty(CALIBRATION, dtype=torch.int64, device="meta"))
    whole, spread = (
        estimate(model, plan, config, samples, None, Devices("cuda", gpus, usable, how)) for how in (False, True)
    )
    needed = whole.model + whole.extra(key)
    if needed <= usable:
        return Place("whole", needed)
    if gpus == 1 or config.updates:
        return Place("no", needed)
    if key == "heuristic":
        return Place("host", 0)
    needed = spread.model + spread.extra(key)
    return Place("sharded" if needed <= usable else "no", needed)


def project() -> dict[str, Any]:
    """Returns memory and time of every stage for `MODELS` on `GPUS`."""
    rates = {kind: rate for kind, (rate, _) in ASSUMED.items()}
    rows = []
    for name, (hidden, intermediate, layers, heads, key_value_heads) in MODELS.items():
        shape = LlamaConfig(
            hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=key_value_heads, vocab_size=32000,
        )  # fmt: skip
        with torch.device("meta"):
            model = LlamaForCausalLM._from_config(shape, dtype=torch.bfloat16).eval()
        plan, size = find_plan(model, PATTERN), sum(p.numel() * p.element_size() for p in model.parameters())
        sizes, config = Sizes.of(model, plan, *CALIBRATION), CompileConfig()
        for stage, counted in stages(sizes, config).items():
            for gpu, gpus in product(CAPACITY, GPUS):
                found = place(model, plan, stage, gpus, int(USABLE * CAPACITY[gpu]))
                at_once = config.micro_batch_size if counted.trains else TOKENS_WITHOUT_LOGITS // CALIBRATION[1]
                parts = -(-CALIBRATION[0] // gpus // at_once)
                done = counted.on_ranks(gpus, rates)
                if found.how == "sharded":
                    done += work(gathered=counted.passes * parts * size * (gpus - 1) / gpus)
                rows.append({
                    "model": name, "stage": stage, "gpu": gpu, "gpus": gpus, "how": found.how,
                    "bytes": found.bytes, "seconds": float(f"{seconds(done, rates):.3g}"),
                    "work": {kind: float(f"{amount:.4g}") for kind, amount in done.items()},
                })  # fmt: skip
    assumed = {kind: {"rate": rate, "of": KINDS[kind], "why": why} for kind, (rate, why) in ASSUMED.items()}
    return {
        "assumed": assumed, "capacity": CAPACITY, "usable": USABLE, "calibration": CALIBRATION, "models": MODELS,
        "rows": rows, "versions": versions(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "project"])
    print(json.dumps({"measure": measure, "project": project}[parser.parse_args().what](), indent=1))


if __name__ == "__main__":
    main()
