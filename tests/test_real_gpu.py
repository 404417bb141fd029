"""The benchmark of a real model on a GPU: which commands it runs, what it writes, and how it continues."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gpu.checks import Ran
from benchmarks.real import gpu, inputs

from .gguf_files import llama, write_gguf

COST = {"seconds": 2.0, "cpu_seconds": 1.0, "peak_bytes": 5}
RECORD = {
    "memory": {"peak": 7}, "seconds": {"refit": 3.0}, "calibration": {"shape": [2, 8]}, "device": "a GPU",
    "dtype": "float32", "determinism": {}, "versions": {},
}  # fmt: skip


class Stand:
    """Runs the benchmark with commands that only say what they are asked."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder, self.calls, self.ends = folder, [], {}
        self._patch = monkeypatch
        write_gguf(folder / inputs.GGUF, llama())
        save_file({"input_ids": torch.zeros(3, 16, dtype=torch.int64)}, folder / "test.safetensors")
        save_file({"input_ids": torch.zeros(2, 8, dtype=torch.int64)}, folder / "ids.safetensors")
        (folder / "text.txt").write_text("A text.")
        monkeypatch.setattr(gpu, "process", self._process)

    def __call__(self, rows: str, ids: str = "ids.safetensors", **more: object) -> list[dict]:
        self.calls = []
        flags = {"model": self.folder / inputs.GGUF, "ids": self.folder / ids, "rows": rows, "device": "cpu",
                 "held-out": self.folder / "test.safetensors", "output": self.folder / "out.json"} | more  # fmt: skip
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        self._patch.setattr(sys, "argv", ["benchmarks.real.gpu", *words])
        gpu.main()
        return json.loads((self.folder / "out.json").read_text())["rows"]

    def _process(self, words: list[str], seconds: float, **environment: str) -> Ran:
        assert seconds <= 600
        words = words[words.index("-m") + 1 :]
        if words[0] == "benchmarks.real.evaluate":
            folder, *_, windows, kl_windows, device = words[1:]
            self.calls.append(f"evaluate {Path(folder).name}, {windows} windows, {kl_windows} for KL, {device}")
            return Ran(0, f'noise\n{{"perplexity": 7.0}}\n{json.dumps(COST)}\n', 2.0)
        given = dict(pairwise(words))
        shape = f"{given['--samples']}x{given['--sequence-length']}"
        self.calls.append(f"prune {given['--recipe']}, {shape}, {given['--device']}")
        if given["--recipe"] in self.ends:
            return self.ends[given["--recipe"]]
        folder = Path(given["--output"])
        folder.mkdir(exist_ok=True)
        (folder / "permtriton.json").write_text(json.dumps(RECORD))
        return Ran(0, f"noise\n{json.dumps(COST)}\n", 2.0)


@pytest.fixture
def stand(tmp_path, monkeypatch) -> Stand:
    return Stand(tmp_path, monkeypatch)


def test_rows_are_pruned_and_measured_on_the_device(stand):
    dense, fast = stand("dense,fast", **{"kl-windows": 2})
    assert stand.calls == [
        "evaluate model, 3 windows, 2 for KL, cpu", "prune fast, 2x8, cpu",
        "evaluate fast-ids-2x8-seed0, 3 windows, 2 for KL, cpu",
    ]  # fmt: skip
    assert "pruning" not in dense
    assert fast["calibration"] == "ids 2x8"
    assert fast["command"] == (
        f"python -m benchmarks.real.gpu --model {inputs.GGUF} --ids ids.safetensors --held-out test.safetensors "
        "--rows fast --kl-windows 2 --device cpu"
    )
    assert fast["pruning"] == {
        **COST, "peak_device_bytes": 7, "stages": {"refit": 3.0}, "generated": None, "calibration": {"shape": [2, 8]},
        "device": "a GPU", "dtype": "float32", "determinism": {}, "versions": {},
    }  # fmt: skip
    assert fast["evaluation"] == {"perplexity": 7.0, **COST}


@pytest.mark.parametrize(
    ("ran", "error"),
    [
        (Ran(None, "loading\n", 3.2), "cut off after 3 s"),
        (Ran(2, f"Traceback\nRuntimeError: no memory\n\n{json.dumps(COST)}\n", 1.0), "exit code 2: RuntimeError: no "
         "memory"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_end_costs_only_itself_and_is_tried_again(stand, ran, error):
    stand.ends = {"fast": ran}
    fast, default = stand("fast,default")
    assert fast["error"] == error
    assert "evaluation" in default
    stand.ends = {}
    fast, _ = stand("fast,default")
    assert fast["earlier_errors"] == [error]
    assert fast.keys() & {"error", "evaluation"} == {"evaluation"}
