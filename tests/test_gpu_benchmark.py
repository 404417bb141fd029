"""``python -m benchmarks.gpu``: the whole of it on tiny shapes, its result file, and what it does when things fail."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from permtriton.kernels.assignment import assignment_reference

ROOT = Path(__file__).parent.parent
HEAVY = ("datasets", "pyarrow", "lm_eval", "pandas", "matplotlib")


@pytest.fixture
def gpu(monkeypatch):
    """The modules of the command, by name; the repository's root is on the path, as with ``python -m``."""
    monkeypatch.syspath_prepend(str(ROOT))
    names = ("__main__", "bench", "goals", "kernels", "merge", "plan", "table", "worker")
    return types.SimpleNamespace(**{name: importlib.import_module(f"benchmarks.gpu.{name}") for name in names})


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> tuple[dict, str]:
    """Returns the result and the printed text of a run in which datasets and similar packages cannot be imported."""
    folder = tmp_path_factory.mktemp("rehearsal")
    (folder / "sitecustomize.py").write_text(f"import sys\nfor name in {HEAVY}:\n    sys.modules[name] = None\n")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(folder), "--rehearse", "--tune"], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = (folder / "rehearsal-all.json").read_text()
    assert str(ROOT) not in text
    assert str(folder) not in text
    return json.loads(text, parse_constant=pytest.fail), done.stdout


def test_every_row_runs(rehearsal, gpu):
    result, _ = rehearsal
    assert result["left_out"] == []
    assert result["finished"]
    rows = {row["row"] for row in result["rows"]}
    assert rows >= {
        "permute", "RMSNorm + permute", "sinkhorn forward", "sinkhorn backward", "sinkhorn forward + backward",
        "assignment", "nm_mask forward", "nm_mask backward", "swap_gains", "sparse_linear, 1 tokens",
        "sparse_linear, 4 tokens", "sparse_linear, 16 tokens", "sparse_linear, 64 tokens", "2:4 prefill",
        "learning step", "inference, a layer", "inference, a model",
    }  # fmt: skip
    assert [row["case"].split(", ")[-1] for row in result["rows"] if row["row"] == "learning step"] == [
        "1 at once", "2 at once",
    ]  # fmt: skip
    assert result["row_seconds"].keys() == gpu.plan.ROWS.keys() == result["gpu_state"].keys()
    assert all(seconds >= 0 for seconds in result["row_seconds"].values())


def test_what_is_no_time_is_reported(rehearsal):
    found = {report["what"]: (report["group"], report["found"], report["good"]) for report in rehearsal[0]["reports"]}
    assert found.keys() == {"GPU tests", "memcheck", "racecheck", "cuSPARSELt"}
    assert found["cuSPARSELt"] == ("cusparselt", "not there, or not for such a weight", None)
    if not torch.cuda.is_available():
        assert "skipped" in found["GPU tests"][1]
        assert found["GPU tests"][2]


def test_both_copies_are_timed(rehearsal, gpu):
    rows = [row for row in rehearsal[0]["rows"] if any("copy bandwidth" in goal["name"] for goal in row["goals"])]
    assert len(rows) == 7
    assert all(set(gpu.table.COPIES) <= row["times"].keys() for row in rows)
    assert all(copy not in line[3] for line in gpu.table.lines(gpu.merge.merge([rehearsal[0]])) for copy in ("copy_",))


def test_every_sample_and_what_it_was_measured_on_is_kept(rehearsal):
    result, _ = rehearsal
    assert set(result["versions"]) >= {"permtriton", "torch", "triton", "cusparselt", "transformers", "python"}
    assert set(result["hardware"]) >= {"device", "system", "cores"}
    assert result["command"] == "python -m benchmarks.gpu --out DIR --tune --rehearse"
    assert result["ceilings"]["copy_gb_s"] > 0
    for row in result["rows"]:
        for times in row["times"].values():
            assert times["p20_us"] <= times["p50_us"] <= times["p80_us"]
            assert times["how"] == "host"
            assert times["samples_us"]


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
    assert bounds["learning step", "times a dense forward + backward"] == (None, 1.05)
    assert bounds["RMSNorm + permute", "times the norm alone"] == (None, 1.03)


def test_every_goal_of_the_table_is_measured(rehearsal, gpu):
    reported = {
        (goal["of"], goal["name"], goal["least"], goal["most"])
        for row in rehearsal[0]["rows"]
        for goal in row["goals"]
        if goal["of"]
    }
    table = {(row, name, *bounds) for row, figures in gpu.goals.GOALS.items() for name, bounds in figures.items()}
    of_a_large_shape = {("permute 16384x11008", "of copy bandwidth", 0.95, None)}
    assert reported | of_a_large_shape == table


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(gpu, tmp_path, capsys):
    assert gpu.__main__.main(["--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "CUDA GPU" in error
    assert "--rehearse" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("minutes", ["-1", "0", "nan"])
def test_senseless_minutes_are_refused_and_nothing_is_written(gpu, tmp_path, capsys, minutes):
    (tmp_path / "rehearsal-all.json").write_text("earlier")
    with pytest.raises(SystemExit, match="2"):
        gpu.__main__.main(["--out", str(tmp_path), "--rehearse", "--minutes", minutes])
    assert "above 0" in capsys.readouterr().err
    assert (tmp_path / "rehearsal-all.json").read_text() == "earlier"


def test_a_folder_that_cannot_be_written_is_named(gpu, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        gpu.__main__.main(["--out", str(tmp_path / "file"), "--rehearse"])
    assert "cannot be written" in capsys.readouterr().err


def begin(gpu, folder: Path, minutes: float = 9.0):
    return gpu.bench.Bench.begin(folder, gpu.plan.selected(None, None, minutes), True)


def work(gpu, folder: Path, *rows: str) -> dict:
    """Runs a worker in this process and returns what it writes."""
    bench = begin(gpu, folder)
    assert gpu.worker.main([str(bench.file), repr(bench.deadline), "no-tune", *rows]) == 0
    return json.loads(bench.file.read_text())


def test_a_row_that_fails_leaves_the_others(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.kernels, "nm_mask_case", None)
    result = work(gpu, tmp_path, "nm_mask", "permute")
    assert [left["row"] for left in result["left_out"]] == ["nm_mask"]
    assert str(ROOT) not in result["left_out"][0]["traceback"]
    assert {row["row"] for row in result["rows"]} == {"permute"}


def test_a_wrong_kernel_gets_no_time_and_leaves_the_other_cases(gpu, tmp_path, monkeypatch):
    make = gpu.kernels.permute_case

    def broken(rows, channels, dtype, device, in_blocks):
        case = make(rows, channels, dtype, device, in_blocks)
        wrong = dataclasses.replace(case, run=lambda x, index: case.run(x, index) + 1)
        return wrong if in_blocks else case

    monkeypatch.setattr(gpu.kernels, "permute_case", broken)
    result = work(gpu, tmp_path, "permute")
    assert [row["case"] for row in result["rows"]] == ["permute 8x256 global float32"]
    (left,) = result["left_out"]
    assert left["row"] == "permute: permute 8x256 in blocks float32"
    assert "is wrong" in left["why"]


def test_a_wrong_peer_gets_no_time(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.kernels, "_index_select", lambda inputs: lambda: inputs[0])
    for row in work(gpu, tmp_path, "permute")["rows"]:
        assert "index_select" not in row["times"]
        assert "wrong" in row["absent"]["index_select"]


def test_a_case_that_cannot_be_tuned_is_measured_as_it_is(gpu, tmp_path, monkeypatch):
    bench = begin(gpu, tmp_path)
    bench.result["ceilings"] = {"copy_gb_s": 1.0, "matmul_tflop_s": 1.0}
    bench.start("permute", True)
    monkeypatch.setattr(gpu.bench.tuning, "tune", None)
    bench.compare("permute", gpu.kernels.permute_case(4, 64, torch.float32, bench.device), {}, lambda times: [])
    (row,) = bench.result["rows"]
    assert row["tuning_error"].startswith("TypeError")
    assert row["times"]


def test_peers_are_compiled_once(gpu, tmp_path):
    """torch.compile compiles separately with and without gradients: it must see only one of them."""
    bench = begin(gpu, tmp_path)
    bench.result["ceilings"] = {"copy_gb_s": 1.0, "matmul_tflop_s": 1.0}
    case, seen = gpu.kernels.permute_case(4, 64, torch.float32, bench.device), set()
    bench.compare("permute", case, {"peer": lambda _: lambda: seen.add(torch.is_grad_enabled())}, lambda times: [])
    assert bench.result["left_out"] == []
    assert seen == {False}


@pytest.mark.parametrize(
    ("package", "message"), [("right", None), ("wrong", "AssertionError: wrong"), ("missing", "ModuleNotFoundError")]
)
def test_torch_linear_assignment_if_it_is_installed_and_right(gpu, tmp_path, monkeypatch, package, message):
    def batch_linear_assignment(cost):
        rows = assignment_reference(-cost).long().argsort(1)
        return rows.roll(1, 1) if package == "wrong" else rows

    module = types.SimpleNamespace(batch_linear_assignment=batch_linear_assignment)
    monkeypatch.setitem(sys.modules, "torch_linear_assignment", None if package == "missing" else module)
    (row,) = work(gpu, tmp_path, "assignment")["rows"]
    assert ("torch-linear-assignment" in row["times"]) == (message is None)
    if message:
        assert row["absent"]["torch-linear-assignment"].startswith(message)
    assert {"scipy serial", "scipy threaded"} <= row["times"].keys()


def test_no_row_is_started_that_may_not_end_in_time(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.bench.Bench, "pick", lambda self, full, tiny: full if full == 60 else tiny)
    monkeypatch.setattr(gpu.bench.Bench, "seconds_left", 20.0)
    result = work(gpu, tmp_path, "permute", "norm")
    assert [(left["row"], left["why"]) for left in result["left_out"]] == [
        ("permute", "20 s were left, it may need 60")
    ]
    assert result["row_seconds"].keys() == {"norm"}


HANGING = """
import dataclasses, sys, time
from benchmarks.gpu import worker
worker.ROWS["nm_mask"] = dataclasses.replace(worker.ROWS["nm_mask"], limit=0.5)
worker.FUNCTIONS["nm_mask"] = lambda bench: time.sleep(20)
sys.exit(worker.main(sys.argv[1:]))
"""


def test_a_row_that_hangs_costs_only_itself(gpu, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(gpu.__main__, "WORKER", (sys.executable, "-c", HANGING))
    rows = [word for row in ("nm_mask", "norm") for word in ("--only", row)]
    assert gpu.__main__.main(["--out", str(tmp_path), "--rehearse", *rows]) == 1
    result = json.loads((tmp_path / "rehearsal-only.json").read_text())
    assert [(left["row"], left["why"].split(":")[0]) for left in result["left_out"]] == [("nm_mask", "cut off")]
    assert {row["row"] for row in result["rows"]} == {"RMSNorm + permute"}
    printed = capfd.readouterr()
    assert "time.sleep" in printed.err or "Timeout" in printed.err
    assert "left out: cut off" in printed.out


DYING = """
import json, os, sys
file, deadline, tune, *names = sys.argv[1:]
result = json.load(open(file))
for name in names:
    result["row_seconds"][name] = None if name == "nm_mask" else 1.0
    json.dump(result, open(file, "w"))
    if name == "nm_mask":
        os.abort()
    if name == "permute":
        sys.exit(3)
"""


def test_after_a_worker_that_died_or_gave_up_another_goes_on(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.__main__, "WORKER", (sys.executable, "-c", DYING))
    bench = begin(gpu, tmp_path)
    gpu.__main__._rows(bench, ["sinkhorn", "nm_mask", "permute", "norm"])
    assert [left["row"] for left in bench.result["left_out"]] == ["nm_mask"]
    assert bench.result["row_seconds"] == {"sinkhorn": 1.0, "nm_mask": None, "permute": 1.0, "norm": 1.0}


@pytest.mark.parametrize(("seconds", "why"), [(0.5, "no time was left"), (60, "its process could not begin")])
def test_a_worker_that_never_begins_ends_the_run(gpu, tmp_path, monkeypatch, seconds, why):
    code = "import time; time.sleep(60)" if seconds < 1 else "import sys; sys.exit(1)"
    monkeypatch.setattr(gpu.__main__, "WORKER", (sys.executable, "-c", code))
    monkeypatch.setattr(gpu.__main__, "GRACE", 1)
    bench, started = begin(gpu, tmp_path, seconds / 60), time.monotonic()
    gpu.__main__._rows(bench, ["permute", "norm"])
    assert time.monotonic() - started < 20
    assert [(left["row"], left["why"]) for left in bench.result["left_out"]] == [("permute", why), ("norm", why)]
    gpu.table.print_table(gpu.merge.merge([bench.result]))


def test_the_table_in_markdown(gpu, rehearsal):
    left = {"row": "norm", "group": "norm", "why": "a | b\nand more"}
    (row, *_) = rehearsal[0]["rows"]
    part = {**rehearsal[0], "left_out": [left], "rows": [{**row, "group": "permute"}], "ceilings": None}
    lines = gpu.table.markdown(gpu.merge.merge([part])).splitlines()
    assert lines[0].startswith("| row | case | ours, us |")
    rows = [line for line in lines if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {9}
    assert any("left out: a \\| b and more" in line for line in rows)


@pytest.fixture
def readme(gpu, tmp_path, monkeypatch):
    module = importlib.import_module("benchmarks.readme_tables")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def test_readme_lists_the_goals_until_there_is_a_result(readme, gpu):
    rows = [line for line in readme.gpu_table().splitlines() if "not measured" in line]
    assert len(rows) == sum(map(len, gpu.goals.GOALS.values()))
    assert "| assignment | milliseconds | <= 5 | not measured |" in rows
    assert "No GPU has run this version" in readme.gpu_table()


def test_readme_shows_the_merged_results(readme, gpu, rehearsal, tmp_path, monkeypatch):
    for name, started in (("gpu-b", "2026-01-02T00:00:00+00:00"), ("gpu-a", "2026-02-01T00:00:00+00:00")):
        result = {**rehearsal[0], "started": started, "command": f"{name} \\1"}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert "No GPU has run this version" in readme.gpu_table()  # not merged yet
    gpu.merge.merge_folder(tmp_path, False)
    assert "`gpu-a \\1`" in readme.gpu_table()
    assert "`gpu-b \\1`" not in readme.gpu_table()
    section = "<!-- table gpu -->\nold\n<!-- end -->"
    monkeypatch.setattr(readme, "TABLES", {"gpu": readme.gpu_table})
    assert readme.rewritten(section) == f"<!-- table gpu -->\n{readme.gpu_table()}\n<!-- end -->"
