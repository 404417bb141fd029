"""What the gains of a search round cost, compared with its forward and backward passes, on LLaMA-shaped layers.

The passes are measured on one sequence and multiplied by the number of calibration sequences, because their time is
proportional to it; the gains do not depend on it and are measured whole. One JSON line is printed.

    python benchmarks/search_round.py --hidden 2048 --intermediate 5632 --tokens 1024 --samples 128
"""

import argparse
import json
import platform
import statistics

import torch
from shared import PATTERN, llama, random_importances, timed

from permtriton import find_plan
from permtriton.config import CompileConfig
from permtriton.data.samples import Samples
from permtriton.machine import device_name, peak_memory, versions
from permtriton.methods.fisher import fisher_information
from permtriton.methods.hard_masks import hard_masked
from permtriton.methods.objective import dense_objective
from permtriton.methods.searched import Searched
from permtriton.methods.swap_search import Searcher
from permtriton.permutation import identity
from permtriton.progress import NoProgress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--samples", type=int, default=128, help="calibration sequences of a round")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--search-block", type=int, default=0, help="as of permtriton compile")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    passes, gains, swaps = measure(args)
    passes_s, gains_s = statistics.median(passes) * args.samples, statistics.median(gains)
    result = {
        "forward_backward_s": round(passes_s, 3),
        "gains_s": round(gains_s, 3),
        "ratio": round(gains_s / passes_s, 3),
        "swaps": swaps,
        "one_sequence_samples_s": [round(t, 4) for t in passes],
        "gains_samples_s": [round(t, 4) for t in gains],
        "peak_memory_bytes": peak_memory(torch.device(args.device)),
        "shape": {k: v for k, v in vars(args).items() if k not in ("repeats", "device")},
        "device": device_name(torch.device(args.device)),
        "system": platform.platform(),
        "versions": versions(),
    }
    print(json.dumps(result))


def measure(args: argparse.Namespace) -> tuple[list[float], list[float], int]:
    """Returns the seconds of each pass over one sequence, those of all gains, and the number of swaps found."""
    torch.manual_seed(0)
    model = llama(args)
    plan = find_plan(model, PATTERN, layout="fused")
    ids = torch.randint(0, args.vocabulary, (1, args.tokens))
    config = CompileConfig(micro_batch_size=1, layout="fused")
    objective = dense_objective(model, "kl", Samples.of(ids), 1)
    fisher = fisher_information(model, plan, "kl", Samples.of(ids), config, NoProgress())
    spaces = [space for space in plan.spaces if not space.frozen]
    indices = {space.name: identity(space.units) for space in spaces}
    with hard_masked(model, plan, random_importances(model, plan), fisher, config) as masks:
        searcher = Searcher(masks, spaces, Samples.of(ids), objective, Searched(block=args.search_block), config)
        masks.set(indices)
        passes, gains, count = [], [], 0
        for number in range(args.repeats + 1):
            passes.append(timed(lambda: masks.take_gradients(objective, Samples.of(ids)), model.device))
            found = []
            gains.append(timed(lambda: found.append(searcher.swaps(indices, 1.0, number)), model.device))  # noqa: B023
            count = found[0].count
    return passes[1:], gains[1:], count


if __name__ == "__main__":
    main()
