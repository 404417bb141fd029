"""Measures a folder by permtriton's own evaluation, whoever wrote it, and prints JSON.

python -m benchmarks.real.evaluate FOLDER DENSE IDS.safetensors WINDOWS KL_WINDOWS [DEVICE]

DEVICE is cpu, or cuda, whose peak memory is then printed, too.
"""

import json
import sys
from typing import Any

from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from permtriton import NMPattern
from permtriton.cli.processor import suit_processor
from permtriton.evaluation.evaluate import measure_model
from permtriton.model.load import load_model
from permtriton.model.source import Source
from permtriton.util.machine import peak_memory
from permtriton.util.progress import NoProgress

PATTERN = NMPattern(2, 4)


def main() -> None:
    folder, dense, ids, windows, kl_windows, *more = sys.argv[1:]
    device = more[0] if more else "cpu"
    held_out = load_file(ids)["input_ids"][: int(windows)]
    suit_processor(Source(folder, device=device), NoProgress())
    model = load_model(Source(folder, device=device))
    found: dict[str, Any] = {"perplexity": measure_model(model, held_out=held_out).perplexity}
    if folder != dense and int(kl_windows):
        against = load_model(Source(dense, device=device))
        found["kl"] = measure_model(model, held_out=held_out[: int(kl_windows)], dense=against).kl
    if model.device.type == "cuda":
        found["gpu_peak_bytes"] = peak_memory(model.device)
    print(json.dumps({**found, **pruned(model)}))


def pruned(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the share of zeros in the linears of the layers, and how many of them are not 2:4."""
    zeros = total = others = 0
    for module in model.base_model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            zeros, total = zeros + int((weight == 0).sum()), total + weight.numel()
            kept = (weight != 0).unflatten(1, (-1, PATTERN.group)).sum(-1)
            others += int(kept.max()) > PATTERN.kept
    return {"zeros": zeros / total, "linears_not_2of4": others}


if __name__ == "__main__":
    main()
