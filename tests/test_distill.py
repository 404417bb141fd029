"""Distillation trains the kept weights and nothing else, and never ends worse than it began."""

import json
from dataclasses import replace

import pytest
import torch

from permtriton import config_from
from permtriton.data.calibration import calibration_samples
from permtriton.data.samples import Samples
from permtriton.driver.pipeline import compile_model
from permtriton.errors import CalibrationError, OutputError
from permtriton.methods.train.distill import rate_at, split_held_out
from permtriton.methods.train.kept_weights import KeptWeights
from permtriton.model.experts import unstacked_experts
from permtriton.model.forward import last_hidden_state

from . import zoo
from .updating import RATE, STEPS, Pruned, Recording, equal, facts, only_kept_weights_change, tiny, tiny_model
from .zoo import find_plan


@pytest.mark.slow
def test_the_kept_weights_move_and_the_loss_falls():
    pruned, progress = tiny(), Recording()
    before = pruned.loss()
    with only_kept_weights_change(pruned):
        result = pruned.distill(progress)
    assert pruned.moved() == set(pruned.weights), "every linear"
    assert pruned.loss() < 0.9 * before
    assert progress.steps == [0, *[1] * (3 * STEPS)]
    assert progress.total == 3 * STEPS
    assert "held-out" in progress.notes[-1]
    held_out = split_held_out(10, 0)[1]
    assert pruned.loss(held_out) == pytest.approx(result.history[result.kept].held_out, rel=1e-5)
    assert result.history[result.kept].held_out < result.history[0].held_out
    json.dumps(result.rows, allow_nan=False)


def with_shared_weights() -> Pruned:
    model = tiny_model()
    first, second = model.model.layers
    second.mlp.up_proj = first.mlp.up_proj  # a module of both layers
    second.mlp.gate_proj.weight = first.mlp.gate_proj.weight  # and a weight of two modules
    return Pruned(model)


@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
@pytest.mark.parametrize("model", [tiny, with_shared_weights])
@torch.enable_grad()
def test_steps_are_those_of_the_optimizer_on_masked_gradients_relative_to_the_weights(optimizer, model):
    """Whatever layers share has one gradient, and is changed once in a step."""
    pruned = model()
    pruned.distill(epochs=1, optimizer=optimizer)
    result, rows = pruned.trained_weights(), split_held_out(10, 0)[0]
    pruned.reset()
    weights = list({id(weight): weight for weight in pruned.weights.values()}.values())
    groups = [{"params": weight} for weight in weights]
    eps = {"eps": (1e-18, 0.0)} if optimizer == "adafactor" else {}  # torch's is larger than these mean squares
    plain = {"adam": torch.optim.Adam, "adafactor": torch.optim.Adafactor}[optimizer](groups, **eps)
    sizes = [weight[weight != 0].square().mean().sqrt().item() for weight in weights]
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    for step, batch in enumerate(rows[order].split(4)):
        plain.zero_grad()
        pruned.objective.loss(last_hidden_state(pruned.model, pruned.ids[batch]), batch).backward()
        for name, weight in pruned.weights.items():
            weight.grad.masked_fill_(pruned.before[name] == 0, 0)
        for group, size in zip(plain.param_groups, sizes, strict=True):
            group["lr"] = RATE * (size if optimizer == "adam" else 1) * rate_at(step, STEPS)
        plain.step()
    for name, weight in pruned.weights.items():
        torch.testing.assert_close(result[name], weight.detach(), rtol=0, atol=1e-6)
    assert pruned.moved() == set(pruned.weights)


@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
@pytest.mark.parametrize("collected", [False, True])
def test_a_weight_that_is_stored_transposed_is_trained_as_any_other(optimizer, collected):
    """Experts of gpt-oss are; what collects gradients may lay them out in another way."""
    torch.manual_seed(0)
    values, gradients = torch.randn(6, 8) * (torch.rand(6, 8) > 0.5), torch.randn(3, 6, 8)
    results = []
    for transposed in (False, True):
        weight = torch.nn.Parameter(values.t().contiguous().t() if transposed else values.clone())
        linear = torch.nn.Linear(8, 6, bias=False)
        linear.weight = weight
        kept = KeptWeights({"linear": weight}, optimizer)
        with kept.trainable(linear):
            for gradient in gradients:
                kept.begin(0.1, 1.0)
                kept.forget(in_one_pass=not collected)
                weight.grad = gradient
                kept.receive_gradient("linear", weight)
                kept.finish()
        assert torch.equal(weight != 0, values != 0)
        results.append(weight.detach().clone())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    assert not torch.equal(results[0], values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, -0.0, -1e-30])
def test_a_step_leaves_no_kept_weight_at_zero(dtype, value, monkeypatch):
    """Nothing else says which weights are kept."""
    weight = torch.nn.Parameter(torch.tensor([[0.5, 0.0, -0.5, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=dtype))
    linear, before, start = torch.nn.Linear(4, 2, bias=False), weight.detach() != 0, weight.detach().clone()
    linear.weight = weight

    def step(optimizer):
        values = optimizer.param_groups[0]["params"][0].data
        values.mul_(values.new_tensor(value))

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    kept = KeptWeights({"linear": weight}, "adam")
    with kept.trainable(linear):
        kept.begin(1.0, 1.0)
        kept.forget(in_one_pass=True)
        weight.grad = weight.detach().clone()
        kept.receive_gradient("linear", weight)
        kept.finish()
    assert torch.equal(weight != 0, before)
    assert weight.abs().max() < 1e-7
    assert not value or torch.equal(weight.signbit()[before], (value * start).signbit()[before])


def test_a_gradient_that_overflows_at_pruned_weights_alone_does_no_harm():
    pruned = tiny(torch.float16)
    pruned.distill(epochs=1)
    expected = pruned.trained_weights()
    pruned.reset()
    for weight in pruned.weights.values():
        weight.register_hook(lambda grad, weight=weight: torch.where(weight == 0, torch.inf, grad))
    pruned.distill(epochs=1)
    assert equal(pruned.trained_weights(), expected)
    assert pruned.moved()


def test_a_harmful_learning_rate_keeps_the_start():
    pruned = tiny()
    with only_kept_weights_change(pruned):
        result = pruned.distill(learning_rate=3.0)
    assert result.kept == 0
    assert min(epoch.held_out for epoch in result.history[1:]) > result.history[0].held_out
    assert not pruned.moved()


def test_held_out_sequences_are_not_trained_on():
    pruned = tiny()
    rows, held_out = split_held_out(10, 0)
    assert sorted([*rows.tolist(), *held_out.tolist()]) == list(range(10))
    seen: set[int] = set()
    loss = pruned.objective.loss

    class Watched(type(pruned.objective)):
        def loss(self, hidden, rows):
            if hidden.requires_grad:
                seen.update(rows.tolist())
            return loss(hidden, rows)

    pruned.objective = Watched(**vars(pruned.objective))
    pruned.distill()
    assert seen == set(rows.tolist())


@pytest.mark.slow
def test_micro_batches_and_checkpointing_do_not_change_the_result():
    pruned = tiny()
    pruned.distill()
    expected = pruned.trained_weights()
    assert pruned.moved()
    for changes in ({"micro_batch_size": 1}, {"micro_batch_size": 3, "activation_checkpointing": True}):
        pruned.reset().distill(**changes)
        for name, weight in pruned.weights.items():
            torch.testing.assert_close(weight.detach(), expected[name], rtol=0, atol=2e-4)


@pytest.mark.parametrize(("optimizer", "dtype"), [("adam", torch.bfloat16), ("adafactor", torch.float16)])
@pytest.mark.slow
def test_small_steps_move_weights_in_half_precision(dtype, optimizer):
    """A step is far below the spacing of these weights: what rounding leaves of it must add up."""
    pruned = tiny(dtype)
    with only_kept_weights_change(pruned):
        result = pruned.distill(learning_rate=1e-3, epochs=12, optimizer=optimizer)
    assert pruned.moved() == set(pruned.weights)
    changed = [(weight != pruned.before[name]).float().mean() for name, weight in pruned.weights.items()]
    assert sum(changed) / len(changed) > 0.2
    assert result.history[result.kept].held_out < 0.97 * result.history[0].held_out


@pytest.mark.slow
def test_experts_move_in_the_storage_they_share():
    model, plan = zoo.planned("qwen3_moe")
    with unstacked_experts(model):
        pruned = Pruned(model, plan, zoo.token_ids(20, 24))
        before = pruned.loss()
        with only_kept_weights_change(pruned):
            pruned.distill(epochs=2, learning_rate=1e-3)
        assert pruned.moved() == set(pruned.weights)
        expert = pruned.weights["model.layers.0.mlp.experts.3.gate_up_proj"].detach().clone()
    assert torch.equal(model.model.layers[0].mlp.experts.gate_up_proj[3], expert)
    assert pruned.loss() < before


def test_frozen_weights_are_trained_and_stay_frozen():
    pruned = tiny()
    for parameter in pruned.model.parameters():
        parameter.requires_grad_(False)
    with only_kept_weights_change(pruned):
        pruned.distill(epochs=1)
    assert pruned.moved() == set(pruned.weights)


@pytest.mark.parametrize("name", ["gpt2", "bert_mlm"])
@pytest.mark.slow
def test_architectures(name):
    """Weights stored the other way round; a head with a norm and a bias, which stay as they are."""
    pruned = Pruned(*zoo.planned(name), zoo.token_ids(10, 12))
    before = pruned.loss()
    with only_kept_weights_change(pruned):
        pruned.distill(learning_rate=5e-3)
    assert pruned.loss() < before


def test_a_model_without_a_head_takes_cosine():
    pruned = Pruned(*zoo.planned("bert"), zoo.token_ids(10, 12))
    assert pruned.objective.kind == "cosine"
    before = pruned.loss()
    with only_kept_weights_change(pruned):
        pruned.distill()
    assert pruned.loss() < before


@pytest.mark.slow
@pytest.mark.parametrize("spare", [9, 7, 2, 1, 0])
def test_steps_read_new_samples_alone_and_those_of_the_calibration_where_they_are_few(trained_on, spare):
    """Six steps on one sample each, and one sample that is held out."""
    ids = zoo.tiny_ids(4 + spare, 12)
    samples = Samples({"input_ids": ids[:4]}, surplus=Samples.of(ids[4:]) if spare else None)
    options = {"distill_steps": 6, "distill_epochs": 9, "distill_batch_size": 1, "activation_checkpointing": False}
    config = config_from(options, "mask,distill")
    report = compile_model(tiny_model(), None, config, ids=samples).report
    read = min(spare + 4, 7)
    assert [step["samples"] for step in report["steps"]] == [4, read]
    rows = torch.cat(trained_on)
    assert len(rows) == 6
    assert len(rows.unique(dim=0)) == read - 1
    new = sum(bool((ids[4:] == row).all(1).any()) for row in rows.unique(dim=0))
    assert new in ((6,) if spare >= 7 else (spare, spare - 1))
    start = zoo.start(tiny_model(), config, samples, find_plan(tiny_model(), config.sparsity))
    assert config.steps[-1].sizes(start.sizes).sequences == read


def counting(path, windows: int) -> str:
    """A text whose token ids say which window of 12 they are of."""
    ids = [token for number in range(windows) for token in [number] * 12]
    path.write_text(json.dumps({"input_ids": ids}) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("windows", "spare"), [(30, 27), (13, 10)])
@pytest.mark.slow
def test_it_reads_windows_of_the_text_that_no_other_step_reads(trained_on, tmp_path, windows, spare):
    """Eight steps on two windows each; where the text is too short, on those of the calibration, too."""
    options = {"calibration": counting(tmp_path / "text.jsonl", windows), "samples": 3, "sequence_length": 12}
    options |= {"distill_steps": 8, "distill_batch_size": 2, "activation_checkpointing": False}
    config = config_from(options, "mask,distill")
    compile_model(tiny_model(), None, config)
    rows = torch.cat(trained_on)[2:, 0]  # the first two are of the trial that finds the size of a batch
    assert rows.numel() == 16
    assert rows.unique().numel() == min(16, windows - 1)
    samples, _ = calibration_samples(config, None, tiny_model())
    used = samples.ids[:, 0]
    assert not torch.isin(samples.surplus.ids[:, 0], used).any()
    if spare > 16:
        assert not torch.isin(rows, used).any()
    else:
        assert len(samples.surplus) == spare


@pytest.mark.slow
def test_another_text_is_another_run(tmp_path):
    """Also where only windows differ that calibration does not read."""
    options = {"calibration": counting(tmp_path / "text.jsonl", 30), "samples": 3, "sequence_length": 12}
    config = config_from({**options, "distill_further": 1, "distill_epochs": 1}, "mask,distill")
    path = tmp_path / "state.safetensors"
    compile_model(tiny_model(), None, config, resume_path=path)
    text = (tmp_path / "text.jsonl").read_text()
    (tmp_path / "text.jsonl").write_text(text.replace("29", "28"))
    compile_model(tiny_model(), None, config_from(options, "mask"))
    with pytest.raises(OutputError, match="the calibration sequences differ"):
        compile_model(tiny_model(), None, config, resume_path=path)


@pytest.mark.slow
def test_a_step_before_it_reads_fewer_samples_by_the_same_loss():
    samples = Samples({"input_ids": zoo.tiny_ids(4, 12)}, surplus=Samples.of(zoo.tiny_ids(8, 12)[4:]))
    options = {"search_rounds": 1, "distill_further": 1, "distill_epochs": 1, "activation_checkpointing": False}
    report = compile_model(tiny_model(), None, config_from(options, "searched,mask,distill"), ids=samples).report
    assert [step["samples"] for step in report["steps"]] == [4, 4, 8]


def test_a_loss_that_is_not_finite_is_a_clear_error():
    pruned = tiny()
    pruned.objective = replace(pruned.objective, target=torch.full_like(pruned.objective.target, torch.nan))
    before = facts(pruned.model)
    with pytest.raises(CalibrationError, match=r"distill: the loss .*`dtype=float32`"):
        pruned.distill()
    assert facts(pruned.model) == before
