"""The same seed gives the same bytes in another process on the same machine, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from permtriton import config_from
from permtriton.driver import prepare
from permtriton.driver.pipeline import compile_model

from . import zoo

RECIPES = {
    "default": [],
    "values": ["--recipe", "values", "--search-rounds", "1"],
    "learned": [
        "--recipe",
        "learned,mask",
        "--learn-epochs",
        "1",
        "--learn-block-size",
        "16",
        "--learn-batch-size",
        "4",
    ],
    "sparsegpt": ["--recipe", "heuristic,sparsegpt"],
}
PROGRAM = """
import json, sys
from typer.testing import CliRunner
from permtriton.cli.main import app
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
"""


@pytest.fixture(scope="module")
def runs(model_folder, tmp_path_factory) -> list[Path]:
    """The outputs of every recipe in two processes, in which sets and dicts of strings have other orders."""
    folders, processes = [tmp_path_factory.mktemp(f"run{number}") for number in range(2)], []
    for number, folder in enumerate(folders):
        commands = [
            ["compile", str(model_folder), "--calibration", str(model_folder.parent / "text.txt"), "--samples", "4",
             "--sequence-length", "16", "--eval-data", "none", "--seed", "7", "--output", str(folder / name), *options]
            for name, options in RECIPES.items()
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONHASHSEED": str(number + 1), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output.decode()
    return folders


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow
def test_weights_are_equal_byte_for_byte(runs, recipe):
    one, other = [(folder / recipe / "model.safetensors").read_bytes() for folder in runs]
    assert one == other


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow
def test_reports_are_equal_but_for_times_and_memory(runs, recipe):
    def timeless(value: object) -> object:
        if isinstance(value, dict):
            return {name: timeless(each) for name, each in value.items() if name not in ("seconds", "memory")}
        return [timeless(each) for each in value] if isinstance(value, list) else value

    one, other = [json.loads((folder / recipe / "permtriton.json").read_text()) for folder in runs]
    assert timeless(one) == timeless(other)


@pytest.mark.slow
def test_micro_batches_change_no_bit(monkeypatch):
    """Nor how many samples a pass without gradients takes; in float64, so that the model computes the same."""
    options = {"heuristic_row_weights": "fisher", "refit_iterations": 1}
    models = [zoo.tiny_llama(num_hidden_layers=1).double() for _ in range(2)]
    for model, size in zip(models, (1, 3), strict=True):
        monkeypatch.setattr(prepare, "TOKENS_WITHOUT_LOGITS", size * 12)
        config = config_from({"micro_batch_size": size, **options}, "heuristic,refit")
        compile_model(model, None, config, ids=zoo.tiny_ids(4, 12))
    one, other = (model.state_dict() for model in models)
    assert [name for name, tensor in one.items() if not torch.equal(other[name], tensor)] == []
