"""The estimate of a compilation's memory, and the refusal of one that cannot fit."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from permtriton import config_from
from permtriton.data.samples import Samples
from permtriton.driver import memory_forecast
from permtriton.driver.choose_placement import choose, first_fitting, placement_refusal
from permtriton.driver.pipeline import compile_model
from permtriton.errors import ConfigError
from permtriton.methods.sizes import MemoryEstimate
from permtriton.model.experts import unstacked_experts
from permtriton.running.placement import DevicePlacement, allowed_placements
from permtriton.util.machine import format_bytes
from permtriton.util.sparsity import NMPattern

from . import zoo
from .world import free_memory
from .zoo import find_plan

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return zoo.tiny_llama()


@pytest.fixture(scope="module")
def plan(model):
    return find_plan(model, NMPattern(2, 4))


def needs(model, plan, **options) -> MemoryEstimate:
    config = config_from(options)
    shape = (config.calibration.samples, config.calibration.sequence_length)
    windows = torch.zeros((3, config.calibration.sequence_length), dtype=torch.int64)
    start = zoo.start(model, config, Samples.of(torch.zeros(shape, dtype=torch.int64)), plan)
    return first_fitting(replace(start, held_out=Samples.of(windows)), memory_forecast.Devices.of(CPU))


def beside(model, plan, **options) -> int:
    """Returns what the largest stage needs beside program and model."""
    found = needs(model, plan, **options)
    return found.stages[found.largest]


def refusal(found: MemoryEstimate, devices: memory_forecast.Devices | None = None) -> str:
    sizes = zoo.start(zoo.tiny_llama(), config_from({"recipe": "mask"}), Samples.of(zoo.tiny_ids(2, 8))).sizes
    return memory_forecast.refusal(found, devices or memory_forecast.Devices.of(CPU), sizes)


def test_a_model_without_a_language_model_head_makes_no_logits():
    """Its config may name a vocabulary all the same, as that of BERT and of Whisper for audio classification does."""
    encoder = zoo.build("bert")
    found = needs(encoder, find_plan(encoder, NMPattern(2, 4)))
    assert found.stages["evaluation"] == found.stages["calibration"]


@pytest.mark.parametrize("name", ["sequence_length", "samples", "micro_batch_size"])
def test_estimate_grows(model, plan, name):
    totals = [beside(model, plan, recipe="heuristic,searched,mask", **{name: count}) for count in (8, 64, 1024)]
    assert totals[0] < totals[1] < totals[2]


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"recipe": "heuristic,mask"}, {"recipe": "heuristic,learned,mask"}),
        ({"recipe": "heuristic,mask"}, {"recipe": "heuristic,searched,mask"}),
        ({"recipe": "mask"}, {"recipe": "sparsegpt", "importance": "wanda"}),
        ({"recipe": "mask"}, {"recipe": "mask,distill"}),
        ({"recipe": "mask", "importance": "wanda"}, {"recipe": "mask", "importance": "obs"}),
        (
            {"recipe": "values", "activation_checkpointing": True},
            {"recipe": "values", "activation_checkpointing": False},
        ),
    ],
)
@pytest.mark.slow(but=["less0-more0", "less5-more5"])
def test_estimate_knows_what_costs_more(model, plan, less, more):
    large = LlamaForCausalLM._from_config(LlamaConfig(**{**zoo.SIZES, "intermediate_size": 4096}))
    large_plan = find_plan(large, NMPattern(2, 4))
    options = {"sequence_length": 32, "samples": 2}
    assert beside(large, large_plan, **options, **less) < beside(large, large_plan, **options, **more)


def test_masked_weights_are_kept_where_they_fit(model, plan, monkeypatch):
    learned = {"recipe": "heuristic,learned,mask", "samples": 8, "activation_checkpointing": True}
    found = needs(model, plan, **learned)
    assert not found.low_memory
    assert (found.savings, found.largest) == ("", "learned")
    most = found.added
    for free, low_memory in ((most, False), (most - 2**20, True), (0, True)):
        free_memory(monkeypatch, free)
        other = needs(model, plan, **learned)
        assert other.low_memory == low_memory
    assert other.stages["learned"] < found.stages["learned"]
    assert other.savings == "less is kept, and more computed anew"
    assert not needs(model, plan, recipe="heuristic,searched,mask").low_memory, "it has no choice"


@pytest.mark.parametrize(("environment", "share"), [({"LOCAL_WORLD_SIZE": "2"}, 8000), ({}, 2000)])
def test_only_ranks_on_this_machine_share_its_memory(monkeypatch, environment, share):
    """Without torchrun it is not known how many of them are: then all may be."""
    free_memory(monkeypatch, 16000)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    devices = memory_forecast.Devices.of(CPU)
    assert (devices.count, devices.free, devices.host) == (8, share, share)


def test_a_second_model_need_not_fit(monkeypatch):
    """Saving then compares tensor by tensor only."""
    free_memory(monkeypatch, 1000)
    needs = MemoryEstimate(DevicePlacement.WHOLE, 0, 10**15, 10**15, {"masks": 1000})
    assert needs.peak == 2 * 10**15
    assert refusal(needs) == ""


def test_a_model_that_is_mapped_from_its_files_becomes_memory_when_it_changes(monkeypatch):
    free_memory(monkeypatch, 1999)
    assert "needs about 2 KiB more" in refusal(MemoryEstimate(DevicePlacement.WHOLE, 500, 1900, 500, {"masks": 100}))


def test_what_does_not_fit_is_refused_with_advice(monkeypatch):
    free_memory(monkeypatch, 999)
    message = refusal(MemoryEstimate(DevicePlacement.WHOLE, 0, 10**15, 10**15, {"masks": 1000, "calibration": 700}))
    assert "\n" not in message
    options = ("`sequence_length=`", "`samples=`", "`micro_batch_size=`")
    assert [w for w in (*options, "1000 B", "for masks", "999 B are free", "cpu") if w not in message] == []


def test_compile_refuses_before_it_changes_the_model(model, monkeypatch):
    free_memory(monkeypatch, 1000)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.zeros((2, 8), dtype=torch.int64)
    with pytest.raises(ConfigError, match="are free"):
        compile_model(model, None, ids=ids)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def spared(found: PreTrainedModel, free: int, **options: object) -> MemoryEstimate:
    config = config_from({"recipe": "mask,distill", **options})
    with unstacked_experts(found):
        start = zoo.start(found, config, Samples.of(zoo.tiny_ids(8, 64)))
        needs = choose(start, memory_forecast.Devices("cuda", 1, free))
    assert bool(needs.savings) == needs.recomputes
    return needs


@pytest.mark.slow
def test_activations_are_recomputed_unless_everything_fits_in_half_of_the_free_memory(model):
    kept, recomputed = spared(model, 10**12), spared(model, 0)
    assert (kept.recomputes, recomputed.recomputes) == (False, True)
    assert recomputed.stages["distill"] < kept.stages["distill"]
    most = 2 * kept.added
    assert not spared(model, most).recomputes
    assert spared(model, most - 2).recomputes
    assert not spared(model, 0, recipe="mask").recomputes, "it has no backward pass"
    asked = spared(model, 0, activation_checkpointing=True)
    assert not asked.recomputes
    assert asked.stages["distill"] == recomputed.stages["distill"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 * 2**20, "3 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**42, "4096.0 GiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.slow
def test_weights_that_do_not_fit_one_gpu_are_spread_over_several():
    model = zoo.build("llama", num_hidden_layers=4)
    plan = find_plan(model, NMPattern(2, 4))
    config = config_from({"recipe": "heuristic,searched,mask"})
    samples = Samples.of(torch.zeros((8, 16), dtype=torch.int64))

    def needs(count: int, free: int, shard: bool | None = None, onload: bool | None = False) -> MemoryEstimate:
        start = zoo.start(model, config, samples, plan)
        devices = memory_forecast.Devices("cuda", count, free, allowed_placements(shard, onload))
        return first_fitting(start, devices)

    whole, spread = needs(4, 10**12), needs(4, 0)
    assert whole.placement is DevicePlacement.WHOLE
    assert spread.placement is DevicePlacement.SPREAD
    assert "spread" in spread.placement.weights
    assert needs(1, 0).placement is DevicePlacement.WHOLE, "there is no other GPU"
    assert needs(4, 0, shard=False).placement is DevicePlacement.WHOLE
    assert refusal(needs(4, 0, shard=False), memory_forecast.Devices("cuda", 4, 0))
    assert needs(4, 10**12, shard=True).placement is DevicePlacement.SPREAD
    assert needs(8, 0).model < spread.model < whole.model
    layers = [sum(each.numel() * each.element_size() for each in layer.parameters()) for layer in model.model.layers]
    assert spread.model > whole.model / 4 + 1.5 * max(layers), "a share, and the layers that are gathered"
    weights = 4 * zoo.start(model, config, samples, plan).sizes.pruned  # each device has a share of them
    assert spread.stages["searched"] <= whole.stages["searched"] - 2 * weights * 3 // 4
    gpt2 = zoo.start(build := zoo.build("gpt2"), config, samples, find_plan(build, NMPattern(2, 4)))
    devices = memory_forecast.Devices("cuda", 4, 0, allowed_placements(None, None))
    assert first_fitting(gpt2, devices).placement is DevicePlacement.WHOLE, "searched needs all weights at once"
    assert "stored transposed" in placement_refusal(DevicePlacement.SPREAD, gpt2, devices)
    config = config_from({"recipe": "heuristic,refit"})
    assert needs(4, 0, onload=None).placement is DevicePlacement.ONLOADED, "refit changes weights while the model runs"
    config = config_from({"recipe": "heuristic,mask", "importance": "obs"})
    assert needs(4, 0).stages["hessians"] == needs(4, 10**12).stages["hessians"], "each device holds them whole"
