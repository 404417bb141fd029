"""CPU seconds of a step that trains a pruned model, in float32 and in mixed precision, in turn.

    python -m benchmarks.training_step FOLDER IDS.safetensors --output benchmarks/results/training-step-cpu.json

FOLDER holds an N:M model of float32, IDS the ``input_ids`` of a few sequences. A step reads one of them, forward and
backward, by the KL to the model itself; its learning rate is too small to change anything. Runs on one thread.
"""

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.real.__main__ import processor, write
from benchmarks.shared import find_plan
from permtriton import NMPattern
from permtriton.data.samples import Samples
from permtriton.methods.measure.losses import dense_objective
from permtriton.methods.train.kept_weights import KeptWeights, weights_of
from permtriton.model.load import load_model
from permtriton.model.source import Source
from permtriton.running.backward import loss_scale
from permtriton.running.mixed_precision import mixed_precision, multiplies_bfloat16
from permtriton.util.machine import versions

PATTERN = NMPattern(2, 4)
RATE = 1e-9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("ids", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not multiplies_bfloat16(torch.device("cpu")):
        parser.error("this processor has no unit for bfloat16, so both are the same")
    model = load_model(Source(args.folder))
    samples = Samples.of(load_file(args.ids)["input_ids"][:1])
    plan, objective = find_plan(model, PATTERN), dense_objective(model, "kl", samples, 1)
    weights = weights_of(model, [name for _, name in plan.linears()])
    kept_weights = KeptWeights(weights, "adafactor")
    rows: list[dict[str, Any]] = []
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with kept_weights.trainable(model):
        for mixed in [False, True] * (1 + args.repeats):
            started = time.process_time()
            kept_weights.begin(RATE, loss_scale(samples.tokens))
            kept_weights.forget(in_one_pass=True)
            with mixed_precision(model) if mixed else nullcontext():
                (objective.of(torch.tensor([0])) * kept_weights.scale).backward()
            kept_weights.finish()
            seconds[mixed].append(time.process_time() - started)
    for mixed, measured in seconds.items():
        row = {
            "step": "distill by adafactor",
            "mixed_precision": mixed,
            "cpu_seconds": statistics.median(measured[1:]),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    about = {"command": "python -m benchmarks.training_step FOLDER IDS.safetensors", "tokens": samples.tokens}
    write(args.output, {**about, "hardware": processor(), "versions": versions(), "rows": rows})


if __name__ == "__main__":
    main()
