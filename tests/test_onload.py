"""A model whose layers come to the GPU one by one compiles to the bits of a whole one, in the memory of one layer."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import FunnelConfig, FunnelModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

import permtriton
from benchmarks.known_run import Known
from permtriton import CompileConfig, config_from
from permtriton.cli.main import app
from permtriton.data.samples import Samples
from permtriton.driver.choose_placement import first_fitting
from permtriton.driver.memory_forecast import Devices
from permtriton.driver.pipeline import compile_model
from permtriton.errors import ConfigError
from permtriton.methods.measure.fisher import fisher_information
from permtriton.methods.measure.statistics import site_statistics
from permtriton.methods.planning import Planned, plan_model
from permtriton.running.layer_walk import LayerWalk
from permtriton.running.placement import DevicePlacement
from permtriton.util.progress import NoProgress
from permtriton.util.store import Store

from . import zoo
from .expert_stacks import unstacked
from .pretend_gpu import GPU, PretendGpu
from .updating import Recording

IDS = zoo.token_ids(6, 12)
SAMPLES = Samples.of(IDS)
SMALL = {"samples": 6, "sequence_length": 12, "micro_batch_size": 2, "activation_checkpointing": False}
REFIT = {"refit_iterations": 2, "refit_exchanges": 1, "refit_metric_rounds": 1}
ONLOADED, WHOLE = (DevicePlacement.ONLOADED,), (DevicePlacement.WHOLE,)
RECIPES = {
    "refit": ("heuristic,refit", REFIT),
    "refit, a dense share": ("heuristic,refit", {**REFIT, "dense_share": 0.3}),
    "sparsegpt": ("heuristic,sparsegpt", {"importance": "wanda", "sparsegpt_mask": "keep"}),
    "distill": ("sparsegpt,distill", {"distill_epochs": 1, "distill_batch_size": 2}),
    "distill in parts": (
        "sparsegpt,distill",
        {"distill_epochs": 1, "distill_batch_size": 4, "distill_optimizer": "adafactor"},
    ),
    "fused": ("heuristic,sparsegpt", {"layout": "fused", "heuristic_row_weights": "fisher"}),
}


def compiled(model, recipe: str, **where):
    steps, options = RECIPES[recipe]
    return run(model, steps, options, **where)


def run(model, steps: str, options: dict, **where):
    config = config_from({**SMALL, **options}, steps)
    return compile_model(model, config=config, ids=IDS, held_out=IDS, **where)


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_measures_of_layers_one_after_another_have_the_same_bits(name):
    """Also where some sequences are left over, and for linears outside of layers."""
    model, plan = unstacked(name) if name == "mixtral" else zoo.planned(name)
    config, host = CompileConfig(micro_batch_size=4), Store(onloads=True)
    kind = "kl" if model.can_generate() else "cosine"
    for method in ("wanda", "obs"):
        expected = site_statistics(LayerWalk(model, plan, SAMPLES, 4), method, NoProgress())
        found = site_statistics(LayerWalk(model, plan, SAMPLES, 4, host), method, NoProgress())
        assert all(torch.equal(found[site], expected[site]) for site in expected), method
    run = Known(model, plan, SAMPLES, config)
    expected = fisher_information(run, kind)
    run.placement = replace(run.placement, kind=DevicePlacement.ONLOADED)
    found = fisher_information(run, kind)
    for linear, information in expected.items():
        assert torch.equal(found[linear].row, information.row), linear
        assert torch.equal(found[linear].column, information.column), linear


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("llama_eager", "refit"), ("mixtral", "sparsegpt"), ("llama_eager", "distill in parts"), ("opt", "distill")],
)
@pytest.mark.slow(but=["llama_eager-refit"])
def test_the_result_is_that_of_a_whole_model(name, recipe):
    """To the bit: weights move, and every product is the same call."""
    before, model = zoo.build(name), zoo.build(name)
    whole = compiled(before, recipe)
    with PretendGpu().here():
        found = compiled(model, recipe, device=GPU, placements=ONLOADED)
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    expected = before.state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
    assert found.report["evaluation"] == whole.report["evaluation"]


def tiny_t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 96}
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


def tiny_funnel() -> FunnelModel:
    sizes = {"block_sizes": [2, 1], "num_decoder_layers": 1, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32}
    torch.manual_seed(0)
    return FunnelModel(FunnelConfig(**sizes, vocab_size=96)).eval()


@pytest.mark.parametrize("make", [tiny_t5, tiny_funnel])
@pytest.mark.slow
def test_backward_passes_of_what_is_no_chain_and_layers_in_lists(make):
    """The decoder's inputs require gradients, so layers cannot run backward one by one; Funnel has lists of lists."""
    options = {"heuristic_row_weights": "fisher", "importance": "wanda"}
    before, model = make(), make()
    run(before, "heuristic,mask", options)
    with PretendGpu().here():
        run(model, "heuristic,mask", options, device=GPU, placements=ONLOADED)
    for key, tensor in before.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key


@pytest.mark.slow
def test_refusals():
    model = zoo.build("llama_eager")
    with pytest.raises(ConfigError, match="is for a GPU, but the device is cpu"):
        compiled(model, "refit", placements=ONLOADED)
    with pytest.raises(ConfigError, match="choose one"):
        permtriton.dry_run("demo", onload=True, shard=True)
    with PretendGpu().here(), pytest.raises(ConfigError, match="on the GPU already"):
        compiled(model.to(GPU), "refit", device=GPU, placements=ONLOADED)


def most_bytes(layers: int, recipe: str, placements: tuple[DevicePlacement, ...]) -> int:
    """Returns the most bytes that were on the GPU at once; an order of channels has more scores in a deeper model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=zoo.VOCABULARY, num_hidden_layers=layers, **sizes)).eval()
    with PretendGpu().here() as gpu:
        steps, options = RECIPES[recipe]
        run(model, steps.removeprefix("heuristic,"), options, device=GPU, placements=placements)
    return gpu.most


@pytest.mark.parametrize("recipe", ["refit", "sparsegpt"])
@pytest.mark.slow
def test_the_gpu_holds_no_more_of_a_deeper_model(recipe):
    assert most_bytes(4, recipe, ONLOADED) <= 1.01 * most_bytes(2, recipe, ONLOADED)
    if recipe == "sparsegpt":
        assert most_bytes(4, recipe, WHOLE) > 1.1 * most_bytes(2, recipe, WHOLE)


def needed(model, placements: tuple[DevicePlacement, ...]) -> int:
    """Returns the bytes that `permtriton.driver.memory_forecast` expects to be on the GPU at once."""
    devices = Devices("cuda", 1, 1 << 40, placements)
    config, samples = config_from(SMALL, "mask"), Samples.of(IDS)
    return first_fitting(Planned(model, config, samples, *plan_model(model, config, samples)), devices).peak


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_onloaded_without_being_asked():
    model = zoo.build("llama_eager", intermediate_size=512, num_hidden_layers=4)
    size = (needed(model, WHOLE) + needed(model, ONLOADED)) // 2
    with PretendGpu(size).here() as gpu:
        found = compile_model(model, config=config_from(SMALL, "mask"), ids=IDS, device=GPU)
    assert found.report["memory"]["estimate"]["placement"] == "onloaded"
    assert gpu.most <= size
    assert gpu.most < 0.9 * sum(each.numel() * each.element_size() for each in model.parameters())


@pytest.mark.slow
def test_the_dense_model_writes_no_text_while_its_layers_come_one_by_one():
    """A recipe does without; who asks for text is told."""
    few = {"distill_epochs": 1, "distill_batch_size": 2, "heuristic_row_weights": "none", **REFIT}
    config, progress = config_from({**SMALL, **few}, "best"), Recording()
    inputs = {"ids": IDS, "device": GPU, "placements": ONLOADED}
    with PretendGpu(1 << 40).here():
        found = compile_model(zoo.build("llama_eager"), config=config, progress=progress, **inputs)
        assert any(line.startswith("no text is generated: the dense model writes no") for line in progress.lines)
        assert found.config.generated == 0
        asked = replace(config, calibration=replace(config.calibration, generated=40))
        with pytest.raises(ConfigError, match="`generated=40`: the dense model writes no text while its layers come"):
            compile_model(zoo.build("llama_eager"), config=asked, **inputs)


@pytest.mark.slow
def test_a_model_that_moves_to_the_gpu_saves_memory_as_one_that_is_there():
    """What is free there once it has moved decides, not what was free before."""
    config = config_from({**SMALL, "activation_checkpointing": True, "learn_epochs": 1}, "learned,mask")

    def build():
        return zoo.build("llama", intermediate_size=256, hidden_size=64, num_hidden_layers=2)

    model = build()
    start = Planned(model, config, SAMPLES, *plan_model(model, config, SAMPLES))
    full, low = (first_fitting(start, Devices("cuda", 1, free, WHOLE)) for free in (1 << 40, 1))
    size = full.model + (full.stages[full.largest] + low.stages[low.largest]) // 2
    for moves in (True, False):
        with PretendGpu(size).here():
            model = build() if moves else build().to(GPU)
            found = compile_model(model, config=config, ids=IDS, device=GPU).report["memory"]["estimate"]
        assert (found["low_memory"], found["placement"]) == (True, "whole")
        assert found["peak"] <= size


@pytest.mark.parametrize(("recipe", "step"), [("learned,mask", "learned"), ("searched,mask", "searched")])
@pytest.mark.slow
def test_steps_that_need_all_weights_at_once_are_refused(recipe, step):
    config = config_from(SMALL, recipe)
    with PretendGpu().here(), pytest.raises(ConfigError, match=f"the step {step} .*leave {step} out of `recipe=`"):
        compile_model(zoo.build("llama_eager"), config=config, ids=IDS, device=GPU, placements=ONLOADED)


@pytest.mark.slow
def test_a_model_of_70b_fits_a_gpu_of_80_gib(tmp_path):
    """Of the model there is a config, and no weight; the text has all further samples that `best` asks for."""
    model, text = tmp_path / "model", tmp_path / "text.safetensors"
    config = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config |= {"num_key_value_heads": 8, "vocab_size": 128256, "dtype": "bfloat16", "max_position_embeddings": 8192}
    LlamaConfig(**config, architectures=["LlamaForCausalLM"]).save_pretrained(model)
    save_file({"input_ids": torch.zeros(13 * 128, 2048, dtype=torch.int64)}, text)
    command = ["compile", str(model), "--dry-run", "--devices", "1x80", "--calibration", str(text), "--json"]
    options = ["--recipe", "best", "--generated", "0", "--onload", "--eval-data", "none", "--output"]
    found = CliRunner().invoke(app, [*command, *options, str(tmp_path / "out")])
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert not report["refused"]
    assert report["memory"]["placement"] == "onloaded"
    assert 60 << 30 < report["memory"]["peak"] < 80 << 30
    assert all(seconds > 0 for seconds in report["seconds"].values())
    assert "assumed" in report["assumed"]
