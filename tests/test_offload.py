"""Compiling with an offload folder gives the bits of a compilation in memory, and leaves nothing behind."""

import errno
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from permtriton import CompileConfig, NMPattern, config_from, find_plan
from permtriton.data.samples import Samples
from permtriton.driver import memory
from permtriton.driver.forecast import check_disk
from permtriton.driver.pipeline import compile_model
from permtriton.driver.prepare import _check_disks
from permtriton.driver.workspace import Workspace
from permtriton.errors import ConfigError, OutputError
from permtriton.evaluation.held_out import Evaluation
from permtriton.methods.measure.fisher import fisher_information
from permtriton.methods.measure.objective import dense_objective
from permtriton.methods.measure.statistics import site_statistics
from permtriton.methods.train.reconstruction import reconstruct
from permtriton.model.forward import last_hidden_state
from permtriton.model.load import load_original
from permtriton.model.seq2seq import samples_of
from permtriton.model.source import Source
from permtriton.passes.plan import linear_module, named_layers
from permtriton.running import offload as module
from permtriton.running.layer_stream import LayerStream
from permtriton.running.offload import OffloadFolder
from permtriton.util.progress import NoProgress

from . import test_seq2seq, zoo
from .expert_stacks import unstacked

IDS = zoo.token_ids(6, 12)
SAMPLES = Samples.of(IDS)


@pytest.fixture(autouse=True)
def everything_in_files(monkeypatch):
    """Tensors of tiny models are large enough."""
    monkeypatch.setattr(module, "SMALLEST", 64)


@pytest.fixture
def offload(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    return OffloadFolder(folder)


@pytest.mark.parametrize("name", ["gemma2", "opt", "bert", "mixtral"])
def test_measures_of_layers_one_after_another_have_the_same_bits(name, offload):
    """Also where some sequences are left over, and for linears outside of layers."""
    model, plan = unstacked(name) if name == "mixtral" else zoo.planned(name)
    config = CompileConfig(micro_batch_size=4)
    kind = "kl" if model.can_generate() else "cosine"
    stream = LayerStream(model, named_layers(model, plan), list(SAMPLES.split(4)), offload)
    assert len(stream.layers) > 1, "otherwise the model runs as a whole, and nothing is tested"
    for method in ("wanda", "obs"):
        expected = site_statistics(model, plan, method, SAMPLES, 4, NoProgress())
        found = site_statistics(model, plan, method, SAMPLES, 4, NoProgress(), offload)
        assert all(torch.equal(found[site], expected[site]) for site in expected), method
    expected = fisher_information(model, plan, kind, SAMPLES, config, NoProgress())
    found = fisher_information(model, plan, kind, SAMPLES, config, NoProgress(), offload)
    for linear, information in expected.items():
        assert torch.equal(found[linear].row, information.row), linear
        assert torch.equal(found[linear].column, information.column), linear
        assert found[linear].tokens == information.tokens
    dense = Evaluation(model, SAMPLES, NoProgress()).dense
    assert Evaluation(model, SAMPLES, NoProgress(), named_layers(model, plan), offload).dense == dense


CONFIG = config_from(
    {"samples": 6, "sequence_length": 12, "reconstruct_epochs": 2, "reconstruct_batch_size": 2}
    | {"tune_steps": 2, "tune_batch_size": 2, "distill_epochs": 1, "distill_batch_size": 2},
    "heuristic,sparsegpt,reconstruct,tune,distill",
)


def compiled(source, folder, output, layout):
    """Compiles a stored model in bfloat16, which is not its dtype, and saves it."""
    files = folder and OffloadFolder(folder)
    model, tokenizer = load_original(Source(str(source), "bfloat16", "cpu"), offload=files)
    config = replace(CONFIG, layout=layout)
    result = compile_model(
        model,
        tokenizer,
        config,
        ids=IDS,
        evaluation_windows=IDS,
        offload=files,
        resume_path=output / "state.safetensors",
    )
    return result, result.save_pretrained(output / "model"), files


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["portable", "fused"])
def test_the_result_is_that_in_memory_and_no_file_is_left(layout, tmp_path):
    zoo.planned("llama_eager")[0].save_pretrained(tmp_path / "dense")
    outputs = []
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
        folder = tmp_path / "files" if name == "disk" else None
        if folder:
            folder.mkdir()
        result, path, files = compiled(tmp_path / "dense", folder, tmp_path / name, layout)
        assert result.report["verification"]["reloaded"] == "same outputs"
        outputs.append((load_file(path / "model.safetensors"), json.loads((path / "permtriton.json").read_text())))
        if files:
            large = [each for each in result.model.parameters() if each.numel() * 2 >= module.SMALLEST]
            assert large
            assert all(files.holds(each) for each in large)
            assert os.listdir(folder) == []
    (memory, one), (disk, other) = outputs
    assert memory.keys() == disk.keys()
    assert all(torch.equal(memory[tensor], disk[tensor]) for tensor in memory)
    assert one["evaluation"] == other["evaluation"]
    assert one["command"] == other["command"]


@pytest.mark.parametrize(
    ("recipe", "step"),
    [
        ("learned,mask", "learned"),
        ("values", "searched"),
    ],
)
def test_steps_that_need_all_weights_at_once_are_refused(recipe, step, offload):
    model, config = zoo.planned("llama_eager")[0], config_from(recipe=recipe)
    with pytest.raises(ConfigError, match=f"the step {step} .*leave {step} out of `recipe=`"):
        compile_model(model, config=config, ids=IDS, offload=offload)


def test_folders_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="make it on a disk first"):
        OffloadFolder(tmp_path / "nowhere")
    monkeypatch.setattr(module, "_file_system", lambda folder: "tmpfs")
    with pytest.raises(ConfigError, match="lies in memory"):
        OffloadFolder(tmp_path)


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_a_limit_of_open_files_that_cannot_be_raised_stays(error, tmp_path, monkeypatch):
    """macOS refuses more than its kernel allows, also where it says that the most is infinite."""

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(resource, "setrlimit", failing)
    assert OffloadFolder(tmp_path).empty((512, 512), dtype=torch.float32).shape == (512, 512)


def test_a_gpu_is_refused(offload):
    parameter = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(ConfigError, match="choose `device=cpu`"):
        offload.move(SimpleNamespace(parameters=lambda: [parameter]))


@pytest.mark.parametrize(
    ("code", "advice"), [(errno.ENOSPC, "free some space"), (errno.EMFILE, "raise the limit of open files")]
)
def test_a_file_that_cannot_be_made_is_one_line_and_no_killed_process(code, advice, offload, monkeypatch):
    def failing(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", failing)
    with pytest.raises(OutputError, match=f"cannot hold 1 MiB more: {os.strerror(code)}; {advice}"):
        offload.empty((512, 512), dtype=torch.float32)


def test_a_disk_that_is_too_small_is_refused(offload):
    with pytest.raises(OutputError, match="this compilation writes"):
        check_disk({"the model": 1 << 60}, offload.folder)


def test_output_and_files_on_one_disk_must_fit_together(offload, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=10))
    needs = SimpleNamespace(offloaded={memory.IN_PLACE: 1000, "copies": 6})  # the model is in its files already
    forecast = SimpleNamespace(disk={"the output": 6}, needs=needs)
    workspace = Workspace(NoProgress(), offload.folder.parent / "state.safetensors", offload)
    with pytest.raises(OutputError, match=r"12 B \(6 B for the output, 6 B for copies\)"):
        _check_disks(workspace, forecast)
    monkeypatch.setattr(Path, "stat", lambda folder: SimpleNamespace(st_dev=str(folder)))
    assert _check_disks(workspace, forecast) == offload.folder.parent, "two disks hold 6 B each"
    needs.offloaded["copies"] = 11
    with pytest.raises(OutputError, match="11 B for copies"):
        _check_disks(workspace, forecast)


def test_targets_are_in_files_in_any_order(offload):
    model, order = zoo.build("llama"), torch.randperm(64, generator=torch.Generator().manual_seed(0))
    objective = dense_objective(model, "kl", SAMPLES, 4, offload)
    assert torch.equal(objective.target, last_hidden_state(model, SAMPLES))
    reordered = objective.reordered(order, offload)
    assert torch.equal(reordered.target, objective.target[..., order])
    assert all(offload.moved(each.target) is each.target for each in (objective, reordered))
    devices = memory.Devices.of(torch.device("cpu"), offloaded=True)
    needs = memory.estimate(zoo.start(model, config_from({}, "mask,tune,distill"), SAMPLES), devices)
    assert not [use for uses in needs.stages.values() for use in uses if "targets" in use], "none is in memory"


@pytest.mark.slow
def test_pruned_weights_wait_in_files_while_dense_ones_take_their_place(offload):
    """T5's decoder has its dense weights while the inputs of the encoder's layers are recorded."""
    model, config = test_seq2seq.build("t5"), config_from({"reconstruct_epochs": 1}, "mask,reconstruct")
    plan, samples, seen = find_plan(model, NMPattern(2, 4)), samples_of(model, IDS), []
    weights = {name: linear_module(model, name).weight for _, name in plan.linears()}
    decoder = {name: weight.detach().clone() for name, weight in weights.items() if name.startswith("decoder")}
    dense = {name: weight + 1 for name, weight in weights.items()}

    def look(*_: object) -> None:
        files = {bytes(each) for each in offload._maps.values()}
        swapped = [name for name in decoder if torch.equal(weights[name], dense[name])]
        seen.append([decoder[name].numpy().tobytes() in files for name in swapped])

    model.encoder.register_forward_pre_hook(look)
    reconstruct(model, plan, dense, samples, config.steps[1], config, NoProgress(), store=offload)
    assert [True] * len(decoder) in seen
    assert all(map(all, seen))
    needs = memory.estimate(zoo.start(model, config, samples, plan), memory.Devices.of(torch.device("cpu")))
    assert needs.stages["reconstruct"]["weights before"] == sum(each.nbytes for each in decoder.values())


def test_released_pages_come_back_as_they_were(offload):
    tensor = offload.empty((1024, 1024), dtype=torch.bfloat16)
    assert not tensor.any()
    tensor.fill_(2)
    offload.release()
    assert bool((tensor == 2).all())
    weight = torch.randn(1024, 256).t()
    moved = offload.moved(weight)
    assert torch.equal(moved, weight)
    assert moved.is_contiguous()
    assert offload.moved(moved) is moved


@contextmanager
def control_group(name: str, limit: int | None) -> Iterator[Path]:
    """Yields the folder of a control group with a limit of memory, in bytes; skips where none can be made."""
    groups = Path("/sys/fs/cgroup")
    first = (groups / "memory").is_dir()  # version 1 of control groups
    folder = (groups / "memory" if first else groups) / f"{name}-{os.getpid()}"
    try:
        folder.mkdir()
        if limit is not None:
            (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


def compiled_within(limit: int | None, model: Path, ids: Path, *options: str) -> tuple[str, int]:
    """Compiles a stored model in a process of its own; returns the result's SHA-256, and the most memory in bytes."""
    output = ids.parent / f"{model.name}-{'memory' if limit is None else limit}{len(options)}"
    command = f"""{sys.executable} -m permtriton compile {model} --output {output} --calibration {ids} --samples 4
        --sequence-length 64 --eval-data none --recipe sparsegpt"""
    with control_group("permtriton-test", limit) as group:
        enter = f"echo $$ > {group}/cgroup.procs && exec "
        run = ["sh", "-c", enter + " ".join([*command.split(), *options])]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        peak = next(group / each for each in ("memory.peak", "memory.max_usage_in_bytes") if (group / each).exists())
        most = int(peak.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    return hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest(), most


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_model_four_times_the_memory_limit_gives_the_bytes_of_one_in_memory(tmp_path):
    """The limit is what the same command takes for a small model, and a quarter of the large model's 0.7 GB."""
    for name, layers in (("small", 2), ("large", 36)):
        sizes = {"hidden_size": 640, "intermediate_size": 1728, "num_attention_heads": 10, "vocab_size": 1000}
        config = LlamaConfig(**sizes, num_hidden_layers=layers, max_position_embeddings=256)
        LlamaForCausalLM(config).save_pretrained(tmp_path / name, max_shard_size="10GB")
    ids, files = tmp_path / "ids.jsonl", tmp_path / "files"
    ids.write_text("\n".join(json.dumps({"input_ids": row.tolist()}) for row in zoo.token_ids(4, 64)))
    files.mkdir()
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    offload = ("--offload", str(files))
    compiled_within(None, tmp_path / "small", ids)  # the libraries come into memory that is not counted below
    expected, in_memory = compiled_within(None, tmp_path / "large", ids)
    _, program = compiled_within(None, tmp_path / "small", ids, *offload)
    found, used = compiled_within(program + size // 4, tmp_path / "large", ids, *offload)
    assert found == expected
    assert used <= program + size // 4 < in_memory
