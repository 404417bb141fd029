"""``python -m benchmarks.gpu``: all rows on tiny sizes, its result file, and what it does when a row fails."""

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks import readme_tables
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import bench, compile_check, kernels, models, reading, table
from benchmarks.gpu.builds import Build
from benchmarks.gpu.recording import recorded
from benchmarks.gpu.table import read
from permtriton.kernels.launch import triton
from permtriton.kernels.tools.timing import relative_error

PROCESSES = ("tests", "memcheck", "racecheck", "counters")  # rows that start one of their own
ON_CPU = [name for name in table.ROWS if name not in PROCESSES]
GPU_STATE = {"clocks.sm": "1980", "clocks_event_reasons.sw_power_cap": "Active"}


def measured(folder: Path, *names: str) -> dict:
    only = [word for name in names for word in ("--only", name)]
    command.main(["--out", str(folder), "--tiny", "--here", "--commit", "abc", *only])
    return read(folder / bench.RESULTS)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict:
    return measured(tmp_path_factory.mktemp("gpu"), *ON_CPU)


@pytest.mark.slow
def test_every_row_runs(rows):
    assert list(rows) == ON_CPU
    assert [row["failures"] for row in rows.values()] == [[]] * len(rows)
    assert all(row["results"] or row["findings"] for row in rows.values())
    for row in rows.values():
        assert {"torch", "triton", "transformers", "cusparselt"} <= row["versions"].keys()
        assert (row["commit"], row["hardware"]["system"].split()[0]) == ("abc", "Linux")
        for result in row["results"]:
            assert all(time["p20_us"] <= time["p50_us"] <= time["p80_us"] for time in result["times"].values())


@pytest.mark.slow
def test_products_say_what_ran(rows):
    for name in ("sparse_linear", "merged", "prefill", "decoding", "decoding_compiled", "learning_step"):
        assert all({"routes", "rejected", "ran"} <= result.keys() or result["case"] in (table.LAYER, table.MERGED)
                   for result in rows[name]["results"])  # fmt: skip


def test_kernels_are_compared_with_their_floor(rows):
    counted = [result for row in rows.values() for result in row["results"] if result["floor_us"]]
    assert len(counted) >= 14
    for result in counted:
        ours = result["times"][table.OURS]["p50_us"]
        assert result["figures"]["of the floor's speed"] == pytest.approx(result["floor_us"] / ours, rel=1e-2)


def test_the_table_of_results_and_of_goals(rows):
    page = table.markdown(rows)
    assert "tests, counters, memcheck, racecheck | - | - | - | - | not run yet" in page
    assert "commit abc" in page
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {len(table.HEADINGS) + 1}
    real = {**rows["assignment"], "tiny": False, "after": GPU_STATE}
    real["results"][0]["figures"]["milliseconds"] = 9.0
    page = table.markdown({"assignment": real})
    assert "9 milliseconds | <= 5 milliseconds; >= 200x scipy in one thread | NO |" in page
    assert "clocks were held down, clocks_event_reasons.sw_power_cap" in page
    assert readme_tables.TABLES["gpu"]() == table.markdown(read(readme_tables.RESULTS / "gpu.json"))


def test_a_single_wrong_row_of_thousands_is_an_error():
    expected = torch.randn(14336, 16, generator=torch.Generator().manual_seed(0))
    out = expected.clone()
    out[7] = 0.0
    assert relative_error(out, expected) > 0.1
    assert relative_error(expected.bfloat16(), expected) < 1e-2
    assert relative_error(out[:0], expected[:0]) == 0


def test_a_rejected_kernel_meets_no_goal(rows):
    """What ran in its place was not what the goal is about."""
    result = {**rows["sparse_linear"]["results"][0], "case": "4096x4096", "routes": ["dense"], "rejected": ["mma<1>"]}
    result["figures"] = {f"{table.SPEED}{table.DENSE}": 2.0}
    line = table._line("sparse_linear", result, tiny=False)
    assert line[-2:] == ("NO", "dense; REJECTED: mma<1>")
    assert table._line("sparse_linear", {**result, "rejected": []}, tiny=False)[-2] == "yes"


def test_rows_are_added_and_replaced_and_a_failing_one_costs_only_itself(tmp_path, monkeypatch):
    first = measured(tmp_path, "sparse_linear")
    monkeypatch.setattr(kernels, "nm_mask_case", None)
    assert command.main(["--out", str(tmp_path), "--tiny", "--here", "--only", "kernels", "--only", "paper"]) == 1
    found = read(tmp_path / bench.RESULTS)
    assert found["sparse_linear"] == first["sparse_linear"]
    assert "NoneType" in found["kernels"]["failures"][0]["why"]
    assert found["paper"]["results"]
    monkeypatch.undo()
    assert measured(tmp_path, "kernels")["kernels"]["failures"] == []


def test_a_packed_model_must_give_the_same_logits(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "PATTERN", dataclasses.replace(models.PATTERN, kept=1))
    row = measured(tmp_path, "inference")["inference"]
    assert row["failures"]
    assert row["results"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "results")]) == 2
    assert "--tiny" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(triton is None, reason="triton is not installed")
def test_its_own_kernels_compile_for_a_gpu():
    """The one that only reads, and the norm that does not permute; all of their programs run at once."""
    with torch.device("meta"), recorded() as launches:
        reading.checksum(torch.empty(1 << 30, dtype=torch.int32))
        x, weight = (torch.empty(size, dtype=torch.bfloat16) for size in ((16384, models.HIDDEN), models.HIDDEN))
        kernels.rms_norm_alone(x, weight, 1e-5)
    assert [launch.kernel.fn.__name__ for launch in launches] == ["_read_kernel", "_rms_norm_kernel"]
    for target in (target for target in compile_check.TARGETS if target.required):
        for launch in launches:
            found = compile_check.compile_one(Build("", launch, default=True), target)
            assert (found.error, found.problem) == (None, None)
            assert found.resident * 132 >= launch.grid[0]
