"""Adapters of PEFT on N:M weights: what merging keeps and loses, and what is refused."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import permtriton
from permtriton.errors import ModelError

from . import folders
from .keeping import (
    UP,
    adapted,
    check_kept,
    no_hooks_stay,  # noqa: F401 (a fixture of all tests here)
    pruned_llama,
    run_two_ranks,
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
    (delta,) = (layer.get_delta_weight("default").detach() for name, layer in wrapped.named_modules()
                if name.endswith("layers.0.mlp.up_proj"))  # fmt: skip
    merged = kept.merge_and_unload(wrapped)
    assert merged.model is model
    check_kept(model, before, list(kept.patterns))
    torch.testing.assert_close(model.get_parameter(UP), start + delta.masked_fill(before[UP], 0))
    share = float(delta[before[UP]].square().sum() / delta.square().sum())
    assert merged.lost_by_weight[UP] == pytest.approx(share, rel=1e-4)
    assert len(merged.lost_by_weight) == 4
    assert 0.3 < merged.lost < 0.7
    permtriton.export(kept.save_pretrained(tmp_path / "trained"), tmp_path / "packed")


@pytest.mark.parametrize("filled", ["merged", "pissa", "olora"])
def test_what_is_lost_is_not_known_where_the_zeros_were_filled_before(filled):
    """By an adapter that PEFT has merged already, or that begins with a part of the weights taken out of them."""
    model = pruned_llama()
    before, kept = zeros_of(model), permtriton.keep_pattern(model)
    wrapped = adapted(model, False if filled == "merged" else filled)
    if filled == "merged":
        wrapped.merge_adapter()
    merged = kept.merge_and_unload(wrapped)
    check_kept(merged.model, before, list(kept.patterns))
    assert math.isnan(merged.lost)
    assert math.isnan(merged.lost_by_weight[UP])


def test_a_merge_that_fails_on_its_way_keeps_the_zeros():
    model = pruned_llama()
    before, kept, wrapped = zeros_of(model), permtriton.keep_pattern(model), adapted(model)
    wrapped.get_submodule("base_model.model.model.layers.1.mlp.up_proj").lora_B.default.weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match="the adapters cannot be merged: NaNs detected"):
        kept.merge_and_unload(wrapped, safe_merge=True)
    check_kept(model, before, [UP])


@pytest.mark.slow
def test_adapters_of_a_divided_model_with_two_ranks(tmp_path):
    """FSDP2, before and after the call: the same weights and the same loss as without it."""
    pytest.importorskip("peft")
    run_two_ranks("merge", tmp_path)


def test_adapters_that_would_leave_dense_weights_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    model, other = pruned_llama(), pruned_llama()
    kept = permtriton.keep_pattern(model)
    with pytest.raises(ModelError, match="the adapters are of another model"):
        kept.merge_and_unload(adapted(other))
    biased = peft.LoraConfig(target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(ModelError, match="the adapters cannot be merged: Impossible to merge LoRA"):
        permtriton.keep_pattern(other := pruned_llama()).merge_and_unload(peft.get_peft_model(other, biased))
    folders.fuse(other := pruned_llama(), [], [UP.removesuffix(".weight")])
    with pytest.raises(ModelError, match=r"0\.mlp\.up_proj brings its input into another order, which its adapter"):
        permtriton.keep_pattern(other).merge_and_unload(adapted(other))


@pytest.mark.parametrize("copied", ["up_proj", "mlp"])
@pytest.mark.parametrize("call", ["before", "after", "recorded"])
def test_dense_copies_of_weights_are_refused(tmp_path, copied, call):
    """Of a linear, or of what holds it; the pattern is kept from before the adapter was added, or from afterwards."""
    peft = pytest.importorskip("peft")
    model = pruned_llama()
    if call == "recorded":
        model = AutoModelForCausalLM.from_pretrained(folders.save(model, tmp_path / "pruned"))
    kept = permtriton.keep_pattern(model) if call == "before" else None
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[copied]))
    first = r"0\.mlp\.\w+_proj\.weight: the adapter trains a dense copy of it \(modules_to_save\)"
    with pytest.raises(ModelError, match=first):
        kept.merge_and_unload(wrapped) if kept else permtriton.keep_pattern(wrapped)


def test_adapters_of_transformers_are_merged_in_a_second_model(tmp_path):
    """As the errors of the first one say: transformers cannot merge the adapters that it adds."""
    peft = pytest.importorskip("peft")
    folder = folders.save(pruned_llama(), tmp_path / "pruned")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.add_adapter(peft.LoraConfig(target_modules=["up_proj"], init_lora_weights=False))
    kept = permtriton.keep_pattern(model)
    with pytest.raises(ModelError, match="the model has adapters: merge them first, with merge_and_unload"):
        kept.save_pretrained(tmp_path / "trained")
    with pytest.raises(ModelError, match=r"a LlamaForCausalLM is no PeftModel: .* merged in a second model"):
        kept.merge_and_unload(model)
    model.save_pretrained(tmp_path / "adapter")
    second = AutoModelForCausalLM.from_pretrained(folder)
    before, start, kept = zeros_of(second), second.get_parameter(UP).detach().clone(), permtriton.keep_pattern(second)
    kept.merge_and_unload(peft.PeftModel.from_pretrained(second, tmp_path / "adapter"))
    delta = model.get_submodule(UP.removesuffix(".weight")).get_delta_weight("default").detach()
    torch.testing.assert_close(second.get_parameter(UP), start + delta.masked_fill(before[UP], 0))
    kept.save_pretrained(tmp_path / "trained")


def test_a_soft_prompt_is_no_change_of_weights():
    peft = pytest.importorskip("peft")
    model = pruned_llama()
    kept = permtriton.keep_pattern(model)
    prompt = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ModelError, match="an adapter of the kind PROMPT_TUNING changes no weights, so that it cannot"):
        kept.merge_and_unload(peft.get_peft_model(model, prompt))
