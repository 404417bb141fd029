"""``python -m benchmarks.gpu``: all rows on tiny sizes, its result file, and what it does when a row fails."""

import dataclasses
import json
import sys

import pytest
import torch

from benchmarks import readme_tables
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import checks, kernels, models, table
from benchmarks.gpu.bench import Bench, save
from benchmarks.gpu.table import read

ON_CPU = [name for name in table.ROWS if name not in checks.ROWS]
GPU_STATE = {"clocks.sm": "1980", "clocks_event_reasons.sw_power_cap": "Active"}


def measured(file, *names: str) -> dict:
    only = [word for name in names for word in ("--only", name)]
    command.main(["--out", str(file), "--tiny", "--commit", "abc", *only])
    return read(file)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict:
    return measured(tmp_path_factory.mktemp("gpu") / "gpu.json", *ON_CPU)


def test_every_row_runs(rows):
    assert list(rows) == ON_CPU
    assert [row["failures"] for row in rows.values()] == [[]] * len(rows)
    assert all(row["results"] or row["findings"] for row in rows.values())
    for row in rows.values():
        assert {"torch", "triton", "transformers", "cusparselt"} <= row["versions"].keys()
        assert (row["commit"], row["hardware"]["system"].split()[0]) == ("abc", "Linux")
        for result in row["results"]:
            assert all(time["p20_us"] <= time["p50_us"] <= time["p80_us"] for time in result["times"].values())


def test_kernels_are_compared_with_their_floor(rows):
    counted = [result for row in rows.values() for result in row["results"] if result["floor_us"]]
    assert len(counted) >= 14
    for result in counted:
        ours = result["times"][table.OURS]["p50_us"]
        assert result["figures"]["of the floor's speed"] == pytest.approx(result["floor_us"] / ours, rel=1e-3)


def test_every_goal_is_measured(rows):
    missing = ("permute, 16384 rows", f"{table.SPEED}the kernel in CUDA", f"{table.SPEED}cuSPARSELt")  # not on a CPU
    figures = {(result["name"], figure) for row in rows.values() for result in row["results"]
               for figure in result["figures"]}  # fmt: skip
    for start, goals in table.GOALS.items():
        for goal in goals:
            found = any(name.startswith(start) and goal == figure for name, figure in figures)
            assert found or start in missing or goal in missing, (start, goal)


def test_the_table_of_results_and_of_goals(rows):
    page = table.markdown(rows)
    assert "tests, memcheck, racecheck | - | - | - | - | not run yet" in page
    assert "commit abc" in page
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {len(table.HEADINGS) + 1}
    real = {**rows["assignment"], "tiny": False, "after": GPU_STATE}
    real["results"][0]["figures"]["milliseconds"] = 9.0
    page = table.markdown({"assignment": real})
    assert "9 milliseconds | <= 5 | NO |" in page
    assert "clocks were held down, clocks_event_reasons.sw_power_cap" in page
    assert "| assignment | milliseconds | <= 5 | not measured |" in table.markdown({})
    assert readme_tables.TABLES["gpu"]() == table.markdown(read(readme_tables.RESULTS / "gpu.json"))


def test_rows_are_added_and_replaced_and_a_failing_one_costs_only_itself(tmp_path, monkeypatch):
    file = tmp_path / "gpu.json"
    first = measured(file, "permute")
    monkeypatch.setattr(kernels, "nm_mask_case", None)
    assert command.main(["--out", str(file), "--tiny", "--only", "nm_mask", "--only", "swap_gains"]) == 1
    found = read(file)
    assert found["permute"] == first["permute"]
    assert "NoneType" in found["nm_mask"]["failures"][0]["why"]
    assert found["swap_gains"]["results"]
    monkeypatch.undo()
    assert measured(file, "nm_mask")["nm_mask"]["failures"] == []


@pytest.mark.parametrize("peer", [False, True])
def test_what_is_wrong_gets_no_time(tmp_path, monkeypatch, peer):
    make = kernels.permute_case

    def broken(*args):
        case = make(*args)
        return dataclasses.replace(case, run=lambda x, index: case.run(x, index) + 1)

    if peer:
        monkeypatch.setattr(kernels, "_index_select", lambda inputs: lambda: inputs[0])
    else:
        monkeypatch.setattr(kernels, "permute_case", broken)
    row = measured(tmp_path / "gpu.json", "permute")["permute"]
    assert all("is wrong" in failure["why"] for failure in row["failures"])
    assert (len(row["results"]), len(row["failures"])) == ((2, 0) if peer else (0, 2))
    assert all("index_select" not in result["times"] for result in row["results"])


def test_a_packed_model_must_give_the_same_logits(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "PATTERN", dataclasses.replace(models.PATTERN, kept=1))
    row = measured(tmp_path / "gpu.json", "inference")["inference"]
    assert row["failures"]
    assert row["results"] == []


@pytest.mark.parametrize(
    ("code", "why"),
    [("import time; time.sleep(60)", "cut off after"), ("import os; os._exit(7)", "its process died, exit code 7")],
)
def test_a_process_that_hangs_or_dies_costs_only_its_row(tmp_path, monkeypatch, code, why):
    file, rows = tmp_path / "gpu.json", dict(table.ROWS)
    rows["norm"] = dataclasses.replace(rows["norm"], limit=1)
    monkeypatch.setattr(command, "ROWS", rows)

    def process(arguments, seconds):
        Bench(file, "norm", tiny=True)
        return checks_process([sys.executable, "-c", code], seconds)

    checks_process = checks.process
    monkeypatch.setattr(checks, "process", process)
    command._apart(file, "norm", None)
    assert why in read(file)["norm"]["failures"][0]["why"]


SUMMARY = "===== ERROR SUMMARY: {} errors\n"
ONE = "begins: permute\ndone: permute\n"


@pytest.mark.parametrize(("code", "output", "good"), [
    (0, ONE + SUMMARY.format(0), True),
    (86, ONE + SUMMARY.format(3), False),
    (1, ONE + "begins: norm\n" + SUMMARY.format(0), False),
    (1, "===== Error: Device not supported\n", None),
    (None, ONE, None),
])  # fmt: skip
def test_what_compute_sanitizer_says(code, output, good):
    assert checks.verdict(checks.Ran(code, output, 1.0))[1] is good


def test_the_small_cases_run(capsys):
    checks.small_cases("cpu")
    assert checks.verdict(checks.Ran(0, capsys.readouterr().out + SUMMARY.format(0), 1.0))[1]


def test_the_plan_fits_ten_minutes_a_call(capsys):
    assert command.main(["--plan"]) == 0
    printed = capsys.readouterr().out
    for call in table.CALLS:
        assert sum(row.limit for row in table.ROWS.values() if row.call == call) <= 590
        assert f"--only {call} " in printed
    assert set(command.MEASURES) == set(table.ROWS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "gpu.json")]) == 2
    assert "--tiny" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_json_without_folders(tmp_path):
    save(tmp_path / "gpu.json", {"norm": {"x": 1}, "permute": {}})
    assert list(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == ["permute", "norm"]
