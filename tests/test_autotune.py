"""Measured configurations: which one a launch gets, what a file may hold, and how they are found."""

import importlib
import pkgutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import permtriton
from permtriton import kernels
from permtriton.cli.autotune import _shapes_of
from permtriton.cli.main import app
from permtriton.errors import OutputError
from permtriton.kernels import autotune, permute, sparse_linear_mma
from permtriton.kernels.autotune import config_for, entry_key
from permtriton.kernels.launch import Config, triton
from permtriton.kernels.sparse_linear_mma import GpuLimits
from permtriton.kernels.tools import tuning
from permtriton.kernels.tools.case import Case
from permtriton.kernels.tools.cases import cases_by_kernel, cases_for

TABLE = (Config({"SIZE": 64}), Config({"SIZE": 128}), Config({"SIZE": 256}, num_warps=8))
DEMO = Path(permtriton.__file__).parent / "demo"
KEY = entry_key("gather", (16, 4096), torch.bfloat16)
needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """A cache folder and a state of its own for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "_STATE", autotune._State())


@pytest.fixture
def gpu(monkeypatch) -> str:
    """Makes torch say that it has a GPU; returns the machine's key."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    if triton is None:
        pytest.skip("triton is not installed")
    return autotune.machine_key()


def keep(machine: str, config: Config, key: str = KEY, path: Path | None = None) -> None:
    autotune.write_entries(path or autotune.cache_file(), machine, {key: {"config": asdict(config)}})


def chosen(rows: int = 16, dtype: torch.dtype = torch.bfloat16) -> Config:
    return config_for("gather", TABLE, (rows, 4096), dtype)


class TestChoice:
    def test_without_a_gpu_the_default(self):
        keep("NVIDIA H200, triton 3.9.0, torch 2.13.0", TABLE[1])
        assert chosen() == TABLE[0]

    def test_a_winner_is_used(self, gpu):
        keep(gpu, TABLE[2])
        assert chosen() == TABLE[2]
        assert chosen(dtype=torch.float32) == TABLE[0]
        assert config_for("scatter", TABLE, (16, 4096), torch.bfloat16) == TABLE[0]

    def test_neighbouring_rows_share_it(self, gpu):
        keep(gpu, TABLE[1])
        assert [chosen(rows) == TABLE[1] for rows in (8, 9, 16, 17)] == [False, True, True, False]
        assert autotune.bucket((0, 3)) == (1, 3)

    @pytest.mark.parametrize("change", [("H200", "H100"), ("torch ", "torch 1"), ("triton ", "triton 1")])
    def test_of_another_machine_it_is_not(self, gpu, change):
        keep(gpu.replace(*change), TABLE[1])
        assert chosen() == TABLE[0]

    def test_of_another_cusparselt_it_is_not(self, gpu, monkeypatch):
        monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: 801)
        keep(gpu, TABLE[1])
        assert chosen() == TABLE[0]
        keep(f"{gpu}, cuSPARSELt 801", TABLE[1])
        autotune._STATE.forget()
        assert chosen() == TABLE[1]

    def test_what_a_library_found_needs_no_table(self, gpu):
        keep(gpu, TABLE[1])
        assert config_for("gather", TABLE[:1], (16, 4096), torch.bfloat16, lambda: None) == TABLE[1]
        assert config_for("scatter", TABLE[:1], (16, 4096), torch.bfloat16, lambda: None) == TABLE[0]

    def test_each_call_chooses_of_what_it_can_use(self, gpu):
        """Calls of one shape may differ in that: a layer with cuSPARSELt's form of its weight, and one without."""
        keep(gpu, TABLE[1])
        assert chosen() == TABLE[1]
        assert config_for("gather", (TABLE[0], TABLE[2]), (16, 4096), torch.bfloat16) == TABLE[0]
        assert chosen() == TABLE[1]

    def test_forced_and_requested(self, gpu):
        keep(gpu, TABLE[1])
        with autotune.requests() as requested:
            assert [chosen(), chosen()] == [TABLE[0]] * 2
            with autotune.forced({"gather": TABLE[2]}):
                assert chosen() == TABLE[2]
                assert config_for("scatter", TABLE, (1,), torch.int8) == TABLE[0]
        assert list(requested) == [KEY, "scatter 1 int8"]
        assert chosen() == TABLE[1]

    def test_what_ran_is_collected(self, gpu):
        keep(gpu, TABLE[1])
        with autotune.choices() as ran:
            assert chosen() == TABLE[1]
            autotune.note("route", "dense")
        chosen(64)
        assert ran == {KEY: "SIZE=128 num_warps=4 num_stages=2", "route": "dense"}


class TestFile:
    def test_entries_are_added(self):
        for number, key in enumerate(("a 1 int8", "b 1 int8")):
            keep("one", TABLE[number], key)
        keep("two", TABLE[2], "a 1 int8")
        found = autotune.read_entries(autotune.cache_file(), "one")
        assert {key: entry["config"]["constants"]["SIZE"] for key, entry in found.items()} == {
            "a 1 int8": 64,
            "b 1 int8": 128,
        }

    def test_writers_at_once_lose_no_entry(self):
        """Threads stand for processes: each opens the folder for itself, and so has a lock of its own."""
        keys = [f"a {number} int8" for number in range(8)]
        with ThreadPoolExecutor(len(keys)) as pool:
            list(pool.map(lambda key: keep("one", TABLE[0], key), keys))
        assert sorted(autotune.read_entries(autotune.cache_file(), "one")) == keys

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", '{"version": 9, "machines": {}}', '{"version": 1, "machines": 7}', "\udcff"],
    )
    def test_a_damaged_one_is_ignored_with_a_warning(self, gpu, text):
        path = autotune.cache_file()
        path.parent.mkdir(parents=True)
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.warns(UserWarning, match=r"autotune\.json"):
            assert chosen() == TABLE[0]
        with pytest.warns(UserWarning, match=r"autotune\.json"):
            keep(gpu, TABLE[1])
        assert chosen() == TABLE[1]

    def test_an_interrupted_write_leaves_the_old_one_whole(self, monkeypatch):
        keep("one", TABLE[1])
        before = autotune.cache_file().read_text()

        def refuse(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(autotune.os, "replace", refuse)
        with pytest.raises(OutputError, match="No space left"):
            keep("one", TABLE[2])
        assert autotune.cache_file().read_text() == before
        assert [path.name for path in autotune.cache_file().parent.iterdir()] == ["autotune.json"]


class Tuned:
    """A kernel on the CPU whose configurations are right or wrong and take what the test says."""

    def __init__(self, monkeypatch, seconds: dict[int, float], wrong: tuple[int, ...] = ()) -> None:
        self.measured: list[int] = []
        self.wrong = wrong
        self.case = Case(
            "gather", "16x4096", torch.bfloat16, lambda random: (random.generator.initial_seed(),),
            self.run, lambda seed: seed, 0.0,
            bytes=1000, error=lambda found, expected: abs(found - expected),
        )  # fmt: skip

        def quantiles(calls, device):
            assert calls[0]()
            self.measured.append(self.size)
            return (seconds[self.size],) * 3

        monkeypatch.setattr(tuning, "quantiles", quantiles)

    def run(self, seed: int) -> int:
        self.size = config_for("gather", TABLE, (16, 4096), torch.bfloat16).constants["SIZE"]
        if self.size in self.wrong:
            return seed + 7
        return seed or True

    def tune(self) -> dict:
        for _ in tuning.tune([self.case], torch.device("cpu"), "here", autotune.cache_file()):
            pass
        return autotune.read_entries(autotune.cache_file(), "here")


class TestSearch:
    def test_the_fastest_wins(self, monkeypatch):
        tuned = Tuned(monkeypatch, {64: 3.0, 128: 1.0, 256: 2.0})
        entry = tuned.tune()[KEY]
        assert entry["config"] == asdict(TABLE[1])
        assert entry["gain"] == 3.0
        assert {name: trial["p50_us"] for name, trial in entry["trials"].items()} == {
            autotune.describe(config): 1e6 * seconds for config, seconds in zip(TABLE, (3.0, 1.0, 2.0), strict=True)
        }

    def test_what_is_wrong_is_not_timed(self, monkeypatch):
        entry = Tuned(monkeypatch, {64: 3.0, 256: 2.0}, wrong=(128,)).tune()[KEY]
        assert entry["config"] == asdict(TABLE[2])
        assert "wrong" in entry["trials"][autotune.describe(TABLE[1])]["error"]

    def test_an_interrupted_run_goes_on(self, monkeypatch):
        times = {64: 3.0, 256: 2.0}
        tuned = Tuned(monkeypatch, times)

        class Interrupted(BaseException):
            pass

        def interrupt(seed: int) -> int:
            if Tuned.run(tuned, seed) and tuned.size == 128:
                raise Interrupted
            return seed or True

        monkeypatch.setattr(tuned, "case", Case(**{**vars(tuned.case), "run": interrupt}))
        with pytest.raises(Interrupted):
            tuned.tune()
        again = Tuned(monkeypatch, {**times, 128: 1.0})
        assert again.tune()[KEY]["config"] == asdict(TABLE[1])
        assert again.measured[:2] == [128, 256], "what was timed before is not timed again"


class TestCommand:
    def run(self, *arguments: str):
        return CliRunner().invoke(app, ["autotune", *arguments])

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
    def test_without_a_gpu_it_says_so(self):
        shown = self.run("--shape", "64x128")
        assert shown.exit_code == 2
        assert "CUDA GPU" in shown.output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [((), "--model DIR or --shape"), (("--shape", "64"), "OUTxIN"), (("--shape", "64x66"), "multiple of 4"),
         (("--shape", "64x64", "--tokens", "1,0"), "positive integer"),
         (("--shape", "64x64", "--kernel", "gemm"), "sinkhorn"), (("--shape", "64x64", "--dtype", "int8"), "float16"),
         (("--shape", "3x4"), "4 output features or more")],
    )  # fmt: skip
    def test_what_makes_no_sense_is_refused(self, arguments, message):
        shown = self.run(*arguments)
        assert shown.exit_code == 2
        assert message in shown.output

    @pytest.mark.slow
    def test_the_shapes_of_a_model(self):
        shapes, dtype = _shapes_of(DEMO)
        assert dtype == torch.float32, "the model's dtype"
        assert {(704, 256), (256, 704)} <= {*shapes}
        assert (1408, 256) in shapes, "gate and up, which vLLM joins"


def test_every_kernel_is_tuned(monkeypatch):
    monkeypatch.setattr(permute, "CONFIGS", TABLE)
    cases = {case.name: case for case in cases_for([(64, 128)], [1, 16], torch.bfloat16)}
    assert [*cases["permute 16x128 in blocks bfloat16"].tables.values()] == [TABLE]
    assert {name.split()[0] for name in cases} == set(cases_by_kernel([], [], torch.float32))


@needs_triton
def test_every_configuration_is_tried_in_some_case(monkeypatch):
    todo = []
    for has_wgmma, dtype in product((False, True), (torch.float32, torch.bfloat16)):
        monkeypatch.setattr(sparse_linear_mma, "limits_of", lambda _, it=has_wgmma: GpuLimits(132, has_wgmma=it))
        todo += cases_for([(64, 128)], [1, 16], dtype)
    files = [
        importlib.import_module(file.name) for file in pkgutil.iter_modules(kernels.__path__, "permtriton.kernels.")
    ]
    tables = [configs for file in files for name, configs in vars(file).items() if name.endswith("CONFIGS")]
    tried = {id(config) for case in todo for configs in case.tables.values() for config in configs}
    assert tried == {id(config) for configs in tables for config in configs}


def test_a_choice_between_kernels_is_tuned_after_them():
    """The inner table's winner is in force when the outer one, requested first, is timed."""
    tables = {"outer": TABLE[:2], "inner": TABLE[1:], "only": TABLE[:1]}

    def run() -> None:
        for name, configs in tables.items():
            config_for(name, configs, (8,), torch.int8)

    case = Case("it", "8", torch.int8, lambda random: (), run, run, 0.0, 1)
    assert [request.op for request in tuning.requests_of(case, torch.device("cpu"))] == ["inner", "outer"]


def test_the_kernels_of_every_route_are_tuned_on_it(gpu, monkeypatch):
    """Those of a route that is not the default one too; a route that cannot run here costs no other."""
    routes = tuple(Config({"ROUTE": route}) for route in range(3))

    def run() -> int:
        route = config_for("route", routes, (8,), torch.int8).constants["ROUTE"]
        if route == 1:
            raise RuntimeError("not on this GPU")
        return 1000 * route + config_for(f"kernel {route}", TABLE[:2], (8,), torch.int8).constants["SIZE"]

    def quantiles(calls, device):
        return (1e6 / calls[0](),) * 3  # a larger size is faster

    monkeypatch.setattr(tuning, "quantiles", quantiles)
    case = Case("it", "8", torch.int8, lambda random: (), run, lambda: None, 0.0, 1, error=lambda *_: 0.0)
    for _ in tuning.tune([case], torch.device("cpu"), gpu, autotune.cache_file()):
        pass
    entries = autotune.read_entries(autotune.cache_file(), gpu)
    chosen = {key.rsplit(" ", 2)[0]: entry["config"]["constants"] for key, entry in entries.items()}
    assert chosen == {"kernel 0": {"SIZE": 128}, "kernel 2": {"SIZE": 128}, "route": {"ROUTE": 2}}


def test_the_cases_are_right_on_the_references():
    for case in cases_for([(64, 128), (32, 96)], [1, 5], torch.float32):
        assert case.check(torch.device("cpu")) is None, case.name
