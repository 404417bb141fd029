"""How the time of statistics (obs) and of SparseGPT grows with the number of layers.

Each is run twice: with layers on the outputs of the layer before, and with every layer on a run of the model from its
start, which is quadratic in the depth. One JSON line per depth is printed.

    python benchmarks/depth.py --layers 8,16,32 --sequences 16 > benchmarks/results/depth-cpu.jsonl
"""

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from shared import PATTERN, llama, timed
from torch import Tensor
from transformers import PreTrainedModel

from permtriton import find_plan
from permtriton.config import CompileConfig
from permtriton.data.samples import Samples
from permtriton.machine import device_name, versions
from permtriton.methods import statistics, weights
from permtriton.methods.sparsegpt import SparseGPT
from permtriton.model.plan import Plan
from permtriton.progress import NoProgress
from permtriton.running.layer_inputs import LayerInputs, from_model, layer_by_layer

BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="8,16,32", help="numbers of layers, separated by commas")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    for layers in map(int, args.layers.split(",")):
        shape = argparse.Namespace(
            layers=layers, hidden=args.hidden, intermediate=args.hidden * 11 // 4, heads=4, vocabulary=1024,
            tokens=args.tokens, dtype="float32", device="cpu",
        )  # fmt: skip
        ids = torch.randint(0, 1024, (args.sequences, args.tokens), generator=torch.Generator().manual_seed(0))
        seconds: dict[str, float] = {}
        for how, inputs in (("one by one", layer_by_layer), ("from the start", _from_start)):
            torch.manual_seed(0)
            model = llama(shape)
            for what, took in measure(model, find_plan(model, PATTERN), ids, inputs).items():
                seconds[f"{what}, {how}"] = round(took, 2)
        print(json.dumps({
            "seconds": seconds, "sequences": args.sequences, "shape": vars(shape), "device": device_name(model.device),
            "system": platform.platform(), "versions": versions(),
        }), flush=True)  # fmt: skip


def _from_start(
    model: PreTrainedModel, plan: Plan, samples: Samples, batch: int, **options: Any
) -> Iterator[LayerInputs]:
    """Takes the place of `layer_by_layer`, whose options it does not need."""
    return (from_model(model, sites, samples, batch) for sites in plan.layers())


def measure(model: PreTrainedModel, plan: Plan, ids: Tensor, inputs: Callable[..., Any]) -> dict[str, float]:
    """Returns the seconds of statistics and of SparseGPT where ``inputs`` stands in for `layer_by_layer`."""
    found: dict[str, Tensor] = {}
    config = CompileConfig(sparsity=PATTERN, importance="obs")

    def measured() -> None:
        found.update(statistics.site_statistics(model, plan, "obs", Samples.of(ids), BATCH, NoProgress()))

    def updated() -> None:
        weights.update_weights(model, plan, found, Samples.of(ids), BATCH, SparseGPT(), config, NoProgress())

    with mock.patch.object(statistics, "layer_by_layer", inputs), mock.patch.object(weights, "layer_by_layer", inputs):
        return {"statistics": timed(measured, model.device), "SparseGPT": timed(updated, model.device)}


if __name__ == "__main__":
    main()
