"""Measures what FP8 costs a compiled folder: weights alone, activations too, and three ways to round the weights.

python -m benchmarks.fp8_rounding FOLDER --calibration TEXT --eval-data TEXT --output RESULT.json

All rows are of one model in memory, in float32. The KL divergence to the model that is not rounded is far less noisy
than the difference of two perplexities. A row that is in RESULT.json already is not measured again.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

import permtriton
from benchmarks.known_run import Known
from benchmarks.shared import PATTERN, find_plan
from permtriton.config import CalibrationConfig
from permtriton.data.calibration import calibration_samples
from permtriton.data.held_out import read_held_out
from permtriton.kernels.quantize import round_to_fp8
from permtriton.methods.train.round import Round
from permtriton.model.modules import SparseLinearFp8, replace_module
from permtriton.model.source import Source
from permtriton.model.tokenizer import load_tokenizer
from permtriton.util.machine import device_name, versions

WINDOW = 1024  # tokens, as in benchmarks/real
NOT_ROUNDED, ALONE = "not rounded", "each weight alone"
STEPS = {"errors made up for": Round(), "scale of each row chosen": Round(sweeps=0)}  # way to round -> the step
ACTIVATIONS = {"as they are": False, "in FP8": True}


class Measured:
    """A model in memory whose linears are rounded in some way.

    Attributes:
        windows: token ids, ``[windows, WINDOW]``.
        log_probabilities: of the model that is not rounded, one tensor per window, once they are measured.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).eval()
        self.tokenizer, self.arguments = load_tokenizer(Source(str(arguments.folder))), arguments
        held_out, _ = read_held_out("", arguments.eval_data, self.tokenizer, self.model, WINDOW, arguments.windows)
        assert held_out is not None
        self.windows = held_out.inputs["input_ids"]
        self.plan = find_plan(self.model, PATTERN)
        self.names = [name for _, name in self.plan.linears()]
        self.weights = {name: self._weight(name).detach().clone() for name in self.names}
        self.log_probabilities: list[Tensor] = []

    def round(self, way: str, seed: int) -> dict[str, Any]:
        """Rounds the weights in a way; returns what the step reports."""
        started = time.process_time()
        for name in self.names:
            self._weight(name).data.copy_(self.weights[name])
            if way == ALONE:
                stored, scale = round_to_fp8(self.weights[name])
                self._weight(name).data.copy_(stored.float() * scale)
        if way not in STEPS:
            return {}
        data = CalibrationConfig(str(self.arguments.calibration), self.arguments.samples, self.arguments.length)
        samples, _ = calibration_samples(
            permtriton.CompileConfig(calibration=data, seed=seed), self.tokenizer, self.model
        )
        parts = STEPS[way].run(Known(self.model, self.plan, samples, permtriton.config_from())).parts
        errors = {f"error_at_{when}": sum(part[when] for part in parts) / len(parts) for when in ("start", "end")}
        return {**errors, "cpu_seconds": time.process_time() - started}

    @torch.no_grad()
    def measure(self, in_fp8: bool) -> dict[str, float]:
        """Returns perplexity and KL of the present weights; of a model that is not rounded, keeps what it says."""
        if in_fp8:
            for name in self.names:
                module = SparseLinearFp8.from_linear(self.model.get_submodule(name))
                replace_module(self.model, name, module.pack(self.plan.patterns[name]))
        first = not self.log_probabilities
        loss, divergences = 0.0, list[float]()
        for number, said in enumerate(self._said()):
            loss += float(cross_entropy(said[:-1], self.windows[number, 1:])) / len(self.windows)
            if first:
                self.log_probabilities.append(said)
            else:
                expected = self.log_probabilities[number]
                divergences.append(float((expected.exp() * (expected - said)).sum(-1).mean()))
        for name in self.names if in_fp8 else ():
            self.model.get_submodule(name).unpack()
        return {"perplexity": math.exp(loss), **({} if first else {"kl": sum(divergences) / len(divergences)})}

    def _said(self) -> Iterator[Tensor]:
        for window in self.windows:
            yield self.model(window.unsqueeze(0)).logits[0].float().log_softmax(-1)

    def _weight(self, name: str) -> Tensor:
        return self.model.get_submodule(name).get_parameter("weight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--calibration", type=Path, required=True, help="text that the step reads")
    parser.add_argument("--eval-data", type=Path, required=True, help="text to measure the perplexity on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    measured = Measured(arguments)
    rows = json.loads(arguments.output.read_text())["rows"] if arguments.output.exists() else []
    done = {(row["way"], row["seed"], row["activations"]) for row in rows}
    todo = [(NOT_ROUNDED, 0), (ALONE, 0), *((way, seed) for seed in arguments.seeds for way in STEPS)]
    for way, seed in todo:
        left = [name for name in ACTIVATIONS if (way, seed, name) not in done or way == NOT_ROUNDED]
        report = measured.round(way, seed) if left else {}
        for activations in left[:1] if way == NOT_ROUNDED else left:
            found = {**report, **measured.measure(ACTIVATIONS[activations])}
            row = {"way": way, "seed": seed, "activations": activations, **found}
            rows = [row, *rows[1:]] if way == NOT_ROUNDED else [*rows, row]
            print(row, flush=True)
            result = {
                "command": f"python -m benchmarks.fp8_rounding {' '.join(Path(word).name for word in sys.argv[1:])}",
                "windows": len(measured.windows), "window": WINDOW,
                "calibration": [arguments.samples, arguments.length],
                "device": device_name(torch.device("cpu")), "versions": versions(), "rows": rows,
            }  # fmt: skip
            arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
