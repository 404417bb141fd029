"""Training that keeps the zeros of N:M weights: every optimizer and loop, saving, exporting, refusals."""

import copy
import gc
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import permtriton
from permtriton.errors import ModelError, OutputError, VerificationError
from permtriton.model.expert_linears import input_dim
from permtriton.model.modules import SparseLinear, replace_module
from permtriton.util.sparsity import NMPattern

from . import folders, zoo
from .keeping import (
    ROOT,
    UP,
    adamw,
    check_kept,
    no_hooks_stay,  # noqa: F401 (a fixture of all tests here)
    pruned_llama,
    run_two_ranks,
    train,
    zeros_of,
)
from .sentences import SENTENCE, trained_tokenizer

DEMO = ROOT / "permtriton" / "demo"
TWO_FOUR = NMPattern(2, 4)
PAGE = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
OPTIMIZERS = {
    "sgd": lambda found: torch.optim.SGD(found, 0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda found: torch.optim.AdamW(found, 1e-2, weight_decay=0.1),
    "adafactor": lambda found: torch.optim.Adafactor(found, 1e-2),
    "muon": lambda found: torch.optim.Muon([each for each in found if each.ndim == 2], 1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_stay_whatever_the_optimizer(name):
    model = pruned_llama()
    before, start = zeros_of(model), model.get_parameter(UP).detach().clone()
    kept = permtriton.keep_pattern(model)
    train(model, OPTIMIZERS[name](list(model.parameters())))
    check_kept(model, before, list(kept.patterns))
    assert not torch.equal(model.get_parameter(UP), start)


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    return model(input_ids=zoo.tiny_ids(2, 8, seed=step)).logits.logsumexp(-1).square().mean()


def test_an_optimizer_per_weight_may_step_inside_the_backward_pass():
    """Its step must not write to weights that the rest of the pass still needs."""
    model = pruned_llama()
    before, kept = zeros_of(model), permtriton.keep_pattern(model)
    optimizers = {each: torch.optim.AdamW([each], 1e-2, weight_decay=0.1) for each in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in optimizers:
        each.register_post_accumulate_grad_hook(step)
    for number in range(2):
        loss_of(model, number).backward()
    check_kept(model, before, list(kept.patterns))


@pytest.mark.parametrize("keep", [False, True])
def test_one_optimizer_of_all_weights_may_step_inside_the_backward_pass(keep):
    """It changes those that have a gradient by then, and the rest of the pass needs the others as they are."""
    model = pruned_llama()
    before, kept, optimizer = zeros_of(model), keep and permtriton.keep_pattern(model), adamw(model)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    for number in range(2):
        loss_of(model, number).backward()
    if keep:
        check_kept(model, before, list(kept.patterns))


def test_weights_copied_from_masters_are_for_restore():
    model = pruned_llama()
    before, kept = zeros_of(model), permtriton.keep_pattern(model)
    masters = copy.deepcopy(model)
    train(masters, adamw(masters), 1)
    model.load_state_dict(masters.state_dict())
    assert model.get_parameter(UP)[before[UP]].any()
    kept.restore()
    check_kept(model, before, list(kept.patterns))


def test_closures_groups_that_come_later_and_fused_steps_are_kept():
    model = pruned_llama()
    before, kept, names = zeros_of(model), permtriton.keep_pattern(model), [UP, UP.replace("up", "down")]
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    later = torch.optim.AdamW([model.get_parameter(names[0])], 1e-2, weight_decay=0.1)
    later.add_param_group({"params": [model.get_parameter(names[1])]})

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for step in (
        lambda: lbfgs.step(closure), later.step, *(
            torch.optim.AdamW(model.parameters(), 1e-2, **{how: True}).step for how in ("foreach", "fused")
        )
    ):  # fmt: skip
        step()
        check_kept(model, before, list(kept.patterns))


def parametrize(model: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", nn.Identity())


def test_another_model_may_step_between_forward_and_backward():
    model, other = pruned_llama(), zoo.tiny_llama()
    before, kept, optimizers = zeros_of(model), permtriton.keep_pattern(model), [adamw(model), adamw(other)]
    loss, others = loss_of(model), loss_of(other)
    others.backward()
    optimizers[1].step()
    loss.backward()
    optimizers[0].step()
    check_kept(model, before, list(kept.patterns))


def test_two_optimizers_take_turns_on_one_model():
    model = pruned_llama()
    before, kept = zeros_of(model), permtriton.keep_pattern(model)
    halves = [[each for name, each in model.named_parameters() if ("mlp" in name) == half] for half in (True, False)]
    for optimizer in [torch.optim.AdamW(half, 1e-2, weight_decay=0.1) for half in halves] * 2:
        loss_of(model).backward()
        optimizer.step()
    check_kept(model, before, list(kept.patterns))


def test_a_copy_is_another_model():
    """The page says so: a copy is kept by a call of its own, and the first one does not touch it."""
    model = pruned_llama()
    before, kept = zeros_of(model), permtriton.keep_pattern(model)
    unkept, copied = copy.deepcopy(model), copy.deepcopy(model)
    permtriton.keep_pattern(copied)
    for each in (unkept, copied):
        train(each, adamw(each), 1)
    check_kept(copied, before, list(kept.patterns))
    assert unkept.get_parameter(UP)[before[UP]].count_nonzero() > 0


def test_zeros_stay_where_the_optimizer_has_the_state_of_other_training():
    model = pruned_llama()
    other = copy.deepcopy(model)
    earlier = adamw(other)
    train(other, earlier)
    before, kept, optimizer = zeros_of(model), permtriton.keep_pattern(model), adamw(model)
    optimizer.load_state_dict(earlier.state_dict())
    train(model, optimizer)
    check_kept(model, before, list(kept.patterns))


def test_a_kept_weight_may_pass_through_zero():
    """But one that is zero when its pattern is kept stays zero."""
    model = pruned_llama()
    weight = model.get_parameter(UP)
    (row, column), (zero_row, zero_column) = weight.detach().nonzero()[:2].tolist()
    with torch.no_grad():
        weight[zero_row, zero_column] = 0
        permtriton.keep_pattern(model)
        weight[row, column] = 0
    train(model, adamw(model))
    assert weight[row, column] != 0
    assert weight[zero_row, zero_column] == 0


def test_a_weight_that_layers_share_keeps_its_zeros():
    model = pruned_llama()
    model.model.layers[1].mlp.up_proj.weight = model.get_parameter(UP)
    before, kept = zeros_of(model), permtriton.keep_pattern(model)
    train(model, adamw(model))
    check_kept(model, before, list(before.keys() & kept.patterns.keys()))
    assert UP in kept.patterns


def pruned(name: str, pattern: NMPattern = TWO_FOUR) -> tuple[PreTrainedModel, list[str]]:
    """Returns a pruned model of the zoo and the names of its pruned weights; some stacks of experts are transposed."""
    model = zoo.build(name)
    names = list(folders.pruned_weights(model))
    for each in names:
        folders.prune_weight(model.get_parameter(each), input_dim(model, each), pattern)
    return model, names


@pytest.mark.parametrize(
    ("name", "pattern"), [("mixtral", TWO_FOUR), ("gpt2", NMPattern(4, 8)), ("llama_tied", NMPattern(1, 4))]
)
def test_weights_are_recognized(name, pattern):
    """Stacks of experts, transposed weights, tied embeddings; what is not pruned is left out."""
    model, names = pruned(name, pattern)
    assert permtriton.keep_pattern(model).patterns == dict.fromkeys(names, pattern)


@pytest.mark.parametrize("name", ["mixtral", "gpt2", "gpt_oss"])
def test_stacks_and_transposed_weights_keep_their_zeros(name):
    model, names = pruned(name)
    before, kept = zeros_of(model), permtriton.keep_pattern(model)
    train(model, adamw(model), 2)
    check_kept(model, before, names)
    assert kept.patterns.keys() == set(names)


def test_zeros_without_groups_are_no_pattern():
    model = zoo.tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[torch.rand(parameter.shape) < 0.5] = 0
    with pytest.raises(ModelError, match="no weight of this LlamaForCausalLM is N:M, of 15 linears"):
        permtriton.keep_pattern(model)


def test_it_ends_when_asked_and_with_the_model():
    def count() -> int:
        return len(torch_optimizer._global_optimizer_post_hooks)

    model, before = pruned_llama(), count()
    kept = permtriton.keep_pattern(model)
    assert count() == before + 1
    kept.remove()
    kept.remove()
    assert count() == before
    kept = permtriton.keep_pattern(model)
    del model
    gc.collect()
    assert count() == before
    with pytest.raises(ModelError, match="does not exist any more"):
        kept.save_pretrained("anywhere")


# -- what wraps a model ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_without_a_break():
    model = pruned_llama()
    before = zeros_of(model)
    wrapped = torch.compile(model, fullgraph=True, backend="eager")
    kept = permtriton.keep_pattern(wrapped)
    train(wrapped, adamw(model))
    check_kept(model, before, list(kept.patterns))


@pytest.mark.slow
def test_layers_are_compiled_in_place():
    """A module of torch.compile in place of a layer would change the names of its weights, which could not be saved."""
    model = pruned_llama()
    before, kept, layers = zeros_of(model), permtriton.keep_pattern(model), model.model.layers
    layers[1] = torch.compile(layers[1], backend="eager")
    for begin in (permtriton.keep_pattern, lambda model: train(model, adamw(model))):
        with pytest.raises(ModelError, match=r"model\.layers\.1 is another module now, torch\.compile's"):
            begin(model)
    layers[1] = layers[1]._orig_mod
    layers[1].compile(backend="eager")
    train(model, adamw(model))
    check_kept(model, before, list(kept.patterns))


@pytest.mark.slow
def test_a_compiled_step_of_the_optimizer():
    model = pruned_llama()
    before, kept, optimizer = zeros_of(model), permtriton.keep_pattern(model), adamw(model)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    train(model, optimizer, 2)
    check_kept(model, before, list(kept.patterns))


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model = pruned_llama()
    before, kept, optimizer = zeros_of(model), permtriton.keep_pattern(model), adamw(model)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    for step in range(2):
        loss = prepared(input_ids=zoo.tiny_ids(2, 8, seed=step)).logits.logsumexp(-1).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        wrapped.step()
        wrapped.zero_grad()
    check_kept(model, before, list(kept.patterns))


@pytest.mark.slow
def test_fsdp2_with_two_ranks(tmp_path):
    """Divided before and after the call; the first rank saves, all end as it does, and the folder is exported."""
    run_two_ranks("train", tmp_path)
    for trained in ("before", "after"):
        export = permtriton.export(tmp_path / trained, tmp_path / f"{trained}-packed")
        assert export["weights"] == 14
    same = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("before", "after")]
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])


@pytest.mark.slow
def test_fsdp2_with_two_ranks_refuses_the_layout_fused(tmp_path):
    run_two_ranks("fused", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(DistributedConfig, "fsdp_size"), reason="this transformers divides no model by FSDP2")
def test_a_model_that_transformers_divides_while_loading_it_is_saved_by_two_ranks(tmp_path):
    run_two_ranks("loaded_divided", tmp_path)


# -- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "fused"])
def test_what_was_trained_is_saved_and_exported(tmp_path, name):
    fused = name == "fused"
    folder = folders.save(folders.model_of("llama" if fused else name, fused=fused), tmp_path / "pruned")
    (folder / "modules.json").write_text("[]")  # of sentence-transformers
    model = AutoModelForCausalLM.from_pretrained(folder)
    before, kept = zeros_of(model), permtriton.keep_pattern(model)
    assert kept.record["pruned_weights"].keys() == kept.patterns.keys()
    train(model, adamw(model), 2)
    saved = kept.save_pretrained(tmp_path / "trained", trained_tokenizer())
    assert (saved / "tokenizer.json").is_file()
    assert (saved / "modules.json").is_file()
    record = json.loads((saved / "permtriton.json").read_text())
    assert record["trained"] == str(folder)
    assert "with its zeros kept" in (saved / "README.md").read_text()
    assert "how it was trained afterwards is not recorded" in (saved / "README.md").read_text()
    result = permtriton.export(saved, tmp_path / "packed")
    assert result["reloaded"] == "same model"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    check_kept(loaded, before, list(kept.patterns))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in loaded.state_dict().items())
    with pytest.raises(OutputError, match="trained exists"):
        kept.save_pretrained(saved)
    again = permtriton.keep_pattern(AutoModelForCausalLM.from_pretrained(tmp_path / "packed"))
    assert again.patterns == kept.patterns


def test_zeros_of_frozen_layers_are_saved_without_a_sign(tmp_path):
    """A load in float16 rounds small weights to -0.0, as may steps that follow."""
    model = pruned_llama()
    with torch.no_grad():
        model.get_parameter(UP)[0, :4] = torch.tensor([-1e-9, 0.0, -1e-9, 0.0])
    model = AutoModelForCausalLM.from_pretrained(folders.save(model, tmp_path / "pruned"), dtype=torch.float16)
    weight = model.get_parameter(UP).requires_grad_(False)
    assert weight[0, 0].signbit()
    kept = permtriton.keep_pattern(model)
    assert not weight[0, :4].signbit().any()
    weight[0, 2] = -0.0
    saved = kept.save_pretrained(tmp_path / "trained")
    assert not folders.load(saved).get_parameter(UP)[0, :4].signbit().any()


def test_a_packed_folder_loads_dense_on_a_cpu_and_is_trained(tmp_path):
    folder = folders.save(pruned_llama(), tmp_path / "pruned")
    permtriton.export(folder, tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    kept = permtriton.keep_pattern(model)
    train(model, adamw(model), 1)
    saved = kept.save_pretrained(tmp_path / "trained")
    assert "export" not in json.loads((saved / "permtriton.json").read_text())


@pytest.mark.slow
def test_a_compiled_model_that_was_trained_is_saved_as_not_measured(tmp_path):
    """Whatever was measured of it before; what permtriton.compile returned saves it, in the mode of training, too."""
    ids = zoo.tiny_ids(8, 12)
    compiled = permtriton.compile(zoo.build("gpt2"), data=ids, eval_data=ids, recipe="mask")
    kept = permtriton.keep_pattern(compiled.model)
    compiled.evaluate(ids)
    saved = compiled.save_pretrained(tmp_path / "pruned")
    record = json.loads((saved / "permtriton.json").read_text())
    assert record["evaluation"]["measure"] == "perplexity"
    assert "trained" not in record
    train(compiled.model.train(), adamw(compiled.model), 1)
    with pytest.raises(ModelError, match=r"use save_pretrained of what permtriton\.compile returned"):
        kept.save_pretrained(tmp_path / "trained")
    saved = compiled.save_pretrained(tmp_path / "trained")
    record = json.loads((saved / "permtriton.json").read_text())
    assert record["evaluation"] == {"text": "not measured since the weights were trained"}
    assert "trained" in record
    assert "| held-out evaluation | `not measured` |" in (saved / "README.md").read_text()
    assert compiled.model.training


def test_a_folder_that_is_not_nm_is_not_written(tmp_path):
    folder = folders.save(pruned_llama(), tmp_path / "pruned")
    model = AutoModelForCausalLM.from_pretrained(folder)
    kept = permtriton.keep_pattern(model)
    kept.remove()
    train(model, adamw(model), 1)
    with pytest.raises(VerificationError, match="nonzero weights, but 2:4 allows 2"):
        kept.save_pretrained(tmp_path / "trained")
    kept.restore()
    kept.save_pretrained(tmp_path / "trained")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pruned", "trained"]


# -- transformers' Trainer -------------------------------------------------------------------------------------------


def test_trainer(tmp_path):
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(folders.save(pruned_llama(), tmp_path / "pruned"))
    before, keep = zeros_of(model), permtriton.KeepPattern()
    with pytest.raises(ModelError, match="nothing was trained with this KeepPattern"):
        keep.save_pretrained(tmp_path / "trained")
    ids = zoo.tiny_ids(8, 8)
    arguments = TrainingArguments(
        str(tmp_path / "runs"), max_steps=3, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        learning_rate=1e-2, weight_decay=0.1, lr_scheduler_type="constant",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids]
    for _ in range(2):
        Trainer(model, arguments, train_dataset=rows, callbacks=[keep]).train()
    check_kept(model, before, list(keep.kept.patterns))
    permtriton.export(keep.save_pretrained(tmp_path / "trained"), tmp_path / "packed")
    assert len(torch_optimizer._global_optimizer_post_hooks) == 0


# -- refusals --------------------------------------------------------------------------------------------------------


def changed_since(folder: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder)
    nn.init.ones_(model.get_parameter(UP))
    return model


def packed(folder: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder)
    name = UP.removesuffix(".weight")
    replace_module(model, name, SparseLinear.from_linear(model.get_submodule(name)).pack(TWO_FOUR))
    return model


def divided_into_plain_tensors(folder: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model._tp_size = 2  # as transformers 5.10 leaves it
    return model


def of_another_class(folder: Path) -> nn.Module:
    model = AutoModel.from_pretrained(folder)
    del model.layers[1]
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (changed_since, f"{UP} is not 2:4 any more: a group holds 4 nonzero weights"),
        (packed, "up_proj: packed weights cannot be trained: write the folder with permtriton export --format dense"),
        (of_another_class, r"lists the N:M weight model.layers.1\S+, which this LlamaModel does not have"),
        (divided_into_plain_tensors, "by tensor parallelism into plain tensors.*call fully_shard"),
        (lambda folder: AutoModelForCausalLM.from_pretrained(folder).to("meta"), "has no values"),
        (lambda folder: zoo.tiny_llama(), "no weight of this LlamaForCausalLM is N:M"),
    ],
    ids=["changed", "packed", "class", "tensor-parallel", "meta", "dense"],
)
def test_refusals(tmp_path, make, words):
    folder = folders.save(pruned_llama(), tmp_path / "pruned")
    with pytest.raises(ModelError, match=words) as caught:
        permtriton.keep_pattern(make(folder))
    assert "\n" not in str(caught.value)


def test_refusals_of_what_it_returns(tmp_path):
    model = pruned_llama()
    kept = permtriton.keep_pattern(model)
    with pytest.raises(ModelError, match=r"holds no permtriton\.json, which would have to be saved"):
        kept.save_pretrained(tmp_path / "trained")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(ModelError, match=r"this AveragedModel holds no permtriton\.json"):
        permtriton.keep_pattern(averaged).save_pretrained(tmp_path / "trained")
    with pytest.raises(ModelError, match="a LlamaForCausalLM is no PeftModel: give the one that holds the adapters"):
        kept.merge_and_unload(model)
    torch.nn.utils.parametrize.register_parametrization(
        model.get_submodule(UP.removesuffix(".weight")), "weight", nn.Identity()
    )
    with pytest.raises(ModelError, match="is no parameter any more"):
        train(model, adamw(model), 1)


# -- the page and the example ----------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    tokenizer = trained_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    model = zoo.tiny_llama(num_attention_heads=1, num_key_value_heads=1, **sizes)
    for name in ("my-model", "my-model-2of4"):
        tokenizer.save_pretrained(tmp_path / name)
    model.save_pretrained(tmp_path / "my-model")
    folders.prune(model)
    folders.save(model, tmp_path / "my-model-2of4")
    tokenizer.save_pretrained(tmp_path / "my-model-2of4")
    (tmp_path / "my-text.txt").write_text(SENTENCE * 60, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_blocks_of_the_page_run(here):
    pytest.importorskip("peft")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "docs/fine-tuning.md", "exec"), {})
    for name in ("my-model-tuned", "my-model-by-trainer", "my-model-with-lora"):
        permtriton.export(name)


@pytest.mark.parametrize("lora", [[], ["--lora", "4"]], ids=["weights", "lora"])
@pytest.mark.slow
def test_the_example_on_the_demo(tmp_path, monkeypatch, capsys, lora):
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(DEMO)
    folders.prune(model)
    folders.save(model, tmp_path / "pruned")
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(tmp_path / "pruned")
    spec = importlib.util.spec_from_file_location("finetune", ROOT / "examples" / "finetune.py")
    finetune = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(finetune)
    arguments = ["pruned", "--dense", DEMO, "--text", DEMO / "calibration.txt", "--held-out", DEMO / "heldout.txt",
                 "--output", "tuned", "--steps", 8, "--tokens", 64, "--every", 4, "--held-out-windows", 4,
                 "--learning-rate", 1e-3, "--result", "result.json", *lora]  # fmt: skip
    result = finetune.main([str(each) for each in arguments])
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert len(result["losses"]) == 8
    assert result["after"]["kl"] < result["before"]["kl"]
    assert "lost" in result or not lora
    assert "step    8  loss" in capsys.readouterr().out
    assert permtriton.export("tuned")["reloaded"] == "same model"
