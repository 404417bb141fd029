"""What a compilation will need, before it starts: time, disk, and the dry run that only says so."""

import copy
import json
import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import permtriton
from permtriton import config_from
from permtriton.checkpoint.save import save_checkpoint
from permtriton.data.samples import Samples
from permtriton.driver import forecast, memory_forecast
from permtriton.driver.forecast import assumed_pass, check_disk, disk_needs, duration, measured_pass
from permtriton.driver.pipeline import compile_model
from permtriton.errors import OutputError
from permtriton.methods.sizes import MemoryEstimate
from permtriton.model.experts import unstacked_experts
from permtriton.running.placement import DevicePlacement
from permtriton.running.resume import Workspace
from permtriton.util.sparsity import NMPattern

from . import zoo
from .desk import LEARN, RUNNER, app
from .two_ranks import Interrupting
from .world import free_memory, nothing_runs
from .zoo import find_plan

SAMPLES = Samples.of(torch.arange(64).view(4, 16) % 40)


@pytest.fixture(scope="module")
def model():
    return zoo.tiny_llama()


@pytest.fixture(scope="module")
def plan(model):
    return find_plan(model, NMPattern(2, 4))


def test_measuring_leaves_the_model_as_it_was(model, plan):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert measured_pass(zoo.start(model, config_from({"recipe": "heuristic,searched,mask"}), SAMPLES, plan)) > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad and not p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.slow
def test_disk_is_what_a_run_writes(tmp_path):
    """A state is there twice for a moment: the new one is written beside the old."""
    config = config_from({"recipe": "mask,distill", "distill_epochs": 6})
    model, path = zoo.tiny_llama(hidden_size=64, intermediate_size=128), tmp_path / "state.safetensors"
    needs = disk_needs(zoo.start(model, config, SAMPLES))
    interrupting = Interrupting("distill", 5)
    with pytest.raises(KeyboardInterrupt):
        compile_model(copy.deepcopy(model), None, config, ids=SAMPLES.inputs, resume_path=path, progress=interrupting)
    states = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert needs["states of interrupted runs"] == pytest.approx(2 * states, rel=0.1)
    compiled = compile_model(model, None, config, ids=SAMPLES.inputs, resume_path=path)
    save_checkpoint(compiled, tmp_path / "out", overwrite=False)
    sizes = {file: file.stat().st_size for file in (tmp_path / "out").iterdir()}
    weights = sum(size for file, size in sizes.items() if file.suffix == ".safetensors")
    assert needs["the output"] == pytest.approx(weights + forecast.SMALL_FILES, rel=0.01)
    assert sum(sizes.values()) < needs["the output"]


@pytest.mark.parametrize("save_format", ["packed", "fp8"])
@pytest.mark.parametrize("options", [{}, {"sparsity": "4:8"}, {"dense_share": 0.5}])
@pytest.mark.slow
def test_a_format_with_fewer_bytes_is_written_beside_a_dense_folder(options, save_format, tmp_path):
    config = config_from({"recipe": "mask", **options})
    model = zoo.tiny_llama(hidden_size=256, intermediate_size=512).bfloat16()
    needs = disk_needs(zoo.start(model, config, SAMPLES), save_format)
    compiled, weights = compile_model(model, None, config, ids=SAMPLES.inputs), {}
    for each in ("dense", save_format):
        folder = compiled.save_pretrained(tmp_path / each, format=each)
        weights[each] = (folder / "model.safetensors").stat().st_size
    assert needs["the dense folder that it is made from"] == pytest.approx(
        weights["dense"] + forecast.SMALL_FILES, rel=0.01
    )
    rounded = 0.06 if config.dense_share else 0.02  # whole linears stay dense
    assert needs["the output"] - forecast.SMALL_FILES == pytest.approx(weights[save_format], rel=rounded)
    assert needs["the output"] > weights[save_format]


def test_a_dry_run_knows_in_which_format_is_saved(desk):
    found = [
        json.loads(RUNNER.invoke(app, desk.compile("--dry-run", "--json", "--save-format", each)).stdout)["disk"]
        for each in ("dense", "packed")
    ]
    assert [len(each) for each in found] == [1, 2]


def test_a_state_that_is_on_the_disk_already_needs_no_more_space(model, plan, tmp_path):
    config = config_from({"recipe": "mask,distill"})
    path, name = tmp_path / "state.safetensors", "states of interrupted runs"
    start = replace(zoo.start(model, config, SAMPLES, plan), workspace=Workspace(resume_path=path))
    fresh = disk_needs(start)[name]
    (tmp_path / "state.distill.safetensors").write_bytes(bytes(1000))
    assert disk_needs(start)[name] == fresh - 1000


def test_a_disk_that_is_too_small_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: namedtuple("Usage", "free")(2**20))
    check_disk({"the output": 2**20}, tmp_path)
    with pytest.raises(OutputError, match=r"1 MiB free, but .* 3 MiB \(2 MiB for the output, 1 MiB for states\)"):
        check_disk({"the output": 2**21, "states": 2**20}, tmp_path)


def test_a_command_refuses_a_full_disk_before_it_works(desk, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: namedtuple("Usage", "free")(2**20))
    desk.refuses(desk.compile(), "1 MiB free", "--output on another disk")


def test_a_dry_run_writes_nothing(desk):
    before = desk.files()
    result = RUNNER.invoke(app, desk.compile("--dry-run"))
    assert result.exit_code == 0, result.output
    words = ("stream", "where it would go", "share of parameters to prune", "roughly", "at the peak", "free")
    assert [word for word in words if word not in result.stdout] == []
    assert desk.files() == before
    found = json.loads(RUNNER.invoke(app, desk.compile("--dry-run", "--json")).stdout)
    assert {"sites", "permutations", "memory", "seconds", "disk"} <= set(found)
    assert desk.files() == before


@pytest.mark.slow(but=["elsewhere-qwen3_moe", "elsewhere-mixtral"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("options", [(), ("--devices", "1x80")], ids=["here", "elsewhere"])
def test_a_dry_run_of_experts_that_one_parameter_holds(desk, name, options):
    """The plan names each of them, the model only the parameter."""
    model = zoo.build(name)
    model.save_pretrained(desk.folder / name)
    ids = {"input_ids": zoo.token_ids(4, 16)}
    save_file(ids, desk.folder / "ids.safetensors")
    words = desk.compile(
        "--dry-run", "--json", *options, "--calibration", desk.folder / "ids.safetensors", model=desk.folder / name
    )
    result = RUNNER.invoke(app, words)
    assert result.exit_code == 0, result.output
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert permtriton.dry_run(model, data=ids, recipe="mask").pruned_parameters > experts > 0


@pytest.fixture
def never_run(monkeypatch):
    """Too little memory, and a model that must not be run."""
    nothing_runs(monkeypatch)
    free_memory(monkeypatch, 1000)


def test_a_model_that_does_not_fit_is_refused_before_it_is_run(desk, never_run):
    desk.refuses(desk.compile(), "1000 B are free")


def test_a_dry_run_of_a_model_that_does_not_fit_measures_no_time(desk, never_run):
    result = RUNNER.invoke(app, desk.compile("--dry-run", *LEARN))
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.replace("│", " ").split())
    assert "not measured: this compilation needs about" in words
    assert "to save memory backward passes recompute activations; less is kept, and" in words
    found = json.loads(RUNNER.invoke(app, desk.compile("--dry-run", "--json")).stdout)
    assert found["seconds"] is None
    assert "are free" in found["refused"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("4x80", "--shard", "--recipe", "sparsegpt"), ["the step sparsegpt changes weights", "spread over GPUs"]),
        (("1x80", "--shard"), ["start permtriton with torchrun"]),
        (("3x80", "--shard", "--importance", "obs"), ["3 processes", "a multiple of 3"]),
        (("8x80",), ["8 processes cannot share 4 calibration sequences"]),
        (("1x80", "--onload", *LEARN), ["the step learned needs all weights at once"]),
        (("1x80", "--device", "cpu"), ["--devices plans for GPUs", "leave out one"]),
    ],
)
def test_a_dry_run_for_other_devices_is_refused_where_the_compilation_would_be(desk, options, words):
    desk.refuses(desk.compile("--dry-run", "--devices", *options), *words)


def test_a_dry_run_for_other_devices_reads_no_text(desk):
    result = RUNNER.invoke(app, ["compile", str(desk.model), "--dry-run", "--devices", "2x80", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["memory"]["peak"] > 0
    assert all(seconds > 0 for seconds in found["seconds"].values())
    assert "assumed" in found["assumed"], "nothing is timed on a GPU that is not there"


def test_a_dry_run_for_other_devices_shares_the_samples_among_them(desk):
    result = RUNNER.invoke(app, desk.compile("--dry-run", "--devices", "4x80", "--shard"))
    assert result.exit_code == 0, result.output
    assert "spread over the devices" in " ".join(result.stdout.replace("│", " ").split())


@pytest.mark.parametrize(("name", "number"), [("num_experts_per_tok", 2), ("top_k_experts", 2), ("moe_topk", [1, 3])])
@pytest.mark.slow
def test_a_token_runs_the_experts_that_it_is_sent_to(name, number):
    """Two of five, unless calibration has it run all of them; Gemma 4 and HunYuan call their number otherwise."""
    model, gpu, needs = (
        zoo.build("qwen3_moe"),
        memory_forecast.Devices("cuda", 1, 1),
        MemoryEstimate(DevicePlacement.WHOLE, 0, 0, 0, {}),
    )
    model.config.num_experts_per_tok = 0
    setattr(model.config, name, number)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    every = sum(p.numel() for p in model.parameters())
    with unstacked_experts(model):
        own, all_of_them = (
            assumed_pass(zoo.start(model, config_from({"calibrate_all_experts": wanted}), SAMPLES), needs, gpu)
            for wanted in (False, True)
        )
    assert own / all_of_them == pytest.approx(1 - experts * 3 / 5 / every)


@pytest.mark.slow
def test_a_run_says_what_it_needs_before_it_starts(desk):
    result = RUNNER.invoke(app, desk.compile())
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stderr.splitlines() if line.startswith("memory: "))
    assert "on cpu at the peak" in line
    assert "time: roughly" in line
    assert "disk: 16 MiB" in line
    report = json.loads((desk.out / "permtriton.json").read_text())
    assert report["memory"]["estimate"]["peak"] > 2**26


@pytest.mark.parametrize(("count", "text"), [(0.1, "1 s"), (40, "40 s"), (130, "2 min"), (9000, "2.5 h")])
def test_durations_are_readable(count, text):
    assert duration(count) == text
