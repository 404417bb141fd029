"""Whole models on the GPU: packed checkpoints, their three routes, compilation, and the learner."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import permtriton
from benchmarks.known_run import Known
from permtriton import NMPattern
from permtriton.checkpoint.export import export
from permtriton.data.samples import Samples
from permtriton.driver.pipeline import compile_model
from permtriton.kernels import autotune, cusparselt
from permtriton.kernels.sparse_linear import CUSPARSELT, MMA, ROUTE_CONFIGS, routed
from permtriton.kernels.tools.case import relative_error
from permtriton.methods.measure.importance import importance_of
from permtriton.methods.measure.losses import Objective
from permtriton.methods.measure.statistics import channel_norms
from permtriton.methods.order.learned import Learned
from permtriton.methods.recipe_config import CompileConfig
from permtriton.model.forward import hidden_states
from permtriton.model.modules import SparseLinear
from permtriton.passes.plan import linear_module, weight_in_out
from permtriton.running.layer_walk import LayerWalk
from permtriton.util.progress import NoProgress

from .. import folders
from ..zoo import find_plan

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def llama(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A packed checkpoint and the dense one from which it was made."""
    root, model = tmp_path_factory.mktemp("packed"), llama()
    folders.prune(model)
    folders.save(model, root / "dense")
    export(root / "dense", root / "packed")
    return root


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, device_map="cuda", **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_packed_model_stays_packed_and_is_the_dense_one(folder, dtype, device):
    dense, packed = load(folder / "dense", dtype=dtype), load(folder / "packed", dtype=dtype)
    layers = [module for module in packed.modules() if isinstance(module, SparseLinear)]
    assert len(layers) == 7 * SIZES["num_hidden_layers"]
    assert all(layer.pattern == NMPattern(2, 4) for layer in layers)
    for tokens in (1, 16, 64, 65, 512):
        ids = torch.randint(0, SIZES["vocab_size"], (1, tokens), device=device)
        with torch.no_grad():
            assert relative_error(packed(ids).logits, dense(ids).logits) < 2e-2, tokens


def test_it_is_saved_packed_again(folder, tmp_path):
    load(folder / "packed").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["format"] == "packed"
    states = [AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (tmp_path, folder / "dense")]
    assert folders.differing(*states) == []


def test_it_generates_compiled_and_in_cuda_graphs(folder, device):
    packed = load(folder / "packed")
    ids = torch.randint(0, SIZES["vocab_size"], (1, 1), device=device)
    with torch.no_grad():
        expected = packed(ids, use_cache=False).logits
        for mode in ("default", "reduce-overhead"):
            compiled = torch.compile(packed, fullgraph=True, mode=mode)
            for _ in range(3):
                assert relative_error(compiled(ids, use_cache=False).logits, expected) < 2e-2, mode
    assert packed.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0).shape == (1, 9)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_every_route_gives_the_product(tokens, bias, device):
    linear = torch.nn.Linear(512, 384, bias=bias, device=device, dtype=torch.bfloat16)
    keep = linear.weight.view(384, -1, 4).abs().topk(2, dim=2, sorted=False).indices
    mask = torch.zeros(384, 128, 4, device=device, dtype=torch.bool).scatter_(2, keep, True).view(384, 512)
    linear.weight.data = torch.where(mask, linear.weight, 0).detach() + 0.0
    x, index = torch.randn(tokens, 512, device=device).bfloat16(), torch.randperm(512, device=device).int()
    expected = torch.nn.functional.linear(
        x.double()[:, index], linear.weight.double(), linear.bias.double() if bias else None
    )
    packed = SparseLinear.from_linear(linear).pack(NMPattern(2, 4)).compress()
    arguments = (x, packed.weight_values, packed.weight_positions, packed.bias, index, 512, NMPattern(2, 4))
    impossible = {MMA} if tokens > 64 or tokens == 1 else set()
    impossible |= {CUSPARSELT} if packed.weight_compressed is None else set()
    for config in ROUTE_CONFIGS:
        if config.constants["ROUTE"] in impossible:
            continue
        with autotune.forced({"sparse_linear_route": config}):
            found = routed(*arguments, packed.weight_compressed)
        assert relative_error(found, expected) < 1e-2, config


def test_cusparselts_form_shares_memory_with_the_packed_one_if_their_values_are_alike(device):
    """How cuSPARSELt orders its values is its own affair; the benchmark reports it. Either way the product is right."""
    if not cusparselt.supports(torch.bfloat16, 384, 512, device):
        pytest.skip("this torch has no cuSPARSELt")
    weight = torch.randn(384, 128, 4, device=device).bfloat16()
    weight[..., 1::2] = 0.0
    linear = torch.nn.Linear(512, 384, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight.view(384, 512))
    layer = SparseLinear.from_linear(linear).pack(NMPattern(2, 4))
    ours = layer.weight_values.clone()
    layer.compress()
    alike = torch.equal(layer.weight_compressed[: ours.numel()].view_as(ours), ours)
    assert (layer.weight_values.data_ptr() == layer.weight_compressed.data_ptr()) == alike
    assert torch.equal(layer.weight_values, ours)
    x = torch.randn(80, 512, device=device).bfloat16()
    expected = x.double() @ linear.weight.detach().double().t()
    arguments = (x, layer.weight_values, layer.weight_positions, None, None, 512, 2, 4, layer.weight_compressed)
    for config in ROUTE_CONFIGS:
        if config.constants["ROUTE"] == CUSPARSELT:
            with autotune.forced({"sparse_linear_route": config}):
                assert relative_error(torch.ops.permtriton.sparse_linear(*arguments), expected) < 1e-2, config
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.permtriton.sparse_linear.default, arguments, test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["portable", "fused"])
def test_searching_and_training_run_on_the_device(dtype, layout, device):
    options = {"search_rounds": 2, "distill_epochs": 1, "layout": layout}
    config = permtriton.config_from(options, "heuristic,searched,mask,distill")
    ids = torch.randint(0, SIZES["vocab_size"], (8, 64))
    report = compile_model(llama(dtype).to(device), None, config, ids=ids).report
    _, searched, _, distill = report["steps"]
    assert searched["history"][-1]["loss"] < searched["history"][0]["loss"]
    assert distill["history"][distill["kept"]]["held_out"] <= distill["history"][0]["held_out"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_learning_lowers_the_loss(dtype, device):
    model, pattern = llama(dtype).to(device), NMPattern(2, 4)
    plan = find_plan(model, pattern)
    ids = Samples.of(torch.randint(0, SIZES["vocab_size"], (8, 64)))
    norms = channel_norms(LayerWalk(model, plan, ids, 4), NoProgress())
    importances = {
        name: importance_of("wanda", weight_in_out(linear_module(model, name)), norms[site.name].to(device))
        for site, name in plan.linears()
    }
    options = Learned(epochs=4, batch_size=4, learning_rate=0.05)
    objective = Objective("cosine", model, ids, hidden_states(model, ids, 4))
    run = Known(model, plan, ids, CompileConfig(sparsity=pattern), importances=importances, objective=objective)
    _, outcome = options.learn(run)
    assert outcome.history[outcome.kept]["loss"] < outcome.history[0]["loss"]
    assert sum(epoch["moved"] for epoch in outcome.history) > 0
