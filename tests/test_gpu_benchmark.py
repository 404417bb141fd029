"""``python -m benchmarks.gpu``: all rows on tiny sizes, its result file, and what it does when a row fails."""

import dataclasses
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import readme_tables
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import bench, caches, checks, kernels, models, table
from benchmarks.gpu.bench import Bench, Settings, save
from benchmarks.gpu.table import read
from permtriton.kernels.tools.case import relative_error
from permtriton.kernels.tools.tuning import sets_of_inputs

from . import zoo

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


def test_fifteen_minutes_are_two_calls_of_the_most_valuable_rows():
    (first, longest), (second, rest) = table.calls(15)
    assert (longest, rest) == (360, 240)
    assert table.seconds_of(first) <= longest
    assert table.seconds_of(second) <= rest
    assert first == [
        "first_look", "paper", "kernels", "sparse_linear", "decoding_compiled", "sparse_linear_fp8"
    ]  # fmt: skip
    assert not {"sparse_linear_tuned", "decoding_tuned"} & {*first, *second}, "without tuning, they show nothing"
    everything = [name for names, seconds in table.calls(60) for name in names]
    assert sorted(everything) == sorted(table.ROWS)
    assert "Not in these 15 minutes: tune," in table.plan(15)


def test_a_single_wrong_row_of_thousands_is_an_error():
    expected = torch.randn(14336, 16, generator=torch.Generator().manual_seed(0))
    out = expected.clone()
    out[7] = 0.0
    assert relative_error(out, expected) > 0.1
    assert relative_error(expected.bfloat16(), expected) < 1e-2
    assert relative_error(out[:0], expected[:0]) == 0


@pytest.mark.parametrize(("bytes_each", "sets"), [(200_000, 945), (8_000_000, 25), (1_000_000_000, 2), (1000, 1024)])
def test_sets_of_inputs_are_three_times_the_cache(bytes_each, sets, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=60 << 20))
    assert sets_of_inputs(torch.device("cuda"), bytes_each) == sets
    assert sets_of_inputs(torch.device("cpu"), bytes_each) == 1


def test_a_step_of_decoding_reads_the_cache_but_no_embeddings_and_nothing_for_many_tokens():
    model = zoo.tiny_llama(tie_word_embeddings=False)
    weights = sum(weight.nbytes for weight in [*model.parameters(), *model.buffers()])
    expected = weights - model.model.embed_tokens.weight.nbytes
    model.model.layers[0].mlp.up_proj.register_buffer("weight_compressed", torch.zeros(64))
    assert models.bytes_of_a_step(model, 0) == expected
    with torch.no_grad():
        cache = model(input_ids=torch.zeros(2, 5, dtype=torch.int64), use_cache=True).past_key_values
    places = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert models.bytes_of_a_step(model, 2 * 5) == expected + places


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


def test_a_row_that_was_cut_off_is_continued(tmp_path):
    """With what it had measured as it was, and without the case in which it died twice."""
    whole = measured(tmp_path, "paper")["paper"]
    first, second = whole["results"][:2]
    part = {
        **whole,
        "results": whole["results"][:1] + whole["results"][2:],
        "seconds": None,
        "tried": {f"{second['name']}: {second['case']}": 2},
    }
    save(tmp_path / bench.RESULTS, {"paper": part})
    again = measured(tmp_path, "paper")["paper"]
    assert again["results"] == part["results"]
    assert "twice the process died" in again["failures"][0]["why"]
    save(tmp_path / bench.RESULTS, {"paper": {**part, "tried": {}, "commit": "another"}})
    assert len(measured(tmp_path, "paper")["paper"]["results"]) == len(whole["results"])
    assert measured(tmp_path, "paper")["paper"]["results"][0] != first
    save(tmp_path / bench.RESULTS, {"paper": {**part, "tried": {}, "hardware": {"device": "another"}}})
    assert measured(tmp_path, "paper")["paper"]["results"][0] != first


def test_what_an_earlier_commit_measured_stays_until_there_is_a_result(tmp_path, monkeypatch):
    earlier = measured(tmp_path, "assignment")["assignment"] | {"commit": "another"}
    save(tmp_path / bench.RESULTS, {"assignment": earlier})
    monkeypatch.setattr(Bench, "_compare", lambda *_: sys.exit("the process dies in its first case"))
    for deaths in (1, 2):
        with pytest.raises(SystemExit):
            measured(tmp_path, "assignment")
        row = read(tmp_path / bench.RESULTS)["assignment"]
        assert {part: row[part] for part in earlier} == earlier
        assert list(row["since"]["tried"].values()) == [deaths]
    row = measured(tmp_path, "assignment")["assignment"]
    assert (row["commit"], row["results"]) == ("abc", [])
    assert "twice the process died" in row["failures"][0]["why"]


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


def test_a_call_measures_what_is_left_in_the_time_that_is_left(tmp_path, monkeypatch):
    started = []

    def process(arguments, seconds, **_):
        name = arguments[arguments.index("--only") + 1]
        if "--ahead" not in arguments:
            started.append(name)
            command.run(name, Settings(tmp_path, tiny=True))
            if name == "sinkhorn" and len(started) < 3:
                monkeypatch.setattr(command, "LEAST", 1e9)  # the time is up
        return checks.Ran(0, "", 1.0)

    monkeypatch.setattr(checks, "process", process)
    monkeypatch.setattr(caches, "work", lambda: tmp_path / "caches")
    arguments = [
        "--out",
        str(tmp_path),
        "--tiny",
        *(w for n in ("paper", "sinkhorn", "assignment") for w in ("--only", n)),
    ]
    assert command.main(arguments) == 1, "one row is missing"
    assert started == ["paper", "sinkhorn"]
    monkeypatch.setattr(command, "LEAST", 1)
    assert command.main(arguments) == 0
    assert command.main(arguments) == 0
    assert started == ["paper", "sinkhorn", "assignment"], "what came to its end is not measured again"
    assert "assignment" in (tmp_path / "table.md").read_text()
    assert command.main([*arguments, "--again"]) == 0
    assert len(started) == 6


def test_a_packed_model_must_give_the_same_logits(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "PATTERN", dataclasses.replace(models.PATTERN, kept=1))
    row = measured(tmp_path, "inference")["inference"]
    assert row["failures"]
    assert row["results"] == []


@pytest.mark.parametrize(
    ("code", "begins", "why"),
    [
        ("import os; os._exit(7)", True, "died, exit code 7"),
        ("import no_such_module", False, "exit code 1: .*no_such_module"),
    ],
)
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "results")]) == 2
    assert "--tiny" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
