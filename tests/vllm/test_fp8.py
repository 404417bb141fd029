"""vLLM with every plugin switched off serves a folder of format fp8, and computes what transformers computes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from permtriton.checkpoint.export import export

from .engine import TOKENS, engine, expected_greedy, greedy, prompts

SCRIPT = """
import sys
from tests.vllm.engine import engine, greedy, prompts

if __name__ == "__main__":
    with engine(sys.argv[1]) as llm:
        model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
        method = type(model.model.layers[0].mlp.down_proj.scheme).__name__
        print("found", json.dumps([method, greedy(llm, prompts(sys.argv[1])[:8])]))
    assert "permtriton.serving.plugin" not in sys.modules
"""


def test_vllm_serves_it_without_our_plugin(demo_folders, tmp_path):
    folder = tmp_path / "fp8"
    export(demo_folders["portable"], folder, "fp8")
    (tmp_path / "serve.py").write_text("import json" + SCRIPT)
    environment = {**os.environ, "VLLM_PLUGINS": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, tmp_path / "serve.py", folder]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found = next(line for line in result.stdout.splitlines() if line.startswith("found"))
    method, tokens = json.loads(found.removeprefix("found"))
    assert method == "CompressedTensorsW8A8Fp8"
    expected = expected_greedy(folder, prompts(folder)[:8])
    same = sum(a == b for x, y in zip(tokens, expected, strict=True) for a, b in zip(x, y, strict=True))
    assert same > 0.85 * len(expected) * TOKENS  # two roundings of activations to 8 bits: a near tie may turn


@pytest.mark.slow(but=["portable-True"])
@pytest.mark.parametrize(("name", "eager"), [("portable", True), ("fused", True), ("portable", False)])
def test_a_packed_folder_in_fp8_generates_the_same_tokens(demo_folders, tmp_path, name, eager):
    export(demo_folders[name], tmp_path / "packed", "packed-fp8")
    inputs = prompts(tmp_path / "packed")[:8]  # on a CPU, each product in transformers unpacks its weight
    with engine(tmp_path / "packed", enforce_eager=eager) as llm:
        tokens = greedy(llm, inputs)
    expected = expected_greedy(tmp_path / "packed", inputs)
    same = [a == b for x, y in zip(tokens, expected, strict=True) for a, b in zip(x, y, strict=True)]
    assert sum(same) > 0.95 * len(same)  # an activation on the border between two numbers of 8 bits may turn
    if name == "portable":  # the folder that vLLM reads by itself
        export(demo_folders[name], tmp_path / "fp8", "fp8")
        theirs = expected_greedy(tmp_path / "fp8", inputs)
        same = [a == b for x, y in zip(tokens, theirs, strict=True) for a, b in zip(x, y, strict=True)]
        assert sum(same) > 0.95 * len(same)
