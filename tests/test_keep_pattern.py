"""Training that keeps the zeros of N:M weights: every optimizer and loop, saving, exporting, refusals."""

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

import permtriton
from permtriton.errors import ModelError, OutputError, VerificationError
from permtriton.model.experts import input_dim
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


def test_another_model_may_step_between_forward_and_backward():
    model, other = pruned_llama(), pruned_llama()
    before, kept, others = zeros_of(model), permtriton.keep_pattern(model), adamw(other)
    permtriton.keep_pattern(other)
    optimizer, loss = adamw(model), model(input_ids=zoo.tiny_ids(2, 8)).logits.logsumexp(-1).square().mean()
    train(other, others, 1)
    loss.backward()
    optimizer.step()
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
def test_other_weights_and_patterns_are_recognized_and_kept(name, pattern):
    """Stacks of experts, transposed weights, tied embeddings; what is not pruned is left out."""
    model, names = pruned(name, pattern)
    before, kept = zeros_of(model), permtriton.keep_pattern(model)
    assert kept.patterns == dict.fromkeys(names, pattern)
    train(model, adamw(model), 2)
    check_kept(model, before, names)


def test_zeros_without_groups_are_no_pattern():
    model = zoo.tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[torch.rand(parameter.shape) < 0.5] = 0
    with pytest.raises(ModelError, match="no weight of this LlamaForCausalLM is N:M"):
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
    assert result["weights"] == len(kept.patterns)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    check_kept(loaded, before, list(kept.patterns))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in loaded.state_dict().items())
    with pytest.raises(OutputError, match="trained exists"):
        kept.save_pretrained(saved)
    assert "export" not in json.loads((saved / "permtriton.json").read_text())
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
    weight[0, 2] = -0.0
    saved = kept.save_pretrained(tmp_path / "trained")
    assert not folders.load(saved).get_parameter(UP)[0, :4].signbit().any()


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


def of_another_class(folder: Path) -> nn.Module:
    model = AutoModel.from_pretrained(folder)
    del model.layers[1]
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (changed_since, f"{UP} is not 2:4 any more: call keep_pattern before any training"),
        (packed, "does not have the N:M weight .*up_proj.* packed weights as permtriton export --format dense"),
        (of_another_class, r"this LlamaModel does not have the N:M weight model.layers.1\S+ of "),
        (lambda folder: AutoModelForCausalLM.from_pretrained(folder).to("meta"), "has no values"),
        (lambda folder: zoo.tiny_llama(), "no weight of this LlamaForCausalLM is N:M"),
    ],
    ids=["changed", "packed", "class", "meta", "dense"],
)
def test_refusals(tmp_path, make, words):
    folder = folders.save(pruned_llama(), tmp_path / "pruned")
    with pytest.raises(ModelError, match=words) as caught:
        permtriton.keep_pattern(make(folder))
    assert "\n" not in str(caught.value)


def test_norms_that_liger_replaced_are_refused():
    """As Liger's functions do, it sets the forward of the norms that are there; Liger itself runs on GPUs alone."""

    class LigerRMSNorm:
        def forward(self, hidden_states):
            return hidden_states

    LigerRMSNorm.forward.__module__ = "liger_kernel.transformers.rms_norm"
    model = pruned_llama()
    folders.fuse(model, ["model.norm"], [])
    norm = model.model.norm
    norm.__dict__["forward"] = LigerRMSNorm.forward.__get__(norm)
    with pytest.raises(ModelError, match=r"model\.norm permutes channels, and Liger's norm.*'rms_norm': False"):
        permtriton.keep_pattern(model)


def test_a_parametrized_weight_and_a_model_without_a_record_are_refused(tmp_path):
    model = pruned_llama()
    kept = permtriton.keep_pattern(model)
    with pytest.raises(ModelError, match=r"was loaded without permtriton\.json, which has"):
        kept.save_pretrained(tmp_path / "trained")
    nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", nn.Identity())
    with pytest.raises(ModelError, match="is no whole parameter any more"):
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
    permtriton.export("tuned")
