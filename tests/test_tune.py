"""Tuning changes vectors, and weights by a scale per row; it never ends worse than it began."""

import copy
import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton import config_from, find_plan
from permtriton.data.text_samples import calibration_samples
from permtriton.driver.pipeline import compile_model
from permtriton.errors import OutputError
from permtriton.methods.train.trainer import rate_at
from permtriton.methods.train.tune import Tune, TunedValues
from permtriton.model.experts import unstacked_experts
from permtriton.model.forward import last_hidden_state
from permtriton.passes.plan import Plan, linear_module, weight_in_out
from permtriton.running.resume import StateFile
from permtriton.util.progress import NoProgress
from permtriton.util.store import MEMORY

from . import zoo
from .runs import Told
from .updating import PATTERN, Pruned, Recording, facts, interrupt, tiny, tiny_model

OPTIONS = {"steps": 8, "batch_size": 2, "learning_rate": 0.02, "micro_batch_size": 2, "activation_checkpointing": False}
IDS = zoo.tiny_ids(18, 12)  # 16 to train on, one step each
MINE = {"weights": "mine"}


def tuned(pruned: Pruned, progress: NoProgress | None = None, state: StateFile | None = None, **changes) -> Told:
    return pruned.trained(Tune, {**OPTIONS, **changes}, progress, state)


def pruned_tiny(dtype: torch.dtype = torch.float32) -> Pruned:
    found = tiny(dtype)
    return Pruned(tiny_model().to(dtype), found.plan, IDS)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def restored(pruned: Pruned, values: dict[str, Tensor]) -> Pruned:
    with torch.no_grad():
        for name, each in pruned.model.named_parameters():
            each.copy_(values[name])
    return pruned


@contextmanager
def only_vectors_and_scales_change(pruned: Pruned, rounding: float = 1e-5) -> Iterator[None]:
    """Weights change by a positive factor per row, zeros keep their bits, and no other matrix changes at all."""
    before, unchanged = parameters(pruned.model), facts(pruned.model)
    yield
    assert facts(pruned.model) == unchanged
    names = {id(each): name for name, each in pruned.model.named_parameters()}
    for name in pruned.weights:
        linear = linear_module(pruned.model, name)
        was = before.pop(names[id(linear.weight)], None)
        if was is None:
            continue
        weight, was = weight_in_out(linear), was if isinstance(linear, Conv1D) else was.t()
        assert torch.equal(weight == 0, was == 0), f"the pattern of {name}"
        assert not torch.signbit(weight[weight == 0]).any(), f"-0.0 in {name}"
        factors = torch.where(was != 0, weight / was, torch.nan).float()
        middle = factors.nanmedian(0).values
        assert (middle > 0).all()
        torch.testing.assert_close(
            factors.nan_to_num(), (factors / factors * middle).nan_to_num(), rtol=rounding, atol=0
        )
    for name, was in before.items():
        if was.ndim > 1:
            assert torch.equal(pruned.model.get_parameter(name), was), name


def test_vectors_and_scales_move_and_the_loss_falls():
    pruned, progress = pruned_tiny(), Recording()
    before, tensors = pruned.loss(), parameters(pruned.model)
    with only_vectors_and_scales_change(pruned):
        result = tuned(pruned, progress)
    moved = {name for name, each in pruned.model.named_parameters() if not torch.equal(each, tensors[name])}
    expected = {name for name, each in tensors.items() if each.ndim == 1} | {
        f"{name}.weight" for name in pruned.weights
    }
    assert moved == expected
    assert pruned.loss() < 0.97 * before
    assert result.kept == 4
    held = torch.arange(Tune.num_held_out(len(IDS)))
    assert pruned.loss(held) == pytest.approx(result.history[-1].held_out, rel=1e-5)
    assert result.history[-1].held_out < result.history[0].held_out
    assert progress.steps == [0, *[1] * 8]
    assert "held-out" in progress.notes[-1]
    json.dumps(result.rows, allow_nan=False)


def with_tied_norms() -> Pruned:
    return Pruned(tied_model(), copy.deepcopy(tied_plan()), IDS)


@functools.cache
def tied_plan() -> Plan:
    return find_plan(tied_model(), PATTERN)


def tied_model() -> PreTrainedModel:
    model = tiny_model()
    first, second = model.model.layers
    second.input_layernorm.weight = first.input_layernorm.weight
    second.mlp.up_proj = first.mlp.up_proj  # a module of both layers
    second.mlp.gate_proj.weight = first.mlp.gate_proj.weight  # and a weight of two modules
    return model


@torch.enable_grad()
def test_steps_are_those_of_adam_and_what_is_shared_is_tuned_once():
    """Against plain autograd through scaled weights, in one round: whatever layers share has one gradient."""
    pruned = with_tied_norms()
    model, start = pruned.model, parameters(pruned.model)
    tuned(pruned, steps=1)
    one = parameters(model)
    restored(pruned, start)
    linears = {id(each): each for each in pruned.weights.values()}
    vectors = {name: each for name, each in model.named_parameters() if each.ndim == 1}
    pruned.objective.loss(last_hidden_state(model, pruned.ids[torch.tensor([1, 2])]), torch.tensor([1, 2])).backward()
    for name, each in model.named_parameters():
        rate = 0.02 * rate_at(0, 1)
        if name in vectors:  # the first step of Adam has the size of its learning rate
            step = rate * start[name].square().mean().sqrt() * each.grad / (each.grad.abs() + 1e-8)
            torch.testing.assert_close(one[name], start[name] - step, rtol=1e-4, atol=1e-6)
        elif id(each) in linears:
            slope = (each.grad * start[name]).sum(1, keepdim=True)
            expected = start[name] * (-rate * slope / (slope.abs() + 1e-8)).exp()
            torch.testing.assert_close(one[name], expected, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(one[name], start[name])
    assert len(vectors) == len({id(each) for each in vectors.values()}) == 12


def test_what_rounding_would_spoil_is_given_back():
    """The held-out loss is measured once more on the folded weights, which are no more those that were trained."""
    pruned, calls = pruned_tiny(torch.bfloat16), []
    before, loss = parameters(pruned.model), pruned.objective.loss

    class Rounding(type(pruned.objective)):
        def loss(self, hidden, rows):
            calls.append(rows)
            return (2.0 if len(calls) == last else 1.0) * loss(hidden, rows)

    pruned.objective, last = Rounding(**vars(pruned.objective)), 0
    result = tuned(pruned)
    assert result.kept > 0, "a round must be better, or there is nothing to give back"
    last, calls = len(calls), []
    result = tuned(restored(pruned, before))
    assert len(calls) == last
    assert result.kept == 0
    assert all(torch.equal(each, before[name]) for name, each in pruned.model.named_parameters())


def test_a_weight_that_would_be_rounded_to_zero_keeps_its_value():
    pruned = pruned_tiny(torch.float16)
    values = TunedValues(pruned.model, pruned.plan)
    name = next(iter(pruned.weights))
    weight, scale = pruned.weights[name], values.values[f"{name}.scale"]
    with torch.no_grad():
        weight[0] = torch.where(weight[0] == 0, 0.0, 6e-8).to(weight)
        scale[0] = -3.0
        expected = weight.clone()
    before = values.fold(MEMORY)
    assert torch.equal(weight[0], expected[0])
    assert weight[0].any()
    assert not scale.any()
    values.unfold(before)
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("name", ["gpt2", "bert_mlm"])
@pytest.mark.slow
def test_architectures(name):
    """Weights stored the other way round; heads with a norm and a bias, which stay; biases and norms of all kinds."""
    model, plan = zoo.planned(name)
    pruned = Pruned(model, plan, zoo.token_ids(18, 12))
    before, tensors = pruned.loss(), parameters(model)
    with only_vectors_and_scales_change(pruned):
        result = tuned(pruned, learning_rate=5e-3)
    assert pruned.loss() < before
    assert result.kept > 0
    for part in ("cls.predictions.bias", "cls.predictions.transform.LayerNorm.weight"):
        assert part not in tensors or torch.equal(model.get_parameter(part), tensors[part])


@pytest.mark.slow
def test_experts_and_their_biases_move_in_the_storage_they_share():
    model, plan = zoo.planned("gpt_oss")
    before = parameters(model)
    with unstacked_experts(model):
        pruned = Pruned(model, plan, zoo.token_ids(18, 24))
        start = pruned.loss()
        with only_vectors_and_scales_change(pruned):
            tuned(pruned, learning_rate=5e-3)
        expert = pruned.weights["model.layers.0.mlp.experts.3.gate_up_proj"].detach().clone()
        assert pruned.loss() < start
    experts = model.model.layers[0].mlp.experts
    assert torch.equal(experts.gate_up_proj[3], expert.t())
    assert not torch.equal(experts.gate_up_proj_bias, before["model.layers.0.mlp.experts.gate_up_proj_bias"])


# -- in a compilation --------------------------------------------------------------------------------------------------

SMALL = {"tune_steps": 8, "tune_batch_size": 2, "tune_learning_rate": 0.02, "micro_batch_size": 2, "samples": 3}


def compiled(recipe: str, model: PreTrainedModel | None = None, ids: Tensor | None = IDS, **options):
    config = {name: options.pop(name) for name in list(options) if name not in ("resume_path", "progress")}
    return compile_model(model or tiny_model(), None, config_from({**SMALL, **config}, recipe), ids=ids, **options)


def counting(path, windows: int):
    """A text whose token ids, in pairs of a window's number and a place, say which window they are of."""
    ids = [token for number in range(windows) for token in [number] * 12]
    path.write_text(json.dumps({"input_ids": ids}) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("windows", "spare"), [(30, 27), (13, 10)])
@pytest.mark.slow
def test_it_reads_windows_that_no_other_step_reads(trained_on, tmp_path, windows, spare):
    """Where the text is too short, it reads the calibration samples, too; no more of them than it needs."""
    source = counting(tmp_path / "text.jsonl", windows)
    config = {"calibration": source, "sequence_length": 12, "activation_checkpointing": False}
    compiled("mask,tune", ids=None, **config)
    rows = torch.cat(trained_on)[:, 0]
    assert rows.numel() == 16
    assert rows.unique().numel() == min(16, windows - 1)
    samples = calibration_samples(config_from({**SMALL, **config}, "mask"), None, tiny_model())
    used = samples.ids[:, 0]
    assert len(samples.surplus) == spare
    assert not torch.isin(samples.surplus.ids[:, 0], used).any()
    if spare > 18:
        assert not torch.isin(rows, used).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_continues_to_the_same_end(tmp_path, dtype):
    path = tmp_path / "state.safetensors"
    pruned = pruned_tiny(dtype)
    start = parameters(pruned.model)
    whole = tuned(pruned)
    expected = parameters(pruned.model)
    with pytest.raises(KeyboardInterrupt):
        tuned(restored(pruned, start), Recording(1 + 5, interrupt), StateFile(path, MINE))
    progress = Recording()
    assert tuned(restored(pruned, start), progress, StateFile(path, MINE)).same(whole)
    assert progress.steps == [4, 1, 1, 1, 1]
    assert "after round 2" in progress.lines[0]
    assert all(torch.equal(each, expected[name]) for name, each in pruned.model.named_parameters())


@pytest.mark.parametrize("recipe", ["mask,tune", "mask,distill"])
@pytest.mark.slow
def test_another_text_is_another_run(tmp_path, recipe):
    """Also where only windows differ that calibration does not read."""
    path, options = tmp_path / "state.safetensors", {"sequence_length": 12, "calibration": str(tmp_path / "text.jsonl")}
    options |= {"distill_further": 1, "distill_epochs": 1}
    counting(tmp_path / "text.jsonl", 30)
    compiled(recipe, ids=None, resume_path=path, **options)
    text = (tmp_path / "text.jsonl").read_text()
    (tmp_path / "text.jsonl").write_text(text.replace("29", "28"))
    compiled("mask", ids=None, **options)
    with pytest.raises(OutputError, match="the calibration sequences differ"):
        compiled(recipe, ids=None, resume_path=path, **options)
