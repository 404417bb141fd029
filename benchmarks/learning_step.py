"""What one step of learning costs, compared with its floor: a dense forward and backward pass with weight gradients.

Both run the same LLaMA-shaped layers on the same tokens, with the same activation checkpointing and micro-batches, in
turn; the medians are compared. Before each learning step that is timed, one warms up. One JSON line is printed.

    python benchmarks/learning_step.py --hidden 2048 --intermediate 5632 --layers 1 --tokens 1024
"""

import argparse
import json
import platform
import statistics
from itertools import islice

import torch
from shared import PATTERN, llama, step_seconds

from permtriton import find_plan
from permtriton.data.samples import Samples
from permtriton.machine import device_name, peak_memory, versions
from permtriton.model.forward import hidden_states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=1, help="sequences of a step")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences per forward and backward pass")
    parser.add_argument("--discard-masks", action="store_true", help="compute masks for each micro-batch")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = llama(args)
    plan = find_plan(model, PATTERN)
    ids = torch.randint(0, args.vocabulary, (args.sequences, args.tokens))
    target = hidden_states(model, Samples.of(ids), 1)
    pairs = step_seconds(model, plan, ids, target, args.micro_batch, not args.discard_masks)
    dense, learn = zip(*islice(pairs, 1, args.repeats + 1), strict=True)  # the first pair warms up
    dense_s, learn_s = statistics.median(dense), statistics.median(learn)
    result = {
        "dense_s": round(dense_s, 4),
        "learn_s": round(learn_s, 4),
        "ratio": round(learn_s / dense_s, 3),
        "dense_samples_s": [round(t, 4) for t in dense],
        "learn_samples_s": [round(t, 4) for t in learn],
        "peak_memory_bytes": peak_memory(model.device),
        "shape": {k: v for k, v in vars(args).items() if k not in ("repeats", "device")},
        "device": device_name(model.device),
        "system": platform.platform(),
        "versions": versions(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
