"""Folders of the demo model, refitted, in every layout and format; each is made once, and no test writes into it."""

import os
import shutil
from pathlib import Path

import pytest

from permtriton.cli.main import app

from ..desk import RUNNER

# Read by vLLM when it is imported: an engine in this process, with a small cache.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
os.environ["HF_HUB_OFFLINE"] = "1"

COMPILE = ("compile", "demo", "--sparsity", "2:4", "--pattern", "*.1.mlp.down_proj=4:8", "--recipe", "heuristic,refit",
           "--samples", "4", "--sequence-length", "64", "--eval-data", "none")  # fmt: skip
FOLDERS = ("portable", "portable-packed", "fused", "fused-packed")


@pytest.fixture(scope="session")
def demo_folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("demo")
    for layout in ("portable", "fused"):
        dense, packed = str(root / layout), str(root / f"{layout}-packed")
        for command in (
            [*COMPILE, "--layout", layout, "--output", dense],
            ["export", dense, "--format", "packed", "--output", packed],
        ):
            result = RUNNER.invoke(app, command)
            assert result.exit_code == 0, result.output
    return {name: root / name for name in FOLDERS}


@pytest.fixture
def copy_of(demo_folders, tmp_path):
    """Returns a function that copies one of the folders, to be damaged."""
    return lambda name: Path(shutil.copytree(demo_folders[name], tmp_path / name))
