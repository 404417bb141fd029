"""``python -m benchmarks.gpu``: all rows on tiny sizes, its result file, and what it does when a row fails."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import readme_tables
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import bench, caches, checks, compile_check, kernels, models, reading, table, tune
from benchmarks.gpu.bench import Bench, Settings, save
from benchmarks.gpu.builds import Build
from benchmarks.gpu.recording import recorded
from benchmarks.gpu.table import read
from permtriton.kernels.launch import triton

from . import zoo

ROOT = Path(__file__).parent.parent
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


def test_every_row_runs(rows):
    assert list(rows) == ON_CPU
    assert [row["failures"] for row in rows.values()] == [[]] * len(rows)
    assert all(row["results"] or row["findings"] for row in rows.values())
    for row in rows.values():
        assert {"torch", "triton", "transformers", "cusparselt"} <= row["versions"].keys()
        assert (row["commit"], row["hardware"]["system"].split()[0]) == ("abc", "Linux")
        for result in row["results"]:
            assert all(time["p20_us"] <= time["p50_us"] <= time["p80_us"] for time in result["times"].values())


def test_products_say_what_ran(rows):
    for name in ("sparse_linear", "prefill", "decoding", "decoding_tuned", "learning_step"):
        assert all({"routes", "rejected", "ran"} <= result.keys() or result["case"] == table.LAYER
                   for result in rows[name]["results"])  # fmt: skip


def test_kernels_are_compared_with_their_floor(rows):
    counted = [result for row in rows.values() for result in row["results"] if result["floor_us"]]
    assert len(counted) >= 14
    for result in counted:
        ours = result["times"][table.OURS]["p50_us"]
        assert result["figures"]["of the floor's speed"] == pytest.approx(result["floor_us"] / ours, rel=1e-2)


def test_a_layer_is_the_sum_of_its_linears(rows):
    one = [result for result in rows["sparse_linear"]["results"] if result["name"] == "sparse_linear, 1 token"]
    results = {result["case"]: result["times"][table.DENSE]["p50_us"] for result in one}
    expected = sum(count * results[f"{o}x{c}"] for (o, c), count in models.TINY_LAYER.items())
    assert results[table.LAYER] == pytest.approx(expected, rel=1e-3)


def test_every_goal_has_a_result(rows):
    """Of those that tiny sizes on a CPU have."""
    absent = (
        "64 tokens",
        "128 tokens",
        "256 tokens",
        "512 tokens",
        "1024 tokens",
        "4096x4096",
        "16384 rows",
        "batch 64",
    )
    no_peer = (f"{table.SPEED}the kernel in CUDA", f"{table.SPEED}{table.BARE}, tuned")
    figures = {(f"{result['name']}: {result['case']}", figure) for row in rows.values() for result in row["results"]
               for figure in result["figures"]}  # fmt: skip
    for start, goals in table.GOALS.items():
        for goal in goals:
            found = any(name.startswith(start) and goal == figure for name, figure in figures)
            assert found or goal in no_peer or any(one in start for one in absent), (start, goal)


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


def test_a_rejected_kernel_meets_no_goal(rows):
    """What ran in its place was not what the goal is about."""
    result = {**rows["sparse_linear"]["results"][0], "case": "4096x4096", "routes": ["dense"], "rejected": ["mma<1>"]}
    result["figures"] = {f"{table.SPEED}{table.DENSE}": 2.0}
    line = table._line("sparse_linear", result, tiny=False)
    assert line[-2:] == ("NO", "dense; REJECTED: mma<1>")
    assert table._line("sparse_linear", {**result, "rejected": []}, tiny=False)[-2] == "yes"


def test_rows_are_added_and_replaced_and_a_failing_one_costs_only_itself(tmp_path, monkeypatch):
    first = measured(tmp_path, "permute")
    monkeypatch.setattr(kernels, "nm_mask_case", None)
    assert command.main(["--out", str(tmp_path), "--tiny", "--here", "--only", "nm_mask", "--only", "swap_gains"]) == 1
    found = read(tmp_path / bench.RESULTS)
    assert found["permute"] == first["permute"]
    assert "NoneType" in found["nm_mask"]["failures"][0]["why"]
    assert found["swap_gains"]["results"]
    monkeypatch.undo()
    assert measured(tmp_path, "nm_mask")["nm_mask"]["failures"] == []


def test_a_row_that_was_cut_off_is_continued(tmp_path):
    """With what it had measured as it was, and without the case in which it died twice."""
    whole = measured(tmp_path, "permute")["permute"]
    first, second = whole["results"]
    part = {**whole, "results": [first], "seconds": None, "tried": {f"{second['name']}: {second['case']}": 2}}
    save(tmp_path / bench.RESULTS, {"permute": part})
    again = measured(tmp_path, "permute")["permute"]
    assert again["results"] == [first]
    assert "twice the process died" in again["failures"][0]["why"]
    save(tmp_path / bench.RESULTS, {"permute": {**part, "tried": {}, "commit": "another"}})
    assert len(measured(tmp_path, "permute")["permute"]["results"]) == 2
    assert measured(tmp_path, "permute")["permute"]["results"][0] != first
    save(tmp_path / bench.RESULTS, {"permute": {**part, "tried": {}, "hardware": {"device": "another"}}})
    assert measured(tmp_path, "permute")["permute"]["results"][0] != first


def test_a_row_that_has_lost_its_gpu_goes_on_in_another_process(tmp_path, monkeypatch):
    ends = [bench.DEAD, bench.DEAD, 0]

    def process(*_arguments, **_environment):
        if (code := ends.pop(0)) == 0:
            command.run("permute", Settings(tmp_path, tiny=True))
        return checks.Ran(code, "", 1.0)

    monkeypatch.setattr(checks, "process", process)
    monkeypatch.setattr(command, "_ahead", lambda *_: None)
    monkeypatch.setattr(caches, "work", lambda: tmp_path / "caches")
    assert command.main(["--out", str(tmp_path), "--tiny", "--only", "permute"]) == 0
    assert ends == []


def test_a_fault_of_the_gpu_ends_the_process(tmp_path, monkeypatch):
    row, ended = bench.Bench("permute", Settings(tmp_path, tiny=True)), []
    row.device = torch.device("cuda")
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    row.end_if_dead()
    assert ended == []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: 1 / 0)
    row.end_if_dead()
    assert ended == [bench.DEAD]
    assert row.record["seconds"] is None


def test_a_step_of_decoding_reads_neither_the_embeddings_nor_what_is_for_many_tokens():
    model = zoo.tiny_llama(tie_word_embeddings=False)
    weights = sum(weight.nbytes for weight in model.parameters()) + sum(buffer.nbytes for buffer in model.buffers())
    expected = weights - model.model.embed_tokens.weight.nbytes
    model.model.layers[0].mlp.up_proj.register_buffer("weight_compressed", torch.zeros(64))
    assert models.bytes_of_a_step(model) == expected
    assert models.bytes_of_a_step(zoo.tiny_llama(tie_word_embeddings=True)) > expected - model.lm_head.weight.nbytes


def test_a_call_measures_what_is_left_in_the_time_that_is_left(tmp_path, monkeypatch):
    started = []

    def process(arguments, seconds, **_):
        name = arguments[arguments.index("--only") + 1]
        if "--ahead" not in arguments:
            started.append(name)
            command.run(name, Settings(tmp_path, tiny=True))
            if name == "norm" and len(started) < 3:
                monkeypatch.setattr(command, "LEAST", 1e9)  # the time is up
        return checks.Ran(0, "", 1.0)

    monkeypatch.setattr(checks, "process", process)
    monkeypatch.setattr(caches, "work", lambda: tmp_path / "caches")
    arguments = [
        "--out",
        str(tmp_path),
        "--tiny",
        *(w for n in ("nm_mask", "norm", "swap_gains") for w in ("--only", n)),
    ]
    assert command.main(arguments) == 1, "one row is missing"
    assert started == ["nm_mask", "norm"]
    monkeypatch.setattr(command, "LEAST", 1)
    assert command.main(arguments) == 0
    assert command.main(arguments) == 0
    assert started == ["nm_mask", "norm", "swap_gains"], "what came to its end is not measured again"
    assert "swap_gains" in (tmp_path / "table.md").read_text()
    assert command.main([*arguments, "--again"]) == 0
    assert len(started) == 6


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
    row = measured(tmp_path, "permute")["permute"]
    assert all("is wrong" in failure["why"] for failure in row["failures"])
    assert (len(row["results"]), len(row["failures"])) == ((2, 0) if peer else (0, 2))
    assert all("index_select" not in result["times"] for result in row["results"])


def test_a_packed_model_must_give_the_same_logits(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "PATTERN", dataclasses.replace(models.PATTERN, kept=1))
    row = measured(tmp_path, "inference")["inference"]
    assert row["failures"]
    assert row["results"] == []


@pytest.mark.slow(only=["import time; time.sleep(60)-True-cut off after"])
@pytest.mark.parametrize(
    ("code", "begins", "why"),
    [("import time; time.sleep(60)", True, "cut off after"), ("import os; os._exit(7)", True, "died, exit code 7"),
     ("import no_such_module", False, "exit code 1: .*no_such_module")],
)  # fmt: skip
def test_a_process_that_hangs_dies_or_cannot_begin_costs_only_its_row(tmp_path, monkeypatch, code, begins, why):
    settings, started = Settings(tmp_path, tiny=True), []

    def process(arguments, seconds, **environment):
        started.append(arguments[arguments.index("--only") + 1])
        if begins:
            Bench(started[-1], settings)
        return checks_process([sys.executable, "-c", code], 1, **environment)

    checks_process = checks.process
    monkeypatch.setattr(checks, "process", process)
    monkeypatch.setattr(caches, "work", lambda: tmp_path / "caches")
    command.call(["first_look", "inference"], settings, time.monotonic() + 1000, again=False)
    assert started == ["first_look", "inference"]
    rows = read(settings.file)
    assert all(re.search(why, rows[name]["failures"][0]["why"]) for name in started)


def test_caches_travel_with_the_results(tmp_path, monkeypatch):
    """Winners of tuning too, which only the rows that use them see; what Triton does not read again stays behind."""
    results, work = tmp_path / "results", tmp_path / "first"
    results.mkdir()
    monkeypatch.setattr(caches, "work", lambda: work)
    for place in ("triton/abc/kernel.cubin", "triton/abc/kernel.ttir", "tuned/permtriton/autotune.json"):
        (work / place).parent.mkdir(parents=True, exist_ok=True)
        (work / place).write_text(place)
    caches.pack(results)
    work = tmp_path / "second"
    caches.unpack(results)
    assert (work / "triton/abc/kernel.cubin").read_text() == "triton/abc/kernel.cubin"
    assert not (work / "triton/abc/kernel.ttir").exists()
    (results / "autotune.json").write_text("newer")
    caches.unpack(results)
    assert (work / "tuned/permtriton/autotune.json").read_text() == "newer"
    homes = {caches.environment(name)["XDG_CACHE_HOME"] for name in ("sparse_linear_tuned", "tune")}
    assert homes == {str(work / "tuned")}
    assert caches.environment("sparse_linear")["XDG_CACHE_HOME"] not in homes


BARE = """
import importlib.metadata as metadata, re, runpy, sys
from importlib.machinery import PathFinder

def name_of(text):
    return re.sub("[-_.]+", "-", re.match(r"[\\w.-]+", text)[0]).lower()

there, todo = set(), ["torch", "triton", "transformers", "scipy"]
while todo:
    if (name := name_of(todo.pop())) not in there:
        there.add(name)
        try:
            todo += [each for each in metadata.requires(name) or [] if "extra ==" not in each]
        except metadata.PackageNotFoundError:
            pass
there -= {"pydantic", "pydantic-core"}
hidden = {top for top, of in metadata.packages_distributions().items() if not there & set(map(name_of, of))}

class OnlyThere(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in hidden - {"permtriton"} else PathFinder.find_spec(name, path, target)

sys.meta_path = [OnlyThere if finder is PathFinder else finder for finder in sys.meta_path
                 if "editable" not in repr(finder)]
version = metadata.version
def version_there(name):
    if name_of(name) not in there:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = version_there
assert "psutil" in hidden
sys.argv = ["benchmarks.gpu", *sys.argv[1:]]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


@pytest.mark.slow
def test_it_runs_from_a_plain_folder(tmp_path):
    """With torch, triton, transformers, scipy and what these need, but no pydantic, no git: compiling needs more."""
    only = ("--only", "decoding", "--only", "compile_fast")
    environment = {**os.environ, "PATH": ""}
    command = [sys.executable, "-c", BARE, "--out", str(tmp_path), "--tiny", "--here", *only]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    rows = read(tmp_path / bench.RESULTS)
    assert rows.keys() == {"decoding", "compile_fast"}, ran.stderr
    assert rows["decoding"]["failures"] == []
    assert rows["decoding"]["versions"]["permtriton"] == "not installed"
    assert "pydantic" in rows["compile_fast"]["failures"][0]["why"]


def test_the_commit_is_read_from_the_file_that_packing_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert bench.commit() is None
    (tmp_path / "COMMIT").write_text("abc123\n")
    assert bench.commit() == "abc123"


STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
NCU = [
    ["ID", "Kernel Name", "Grid Size", *checks.COUNTERS.split(",")[:2], *map(STALLED.format, ("wait", "bar"))],
    ["", "", "", "us", "%", "inst", "inst"],
    ["0", "sparse_linear_mma", "(43, 4, 1)", "14.5", "81.25", "1.5", "12.25"],
]


def test_what_ncu_counts():
    printed = "\n".join(["==PROF== Connected", *(",".join(f'"{cell}"' for cell in line) for line in NCU)])
    ((what, said),) = checks.counted(printed)
    assert what == "ncu: sparse_linear_mma (43, 4, 1)"
    assert "time_duration 14.5, throughput 81.25" in said
    assert said.endswith("warps wait for bar 12.2, wait 1.5")
    assert checks.counted("==ERROR== the driver forbids it") == []


def test_what_is_tuned_comes_by_value(tmp_path):
    cases = [case.name for case in tune.by_value(Bench("tune", Settings(tmp_path, tiny=True)))]
    assert cases[0].startswith("sparse_linear 1 tokens")
    assert len(set(cases)) == len(cases)


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


def test_the_plan_is_four_calls_of_ten_minutes(capsys):
    assert command.main(["--plan"]) == 0
    printed = capsys.readouterr().out
    assert len(table.CALLS) == 4
    for call in table.CALLS:
        rows = [row for row in table.ROWS.values() if row.call == call]
        assert sum(row.seconds for row in rows) + table.AHEAD_SECONDS / 2 <= table.CALL_SECONDS, call
        assert all(row.seconds < row.limit for row in rows)
        assert f"--only {call} " in printed
    assert "permtriton autotune" not in printed
    assert "pip download" in printed
    assert set(command.MEASURES) == set(table.ROWS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "results")]) == 2
    assert "--tiny" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_json_without_folders(tmp_path):
    save(tmp_path / "gpu.json", {"norm": {"x": 1}, "permute": {}})
    assert list(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == ["permute", "norm"]


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
