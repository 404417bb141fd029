"""The calls of ``python -m benchmarks.gpu``: plan, merging, checks, tuning, captures; without a GPU, by fakes."""

import importlib
import json
import os
import re
import shlex
import time
import types
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from permtriton.kernels import autotune, cusparselt
from permtriton.kernels.packing import pack
from permtriton.kernels.tools import timing, tuning
from permtriton.kernels.tools.case import Case
from permtriton.sparsity import NMPattern

ROOT = Path(__file__).parent.parent
SMI = "1980, 3201, 41, 47, 312.55, 0x0000000000000004\n"


@pytest.fixture
def gpu(monkeypatch):
    """The modules of the command, by name; the repository's root is on the path, as with ``python -m``."""
    monkeypatch.syspath_prepend(str(ROOT))
    names = ("__main__", "bench", "checks", "machine", "merge", "models", "plan", "small_cases", "table", "worker")
    return types.SimpleNamespace(**{name: importlib.import_module(f"benchmarks.gpu.{name}") for name in names})


def begin(gpu, folder: Path, call: str | None = None):
    bench = gpu.bench.Bench.begin(folder, gpu.plan.selected(call, None, None), True)
    bench.result["ceilings"] = {"copy_gb_s": 1.0, "matmul_tflop_s": 1.0}
    return bench


class TestPlan:
    def test_calls_fit_their_limits(self, gpu):
        for call in gpu.plan.CALLS:
            assert call.minutes < gpu.plan.LIMIT
            assert call.seconds <= 60 * call.minutes
            assert gpu.plan.START + sum(row.limit + row.tuning for row in call.rows) <= 60 * call.minutes, call.name
        assert sum(call.minutes for call in gpu.plan.CALLS) <= 26  # starting a machine takes minutes, too

    def test_every_row_is_somebodys(self, gpu):
        rows = [row.name for call in gpu.plan.CALLS for row in call.rows if row is not gpu.plan.CEILINGS]
        assert sorted(rows) == sorted([*gpu.worker.FUNCTIONS, *gpu.checks.CHECKS])

    def test_what_is_printed_can_be_run(self, gpu, capsys):
        assert gpu.__main__.main(["--plan", "--out", "results"]) == 0
        printed = capsys.readouterr().out
        commands = [line.strip() for line in printed.splitlines() if line.startswith("   python")]
        assert len(commands) == 5
        assert commands[1] == "python -m benchmarks.gpu --out results --call kernels --tune"
        for command in commands[:4]:
            args = gpu.__main__._parser().parse_args(shlex.split(command)[3:])
            assert args.out == Path("results")
        assert (ROOT / shlex.split(commands[4])[1]).is_file()
        assert [*re.findall(r"(\d+) minutes expected, ends", printed)] == ["4", "7", "5"]
        assert "15 minutes expected in all, 24.5 at most" in printed

    def test_it_is_in_the_notes(self, gpu):
        notes = (ROOT / "benchmarks" / "NOTES.md").read_text()
        assert gpu.plan.commands() in notes
        assert gpu.plan.markdown() in notes

    def test_selected(self, gpu):
        assert gpu.plan.selected("kernels", None, 3).minutes == 3
        only = gpu.plan.selected(None, ["prefill", "tests"], None)
        assert ([row.name for row in only.rows], only.name) == (["tests", "prefill"], "only")
        everything = gpu.plan.selected(None, None, None)
        assert {row.name for row in everything.rows} == gpu.plan.ROWS.keys()
        assert everything.minutes == 24.5

    def test_out_is_needed(self, gpu, capsys):
        with pytest.raises(SystemExit, match="2"):
            gpu.__main__.main(["--rehearse"])
        assert "--out DIR is missing" in capsys.readouterr().err


def part(gpu, folder: Path, call: str, started: str, rows: tuple[str, ...], left_out: tuple[str, ...] = ()) -> dict:
    """Returns a result file with one result of each of these rows."""
    result = begin(gpu, folder).result
    goal = {"name": "speed", "value": 1.0, "least": None, "most": None, "passed": None, "of": None}
    return json.loads(json.dumps({
        **result, "call": call, "started": started, "command": f"{call} {started}",
        "rows": [{"row": row, "group": row, "case": started, "times": {}, "goals": [goal]} for row in rows],
        "left_out": [{"row": row, "group": row, "why": started} for row in left_out],
    }))  # fmt: skip


class TestMerge:
    def test_the_newest_result_of_each_row(self, gpu, tmp_path):
        parts = [
            part(gpu, tmp_path, "kernels", "1", ("norm", "permute"), ("nm_mask", "swap_gains")),
            part(gpu, tmp_path, "only", "2", ("norm", "swap_gains"), ("permute",)),
            part(gpu, tmp_path, "models", "3", ("inference",), ("nm_mask",)),
        ]
        for order in (parts, parts[::-1]):
            merged = gpu.merge.merge(order)
            assert [(row["row"], row["case"]) for row in merged["rows"]] == [
                ("permute", "1"), ("norm", "2"), ("swap_gains", "2"), ("inference", "3"),
            ]  # fmt: skip
            assert [(left["row"], left["why"]) for left in merged["left_out"]] == [("nm_mask", "3")]
            assert [part["started"] for part in merged["parts"]] == ["1", "2", "3"]
            assert merged["missing"] == ["checks"]

    def test_parts_of_other_machines_are_named_and_not_used(self, gpu, tmp_path):
        old, new = (
            part(gpu, tmp_path, "kernels", name, rows) for name, rows in (("1", ("norm",)), ("2", ("permute",)))
        )
        old["versions"]["torch"] = "2.0"
        merged = gpu.merge.merge([old, new])
        assert [row["row"] for row in merged["rows"]] == ["permute"]
        assert merged["not_used"] == ["kernels of 1: another GPU or other versions"]
        old["versions"], old["hardware"]["device"] = new["versions"], "another"
        assert len(gpu.merge.merge([old, new])["not_used"]) == 1
        assert "Not used: kernels of 1" in gpu.table.markdown(merged)

    def test_one_of_three_calls_makes_a_table(self, gpu, tmp_path, capsys):
        (tmp_path / "gpu-kernels-1.json").write_text(json.dumps(part(gpu, tmp_path, "kernels", "1", ("permute",))))
        assert gpu.__main__.main(["--merge", "--out", str(tmp_path)]) == 0
        page = gpu.table.markdown(json.loads((tmp_path / "gpu.json").read_text()))
        assert "Not run yet: checks, models." in page
        assert "| permute | 1 | - | - | - | 1 speed |" in page
        assert (
            "| learning step | - | - | - | - | times a dense forward + backward: not measured | <= 1.05 | - |" in page
        )
        assert "it was cut off" in page
        assert "gpu.json" in capsys.readouterr().out

    def test_a_folder_without_results(self, gpu, tmp_path, capsys):
        assert gpu.__main__.main(["--merge", "--out", str(tmp_path)]) == 2
        assert "--plan lists the calls" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


SANITIZER = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
test "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 || exit 1
{body}
"""
ONE = 'echo "begins: permute"; echo "done: permute"; '
RACES = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"


class TestChecks:
    @pytest.fixture
    def bench(self, gpu, tmp_path):
        bench = begin(gpu, tmp_path / "out")
        bench.start("memcheck", False)
        return bench

    @pytest.mark.parametrize(("body", "found", "good"), [
        (ONE + 'echo "===== ERROR SUMMARY: 0 errors"', "ERROR SUMMARY: 0 errors, in 1 cases", True),
        (ONE + f'echo "===== {RACES}"', f"{RACES}, in 1 cases", True),
        (ONE + 'echo "begins: sinkhorn"; echo "===== ERROR SUMMARY: 3 errors"; exit 1', "3 errors, in sinkhorn", False),
        (ONE + 'echo "===== ERROR SUMMARY: 3 errors"; exit 86', "3 errors, in one of the cases", False),
        (ONE + 'echo "===== ERROR SUMMARY: 0 errors"; exit 1', "exit code 1 in permute", False),
        ('echo "===== Error: Device not supported"; exit 1', "does not work here: Error: Device not supported", None),
        (ONE + "sleep 20", "cut off after", None),
    ], ids=["clean", "no races", "errors", "errors at the end", "a crash", "refused", "slow"])  # fmt: skip
    def test_compute_sanitizer(self, gpu, bench, tmp_path, monkeypatch, body, found, good):
        program = tmp_path / "compute-sanitizer"
        program.write_text(SANITIZER.format(body=body))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        gpu.checks.CHECKS["memcheck"](bench, 0.5 if "sleep" in body else 20)
        (report,) = bench.result["reports"]
        assert found in report["found"]
        assert report["good"] is good
        assert str(ROOT) not in report["output"]
        assert gpu.__main__._failed(bench.result) is (good is False)

    def test_where_it_is_not_installed(self, gpu, bench, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        gpu.checks.CHECKS["racecheck"](bench, 20)
        (report,) = bench.result["reports"]
        assert (report["what"], report["good"]) == ("racecheck", None)
        assert "not installed" in report["found"]

    def test_the_small_cases_run(self, gpu, capsys):
        assert gpu.small_cases.main(["cpu"]) == 0
        ran = gpu.checks.Ran(0, capsys.readouterr().out + "===== ERROR SUMMARY: 0 errors\n", 1.0)
        cpu = torch.device("cpu")
        count = len(tuning.cases_for([gpu.small_cases.SHAPE], gpu.small_cases.TOKENS, torch.bfloat16, cpu))
        assert gpu.checks.verdict(ran) == (f"ERROR SUMMARY: 0 errors, in {count} cases", True)

    def test_gpu_tests_are_cut_off_in_time(self, gpu, bench):
        gpu.checks.tests(bench, 0.3)
        (report,) = bench.result["reports"]
        assert report["found"].startswith("cut off after")
        assert report["good"] is False


class TestMachine:
    def test_what_nvidia_smi_says(self, gpu):
        assert gpu.machine.parsed(SMI) == {
            "clocks.sm": 1980.0, "clocks.mem": 3201.0, "temperature.gpu": 41.0, "temperature.memory": 47.0,
            "power.draw": 312.55, "limited_by": ["power cap"],
        }  # fmt: skip
        assert gpu.machine.parsed("345, 1593, 27, [N/A], 75.1, 0x1")["limited_by"] == []
        odd = gpu.machine.parsed("345, 1593, 27, [N/A], 75.1, [Not Supported]")
        assert (odd["limited_by"], odd["temperature.memory"]) == (None, None)
        assert gpu.machine.parsed("1, 1, 1, 1, 1, 0x0000000000000068")["limited_by"] == [
            "hardware slowdown", "temperature", "temperature, by hardware",
        ]  # fmt: skip

    def test_older_drivers_have_other_names(self, gpu, monkeypatch):
        asked = []

        def output(*command: str) -> str | None:
            asked.append(command)
            return SMI if "clocks_throttle_reasons.active" in command[2] else None

        monkeypatch.setattr(gpu.machine, "output", output)
        about = types.SimpleNamespace(uuid="1234-5")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
        assert gpu.machine.state(torch.device("cuda"))["clocks.sm"] == 1980
        assert [command[1] for command in asked] == ["--id=GPU-1234-5"] * 2
        monkeypatch.setattr(gpu.machine, "output", lambda *command: None)
        assert gpu.machine.state(torch.device("cuda")) is None

    def test_clocks_held_down_are_in_the_table(self, gpu, tmp_path):
        result = part(gpu, tmp_path, "kernels", "1", ("permute",))
        result["gpu_state"] = {"permute": {"before": None, "after": gpu.machine.parsed(SMI)}, "norm": {"before": None}}
        assert "clocks were held down (permute: power cap)" in gpu.table.markdown(gpu.merge.merge([result]))

    @pytest.mark.parametrize(("number", "version"), [(800, "0.8.0"), (602, "0.6.2"), (None, None)])
    def test_cusparselts_version(self, gpu, tmp_path, monkeypatch, number, version):
        monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: number is not None)
        monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: number)
        result = begin(gpu, tmp_path).result
        assert result["versions"]["cusparselt"] == version
        assert len(result["warnings"]) == (version == "0.8.0")
        page = gpu.table.markdown(gpu.merge.merge([result]))
        assert ("Warning: cuSPARSELt 0.8.0 has known regressions" in page) == (version == "0.8.0")


class FakeCuda:
    """A GPU whose captures fail on demand; like torch 2.11's, its random generator then goes on capturing."""

    def __init__(self, monkeypatch) -> None:
        self.fail, self.capturing, self.captures, self.ended = True, False, 0, []
        stream = types.SimpleNamespace(wait_stream=lambda other: None)
        fakes = {
            "graph_pool_handle": lambda: "pool", "current_stream": lambda device=None: stream,
            "Stream": lambda device=None: stream, "stream": nullcontext, "set_stream": lambda stream: None,
            "synchronize": lambda device=None: None, "current_device": lambda: 0, "graph": self.graph,
            "CUDAGraph": lambda: types.SimpleNamespace(replay=lambda: None),
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *where: self.ended.append(where), raising=False)
        monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
        monkeypatch.setattr(timing, "_timed", lambda run, device: 1e-3)

    @contextmanager
    def graph(self, graph, pool=None):
        self.capturing, failing = True, self.fail
        self.fail = False
        yield
        if failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.capturing, self.captures = False, self.captures + 1


class TestCaptures:
    def test_after_one_that_failed_random_numbers_can_be_drawn(self, monkeypatch):
        fake = FakeCuda(monkeypatch)
        times = timing.measure({"a": [lambda: None], "b": [lambda: None]}, torch.device("cuda"), repeats=3)
        assert {name: found.how for name, found in times.items()} == {"a": "stream", "b": "graph"}
        assert not fake.capturing
        assert fake.captures == 2  # the trivial one, and b's
        assert fake.ended == [(0, "pool")]

    def test_the_reason_is_not_lost(self, monkeypatch):
        fake = FakeCuda(monkeypatch)
        with pytest.raises(RuntimeError, match="not permitted"):
            timing.captured([lambda: None], torch.device("cuda"))
        assert not fake.capturing

    def test_what_is_streamed_is_not_captured(self, monkeypatch):
        fake = FakeCuda(monkeypatch)
        fake.fail = False
        runs = {"a": [lambda: None], "b": [lambda: None]}
        times = timing.measure(runs, torch.device("cuda"), repeats=3, streamed=["a"])
        assert {name: found.how for name, found in times.items()} == {"a": "stream", "b": "graph"}
        assert fake.captures == 1

    def test_the_faster_copy_is_the_yardstick(self, gpu):
        def times(stream: float, graph: float) -> dict:
            names = (gpu.table.OURS, gpu.table.COPY_BY_STREAM, gpu.table.COPY_BY_GRAPH)
            seconds = (2.0, stream, graph)
            return {n: timing.Timing((s,), "graph") for n, s in zip(names, seconds, strict=True)}

        assert gpu.bench.of_copy(times(1.0, 1.5)) == gpu.bench.of_copy(times(1.5, 1.0)) == 0.5


class TestTuning:
    @pytest.fixture(autouse=True)
    def _fresh(self, monkeypatch):
        monkeypatch.setattr(autotune, "_STATE", autotune._State())

    @pytest.mark.parametrize("slow", [False, True])
    def test_before_a_case_is_measured_within_the_rows_time(self, gpu, tmp_path, monkeypatch, slow):
        bench, tried = begin(gpu, tmp_path), []
        bench.start("permute", True)
        bench.tuning_left = 0.05 if slow else 5.0
        case = Case("fake", "1", torch.float32, lambda seed: (torch.ones(1),), torch.clone, torch.clone,
                    lambda out, expected: float((out - expected).abs().max()), 0.0, 8)  # fmt: skip

        def tune(todo, device, machine, files, on_trial):
            for number in range(3):
                tried.append(number)
                time.sleep(0.03 if slow else 0.0)
                on_trial(None)
                entry = {"case": "fake 1 float32", "config": {"number": number}, "gain": 1.5}
                autotune.write_entries(files[0], machine, {"fake 1 float32": entry})

        monkeypatch.setattr(tuning, "tune", tune)
        bench.compare("permute", case, {}, lambda times: [])
        (row,) = bench.result["rows"]
        best = row["tuned"]["fake 1 float32"]["config"]["number"]
        assert (tried, best, row["tuning_finished"]) == (([0, 1], 0, False) if slow else ([0, 1, 2], 2, True))
        assert (tmp_path / autotune.BESIDE_MODEL).is_file()
        assert tmp_path / autotune.BESIDE_MODEL in autotune._STATE.beside_models
        if slow:  # nothing is left for the next case
            bench.compare("permute", case, {}, lambda times: [])
            assert "tuned" not in bench.result["rows"][1]
            assert len(tried) == 2


class TestModels:
    @pytest.mark.parametrize(("moved", "failing"), [(False, False), (True, False), (False, True)])
    def test_cusparselts_form_is_reported(self, gpu, tmp_path, monkeypatch, moved, failing):
        """Values that lie elsewhere, and a product that cannot be captured, are findings and no failures."""
        bench, dense = begin(gpu, tmp_path), {}

        def compress(weight):
            values = pack(weight, NMPattern(2, 4))[0].flatten()
            form = torch.cat([values.roll(1) if moved else values, torch.zeros(8, dtype=values.dtype)])
            dense[form.data_ptr()] = weight
            return form

        def captured(calls, device):
            if failing:
                raise RuntimeError("not permitted")
            return lambda: None, [call() for call in calls]

        monkeypatch.setattr(cusparselt, "supports", lambda *_: True)
        monkeypatch.setattr(cusparselt, "compress", compress)
        monkeypatch.setattr(cusparselt, "product", lambda x, form, bias, out: x @ dense[form.data_ptr()].t())
        monkeypatch.setattr(gpu.models, "captured", captured)
        gpu.models.semi_structured(bench)
        *layouts, graph = bench.result["reports"]
        assert [report["same"] for report in layouts] == [not moved] * 2
        assert graph["captured"] is not failing
        assert ("not permitted" in graph["found"]) == failing
        assert not gpu.__main__._failed(bench.result)

    def test_whole_models_have_no_mask_even_during_a_capture(self, gpu, tmp_path, monkeypatch):
        bench = begin(gpu, tmp_path)
        dense = gpu.models.without_mask(gpu.models.llama(bench, 1))
        masks, forward = [], torch.nn.functional.scaled_dot_product_attention

        def attention(*args, attn_mask=None, **options):
            masks.append(attn_mask)
            return forward(*args, attn_mask=attn_mask, **options)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
        ids = torch.randint(0, 256, (1, 16))
        before = gpu.models._forward(dense, ids)()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert torch.equal(gpu.models._forward(dense, ids)(), before)
        assert masks == [None, None]
        monkeypatch.undo()
        dense.set_attn_implementation("sdpa")
        torch.testing.assert_close(gpu.models._forward(dense, ids)(), before)

    def test_one_that_cannot_be_captured_is_compared_on_the_stream(self, gpu, tmp_path, monkeypatch):
        asked = []

        def measure(runs, device, seconds, streamed=()):
            asked.append(list(streamed))
            hows = dict.fromkeys(runs, "stream") if streamed else dict(zip(runs, ("stream", "graph"), strict=True))
            return {name: timing.Timing((1.0,), hows[name]) for name in runs}

        monkeypatch.setattr(gpu.models, "measure", measure)
        bench = begin(gpu, tmp_path)
        gpu.models.inference(bench)
        assert asked == [[], list(asked[1])] * 4
        assert asked[1]
        assert {times["how"] for row in bench.result["rows"] for times in row["times"].values()} == {"stream"}
