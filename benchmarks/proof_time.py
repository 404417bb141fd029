"""How long each check of a compilation takes, in CPU seconds of one thread.

    python benchmarks/proof_time.py MODEL

MODEL is a folder. The order is random, because the checks are the same for any order, and a good one takes longer to
find; the masks are by magnitude. The proof at the end contains passes, which count in both rows.

The figures go to results/proof-time-cpu.json, under "now". Those under "before" were measured in the same way on the
same machine; they are of the commit named there, after which checks share their runs of the model, and stay.
"""

import argparse
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import permtriton
from permtriton.checkpoint import save
from permtriton.driver import pipeline as compiler
from permtriton.methods import run
from permtriton.methods.order.heuristic import Heuristic
from permtriton.model.reference import Reference
from permtriton.util.machine import device_name, versions

RESULT = Path(__file__).resolve().parent / "results" / "proof-time-cpu.json"
SEQUENCES, TOKENS = 2, 128
OPTIONS = {"importance": "magnitude"}
# What a check does -> where it is.
CHECKS: dict[str, tuple[Any, str]] = {
    "passes, with their verification": (run, "run_passes"),
    "the proof after the last step": (compiler, "prove"),
    "the permuted model against the dense outputs": (Reference, "check"),
    "the saved folder": (save, "verify_tensors"),
    "the saved folder, loaded again": (save, "compare_reloaded"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = json.loads(RESULT.read_text(encoding="utf-8"))
    report["now"] = measure(args.model)
    RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(folder: Path) -> dict[str, Any]:
    """Compiles and saves a model; returns the seconds of each check, and of everything."""
    seconds = dict.fromkeys(CHECKS, 0.0)

    def timed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.process_time()
            try:
                return original(*arguments, **options)
            finally:
                seconds[name] += time.process_time() - started

        return call

    for name, (owner, attribute) in CHECKS.items():
        setattr(owner, attribute, timed(name, getattr(owner, attribute)))
    Heuristic.indices = _random_order  # type: ignore[method-assign]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(model.config.vocab_size, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
    config = permtriton.config_from(OPTIONS, "heuristic,mask")
    started = time.process_time()
    compiled = compiler.compile_model(model, None, config, ids=ids)
    whole = time.process_time() - started
    with tempfile.TemporaryDirectory() as output:
        compiled.save_pretrained(Path(output) / "out")
    return {
        "commit": _commit(),
        "parameters": sum(each.numel() for each in model.parameters()),
        "ids": [SEQUENCES, TOKENS],
        "seconds": {name: round(each, 2) for name, each in seconds.items()},
        "whole_s": round(whole, 2),
        "device": device_name(torch.device("cpu")),
        "system": platform.platform(),
        "versions": versions(),
    }


def _random_order(_step: Heuristic, run: Any) -> dict[str, torch.Tensor]:
    generator, found = torch.Generator().manual_seed(0), {}
    for space in (each for each in run.plan.spaces if not each.frozen):
        starts = torch.tensor([0, *space.segments]).cumsum(0).tolist()
        parts = zip(starts, space.segments, strict=False)
        found[space.name] = torch.cat([start + torch.randperm(size, generator=generator) for start, size in parts])
    return found


def _commit() -> str:
    folder = Path(permtriton.__file__).parent
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
