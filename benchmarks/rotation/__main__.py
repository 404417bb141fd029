"""Does a rotation of the channels before pruning lower the KL that is left after the refit? For LLaMA-like models, 2:4.

The gains of the norms are folded into the linears that read them. Then the outputs of the dense model stay the same if
one orthogonal matrix R turns the residual stream (readers ``W R``, writers ``R^T W``) and one matrix per key-value head
turns its values (rows of v, columns of o), which is proved in float64 on a short text. R is searched with Adam by the
scores of `permtriton.methods.measure.statistics`, ``S = (W R)^2 / diag(R^T H^-1 R)``: first the entropy of each
row's scores, then, with the columns of R in the heuristic order, the share of the scores that 2:4 masks lose. Some
linears and rows are drawn per step. The turned model is compiled with ``heuristic,refit`` in layout ``portable`` and
measured beside the dense one. A rotation of some layers alone is impossible: all of them share one stream.

    python -m benchmarks.rotation demo --variants unfolded,folded,stream,heads,both --seeds 0,1,2
    python -m benchmarks.rotation MODEL --texts TEXTS --samples 8 --sequence-length 512 --windows 8

TEXTS is a folder with valid.txt, which calibrates, and test.txt, which is measured. The result file is written after
each variant; the same command continues where it was interrupted.
"""

import argparse
import copy
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import permtriton
from benchmarks.rotation.measured import Measured
from benchmarks.rotation.search import Part, Variant, ordered, search, share_lost, start_of
from benchmarks.rotation.turn import fold_gains, in_full_precision, turn_heads, turn_stream
from permtriton.config import CalibrationConfig
from permtriton.data.calibration import calibration_samples
from permtriton.data.held_out import read_held_out
from permtriton.demo import FOLDER
from permtriton.model.load import load_original
from permtriton.model.name import DEMO
from permtriton.model.source import Source
from permtriton.util.durable import replace_file
from permtriton.util.machine import device_name, versions

RESULTS = Path(__file__).resolve().parent.parent / "results"
SETTINGS = ("samples", "sequence_length", "windows", "entropy_steps", "loss_steps", "parts", "rows")
TOLERANCE = 1e-9  # of the turned model's outputs in float64, relative to the largest
VARIANTS = {
    "unfolded": Variant(folded=False),
    "folded": Variant(),
    "heads": Variant(heads=True),
    "stream": Variant("identity"),
    "both": Variant("identity", heads=True),
    "random": Variant("random", entropy=False, loss=False),
    "eigenvectors": Variant("eigenvectors", entropy=False, loss=False),
    "stream-entropy": Variant("identity", loss=False),
    "stream-loss": Variant("identity", entropy=False),
    "stream-random-start": Variant("random"),
    "stream-eigenvector-start": Variant("eigenvectors"),
    "stream-fisher": Variant("identity", fisher=True),
    "stream-fixed": Variant("identity", fixed=True),
    "heads-fixed": Variant(heads=True, fixed=True),
    "both-fixed": Variant("identity", heads=True, fixed=True),
    "both-fisher": Variant("identity", heads=True, fisher=True, fixed=True),
}


class Experiment:
    """The dense model, and the texts of one seed.

    Attributes:
        dense: the model as it is, float32.
        ids: calibration sequences, int64 ``[samples, tokens]``.
        held_out: windows of held-out text, int64 ``[windows, tokens]``.
    """

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self.args, self.seed = args, seed
        folder = FOLDER if args.model == DEMO else Path(args.model)
        texts = [str(args.texts / name) for name in ("valid.txt", "test.txt")] if args.texts else [DEMO, DEMO]
        self.dense, tokenizer = load_original(Source(str(folder)))
        calibration = CalibrationConfig(texts[0], args.samples, args.sequence_length)
        drawn, _ = calibration_samples(
            permtriton.CompileConfig(calibration=calibration, seed=seed), tokenizer, self.dense
        )
        held_out, _ = read_held_out("", texts[1], tokenizer, self.dense, 1024, args.windows)
        assert held_out is not None
        self.ids, self.held_out = drawn.inputs["input_ids"], held_out.inputs["input_ids"]

    @cached_property
    def measured(self) -> Measured:
        model = copy.deepcopy(self.dense)
        fold_gains(model)
        return Measured(model, self.ids)

    def row(self, variant: Variant) -> dict[str, Any]:
        """Turns, compiles and measures a copy of the model, and returns the figures."""
        started = time.process_time()
        figures, rotations, stream = {}, None, None
        if variant.heads:
            rotations, figures["heads: share lost"] = self.found(self.measured.head_parts(), "identity", variant)
            rotations = rotations.unflatten(0, (self.dense.config.num_hidden_layers, -1))
        if variant.stream:
            measured = self.measured if rotations is None else self.measured.with_heads(rotations)
            parts = measured.stream_parts(variant.fisher)
            stream, figures["stream: share lost"] = self.found(parts, variant.stream, variant)
        searched = time.process_time()
        model, figures["difference"] = self.turned(variant, rotations, stream)
        compiled = permtriton.compile(model, recipe="heuristic,refit", data=self.ids, seed=self.seed)
        compiled_at = time.process_time()
        evaluated = compiled.evaluate(self.held_out, against=self.dense)
        errors = [part["end"] for step in compiled.report["steps"] if step["name"] == "refit" for part in step["parts"]]
        return {
            "kl": evaluated.kl,
            "perplexity": evaluated.perplexity,
            "dense_perplexity": evaluated.dense_perplexity,
            "refit_error": fmean(errors),
            **figures,
            "search_cpu_seconds": round(searched - started, 1),
            "compile_cpu_seconds": round(compiled_at - searched, 1),
        }

    def found(self, parts: Sequence[Part], kind: str, variant: Variant) -> tuple[Tensor, list[float]]:
        """Returns the rotations that a search finds, and the share of scores that masks lose before and after it.

        Before it, the channels have their heuristic order.
        """
        identity = start_of("identity", parts, self.seed)
        searched = parts
        if variant.fixed:
            with torch.no_grad():
                searched = [replace(each, scale=float(each.totals(identity))) for each in parts]
        rotations = search(searched, start_of(kind, parts, self.seed), variant, self.args, self.seed)
        with torch.no_grad():
            return rotations, [float(share_lost(parts, each)) for each in (ordered(parts, identity), rotations)]

    def turned(self, variant: Variant, heads: Tensor | None, stream: Tensor | None) -> tuple[PreTrainedModel, float]:
        """Returns the turned model, and how far its outputs are from the dense ones in float64, relative to these."""
        model = copy.deepcopy(self.dense).double()
        with torch.no_grad(), in_full_precision(model):
            expected = model(self.held_out[:1, :64]).logits
            if variant.folded:
                fold_gains(model)
            if heads is not None:
                turn_heads(model, torch.linalg.qr(heads.double())[0])
            if stream is not None:
                turn_stream(model, torch.linalg.qr(stream[0].double())[0])
            difference = float((model(self.held_out[:1, :64]).logits - expected).abs().max() / expected.abs().max())
        if difference > TOLERANCE:
            sys.exit(f"the turned model's outputs differ by {difference:.1e} of the dense ones: the rotation is wrong")
        return model.float(), difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="demo, or the folder of a LLaMA-like model")
    parser.add_argument("--texts", type=Path, help="folder with valid.txt and test.txt; without it, the demo's texts")
    parser.add_argument("--variants", default="unfolded,folded,heads,stream,both", help=", ".join(VARIANTS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--windows", type=int, default=16, help="of 1024 tokens, to measure on")
    parser.add_argument("--entropy-steps", type=int, default=150)
    parser.add_argument("--loss-steps", type=int, default=200)
    parser.add_argument("--parts", type=int, default=8, help="linears, or linears of one input, that a step draws")
    parser.add_argument("--rows", type=int, default=512, help="rows of each that a step draws")
    parser.add_argument("--output", type=Path, help="result file; benchmarks/results/rotation-MODEL.json without it")
    args = parser.parse_args()
    output = args.output or RESULTS / f"rotation-{Path(args.model).name}.json"
    settings = {name: getattr(args, name) for name in SETTINGS} | {"model": Path(args.model).name}
    report = {"settings": settings, "system": platform.platform(), "device": device_name(torch.device("cpu"))}
    report |= {"versions": versions(), "rows": []}
    if output.is_file():
        earlier = json.loads(output.read_text(encoding="utf-8"))
        if earlier["settings"] != settings:
            sys.exit(f"{output} has rows of other settings, {earlier['settings']}: give another --output")
        report["rows"] = earlier["rows"]
    for seed in map(int, args.seeds.split(",")):
        experiment = None
        for name in args.variants.split(","):
            if any((row["variant"], row["seed"]) == (name, seed) for row in report["rows"]):
                continue
            experiment = experiment or Experiment(args, seed)
            row = {"variant": name, "seed": seed, **experiment.row(VARIANTS[name])}
            report["rows"].append(row)
            replace_file(output, lambda path: path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8"))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
