"""``python -m benchmarks.gpu``: the whole of it on tiny shapes, its result file, and what it says without a GPU."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
HEAVY = ("datasets", "pyarrow", "lm_eval", "pandas", "matplotlib")


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the benchmark after ``code`` in the repository's root."""
    start = f"import sys, runpy\n{code}\nsys.argv = ['gpu', *sys.argv[1:]]\nrunpy.run_module('benchmarks.gpu', run_name='__main__')"  # noqa: E501
    return subprocess.run(
        [sys.executable, "-c", start, *arguments], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture
def command(monkeypatch):
    """The module that the command runs; the repository's root is on the path, as with ``python -m``."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.gpu.__main__")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> tuple[dict, str]:
    """The result and what was printed, where neither datasets nor the like can be imported."""
    folder = tmp_path_factory.mktemp("rehearsal")
    forbid = f"for name in {HEAVY}: sys.modules[name] = None"
    done = run(forbid, "--out", str(folder), "--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "rehearsal.json").read_text()), done.stdout


def test_every_row_runs(rehearsal):
    result, _ = rehearsal
    assert result["left_out"] == []
    assert result["finished"]
    rows = {row["row"] for row in result["rows"]}
    assert rows >= {
        "permute", "RMSNorm + permute", "sinkhorn forward", "sinkhorn backward", "sinkhorn forward + backward",
        "assignment", "nm_mask forward", "nm_mask backward", "sparse_linear, 1 tokens", "sparse_linear, 16 tokens",
        "2:4 prefill", "learning step", "inference, a layer", "inference, a model",
    }  # fmt: skip


def test_every_sample_and_what_it_was_measured_on_is_kept(rehearsal):
    result, _ = rehearsal
    assert set(result["versions"]) >= {"permtriton", "torch", "triton", "transformers", "python"}
    assert set(result["hardware"]) >= {"device", "system", "cores"}
    assert result["ceilings"]["copy_gb_s"] > 0
    for row in result["rows"]:
        for told in row["times"].values():
            assert told["p20_us"] <= told["p50_us"] <= told["p80_us"]
            assert told["how"] == "host"
            assert told["samples_us"]


def test_a_rehearsal_passes_and_fails_nothing(rehearsal):
    result, printed = rehearsal
    assert result["rehearsal"]
    assert {goal["passed"] for row in result["rows"] for goal in row["goals"]} == {None}
    assert "the times mean nothing" in printed


def test_the_most_important_goals_are_in_it(rehearsal):
    result, _ = rehearsal
    bounds = {
        (row["row"], goal["name"]): (goal["least"], goal["most"]) for row in result["rows"] for goal in row["goals"]
    }
    assert bounds["assignment", "milliseconds"] == (None, 5.0)
    assert bounds["assignment", "times faster than serial scipy"] == (200.0, None)
    assert bounds["sparse_linear, 1 tokens", "times faster than cuBLAS dense"] == (1.65, None)
    assert bounds["learning step", "times a dense forward + backward"] == (None, 1.10)
    assert bounds["RMSNorm + permute", "times the norm alone"] == (None, 1.03)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(command, tmp_path, capsys):
    assert command.main(["--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "CUDA GPU" in told
    assert "--rehearse" in told
    assert list(tmp_path.iterdir()) == []


def rehearse(command, folder: Path, *rows: str) -> tuple[int, dict]:
    code = command.main(["--out", str(folder), "--rehearse", *(word for row in rows for word in ("--only", row))])
    return code, json.loads((folder / "rehearsal.json").read_text())


def test_a_row_that_fails_leaves_the_others(command, tmp_path, monkeypatch):
    monkeypatch.setattr(command.kernels.cases, "nm_mask_case", None)
    code, result = rehearse(command, tmp_path, "nm_mask", "permute")
    assert code == 1
    assert [left["row"] for left in result["left_out"]] == ["nm_mask"]
    assert {row["row"] for row in result["rows"]} == {"permute"}


def test_a_wrong_kernel_gets_no_time(command, tmp_path, monkeypatch):
    make = command.kernels.cases.permute_case

    def broken(*arguments):
        case = make(*arguments)
        return dataclasses.replace(case, run=lambda x, index: case.run(x, index) + 1)

    monkeypatch.setattr(command.kernels.cases, "permute_case", broken)
    code, result = rehearse(command, tmp_path, "permute")
    assert code == 1
    assert result["rows"] == []
    assert "is wrong" in result["left_out"][0]["why"]


def test_no_row_is_started_that_may_not_end_in_time(command, tmp_path, monkeypatch):
    monkeypatch.setattr(command.Bench, "pick", lambda self, full, tiny: full if full == 75 else tiny)
    monkeypatch.setattr(command.Bench, "seconds_left", 20.0)
    code, result = rehearse(command, tmp_path, "permute", "norm")
    assert code == 1
    assert [(left["row"], left["why"]) for left in result["left_out"]] == [
        ("permute", "20 s were left, it may need 75")
    ]


def test_the_table_in_markdown(command, rehearsal):
    lines = importlib.import_module("benchmarks.gpu.table").markdown(rehearsal[0]).splitlines()
    assert lines[0].startswith("| row | case | ours, us |")
    assert all(line.count("|") == lines[0].count("|") for line in lines[:-2])
