"""Adapters of PEFT on N:M weights: what merging keeps and loses, and what is refused."""

import shutil
from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM

import permtriton
from permtriton.errors import ModelError

from . import folders, zoo
from .keeping import (
    UP,
    adapted,
    check_kept,
    no_hooks_stay,  # noqa: F401 (a fixture of all tests here)
    pruned_llama,
    train,
    zeros_of,
)


@pytest.mark.parametrize("call", ["before", "after"])
def test_an_adapter_merges_onto_the_zeros(tmp_path, call):
    """Whether the pattern is kept from before the adapter was added, or from afterwards."""
    model = AutoModelForCausalLM.from_pretrained(folders.save(pruned_llama(), tmp_path / "pruned"))
    before, start = zeros_of(model), model.get_parameter(UP).detach().clone()
    if call == "before":
        kept = permtriton.keep_pattern(model)
    wrapped = adapted(model)
    if call == "after":
        kept = permtriton.keep_pattern(wrapped)
    assert kept.patterns.keys() == kept.record["pruned_weights"].keys()
    train(wrapped, torch.optim.AdamW([each for each in wrapped.parameters() if each.requires_grad], 1e-2), 2)
    with pytest.raises(ModelError, match="the model has adapters: merge them first"):
        kept.save_pretrained(tmp_path / "trained")
    deltas = {f"{name.removeprefix('base_model.model.')}.weight": layer.get_delta_weight("default").detach()
              for name, layer in wrapped.named_modules() if hasattr(layer, "get_delta_weight")}  # fmt: skip
    size = sum(delta.square().sum() for delta in deltas.values())
    fallen = sum(delta[before[name]].square().sum() for name, delta in deltas.items())
    lost = kept.merge_and_unload(wrapped)
    check_kept(model, before, list(kept.patterns))
    torch.testing.assert_close(model.get_parameter(UP), start + deltas[UP].masked_fill(before[UP], 0))
    assert lost == pytest.approx(float(fallen / size), rel=1e-4)
    assert 0.3 < lost < 0.7
    permtriton.export(kept.save_pretrained(tmp_path / "trained"), tmp_path / "packed")


def test_a_merge_that_fails_on_its_way_keeps_the_zeros():
    model = pruned_llama()
    before, kept, wrapped = zeros_of(model), permtriton.keep_pattern(model), adapted(model)
    wrapped.get_submodule("base_model.model.model.layers.1.mlp.up_proj").lora_B.default.weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match="the adapters cannot be merged: NaNs detected"):
        kept.merge_and_unload(wrapped, safe_merge=True)
    check_kept(model, before, [UP])


def test_a_copy_that_peft_trained_whole_is_not_merged():
    """It would take the place of the weight whose zeros are kept."""
    peft = pytest.importorskip("peft")
    kept = permtriton.keep_pattern(model := pruned_llama())
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["up_proj"]))
    with pytest.raises(ModelError, match=r"up_proj\.original_module: .*modules_to_save"):
        kept.merge_and_unload(wrapped)


def test_what_cannot_be_merged_is_refused():
    """Adapters of another model, none, soft prompts, and those of linears that gather their input."""
    peft = pytest.importorskip("peft")
    model, prompted = pruned_llama(), pruned_llama()
    kept, prompt = permtriton.keep_pattern(model), peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ModelError, match="is not the model that is kept: give its PeftModel"):
        kept.merge_and_unload(adapted(pruned_llama()))
    prompted_kept = permtriton.keep_pattern(prompted)
    for other, keep in ((model, kept), (peft.get_peft_model(prompted, prompt), prompted_kept)):
        with pytest.raises(ModelError, match=r"the adapters cannot be merged: .*merge_and_unload"):
            keep.merge_and_unload(other)
    folders.fuse(gathering := pruned_llama(), [], [UP.removesuffix(".weight")])
    with pytest.raises(ModelError, match=r"0\.mlp\.up_proj permutes its input, which its adapter does not"):
        permtriton.keep_pattern(gathering).merge_and_unload(adapted(gathering))


def test_an_adapter_of_the_dense_model_is_refused_where_channels_moved(tmp_path):
    zoo.tiny_llama().save_pretrained(tmp_path / "dense")
    folder = folders.save(pruned_llama(), tmp_path / "pruned")
    site = {"name": "q", "linears": ["q"], "index": [1, 0]}
    folders.edit_json(folder / "permtriton.json", lambda at: at.update(model=str(tmp_path / "dense"), sites=[site]))
    shutil.copytree(tmp_path / "dense", tmp_path / "copy of dense")
    peft, model = pytest.importorskip("peft"), folders.load(folder)
    kept = permtriton.keep_pattern(model)
    for name, call in product(("dense", "copy of dense"), (permtriton.keep_pattern, kept.merge_and_unload)):
        adapted(folders.load(tmp_path / name)).save_pretrained(tmp_path / "adapter")
        with pytest.raises(ModelError, match=rf"the adapter was trained on .*{name}, .*: train it on the compiled"):
            call(peft.PeftModel.from_pretrained(model, tmp_path / "adapter"))
