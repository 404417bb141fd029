"""Adapters that were trained on the dense model, in the channel order of a compiled one."""

import json
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedModel

import permtriton
from permtriton import find_plan
from permtriton.checkpoint.plan_entries import hidden_states_report, ordered_site_report
from permtriton.errors import ModelError, OutputError

from . import folders, zoo

peft = pytest.importorskip("peft")


def permuted(make, place, **options: object) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Returns a dense model and the same with its channels in another order, which is saved as a compiled folder."""
    dense, model = make(), make()
    plan = find_plan(model, "2:4", **options)
    indices = {each.name: torch.arange(each.units) for each in plan.spaces} | zoo.random_indices(plan)
    zoo.fold(model, plan, zoo.random_indices(plan))
    model.save_pretrained(place)
    record = folders.record(
        pruned_weights=folders.pruned_weights(model),
        sites=[ordered_site_report(site, site.expand(indices[site.space.name])) for site in plan.sites],
        hidden_states=hidden_states_report(plan.hidden_order(indices), ""),
    )
    record["config"] |= options
    (place / "permtriton.json").write_text(json.dumps(record))
    return dense, model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    place = tmp_path_factory.mktemp("adapt") / "compiled"
    return *permuted(zoo.tiny_llama, place), place


def trained(model: PreTrainedModel, config, place) -> torch.Tensor:
    """Puts an adapter with random weights on a model and saves it; returns the logits with it."""
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for _, weight in sorted((name, each) for name, each in wrapped.named_parameters() if each.requires_grad):
            weight.normal_(std=0.3)
        wrapped.save_pretrained(place)
        return wrapped(input_ids=zoo.tiny_ids(2, 8)).logits


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0))


CONFIGS = {
    "all linears": lambda: peft.LoraConfig(target_modules="all-linear", init_lora_weights=False),
    "embedding, head": lambda: peft.LoraConfig(target_modules=["embed_tokens", "lm_head"], init_lora_weights=False),
    "DoRA": lambda: peft.LoraConfig(target_modules=["v_proj", "down_proj"], use_dora=True),
    "whole head and norm": lambda: peft.LoraConfig(target_modules=["v_proj"], modules_to_save=["lm_head", "norm"]),
    "biases": lambda: peft.LoraConfig(target_modules=["up_proj"], lora_bias=True),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.slow(but=["all linears"])
def test_an_adapted_adapter_does_what_it_did_to_the_dense_model(llama, tmp_path, kind):
    dense, model, folder = zoo.tiny_llama(), zoo.tiny_llama(), llama[2]
    model.load_state_dict(llama[1].state_dict())
    with torch.no_grad():
        before = dense(input_ids=zoo.tiny_ids(2, 8)).logits
    expected = trained(dense, CONFIGS[kind](), tmp_path / "adapter")
    permtriton.adapt(tmp_path / "adapter", folder, tmp_path / "adapted")

    def effect(adapter: str) -> torch.Tensor:
        with torch.no_grad():
            wrapped = peft.PeftModel.from_pretrained(model, tmp_path / adapter).eval()
            logits = wrapped(input_ids=zoo.tiny_ids(2, 8)).logits
            wrapped.unload()
            return logits

    got = effect("adapted")
    torch.testing.assert_close(got, expected)
    assert cosine(got - before, expected - before) > 1 - 1e-5
    assert not torch.allclose(effect("adapter"), expected, atol=1e-3), "as it is, it does something else"
    settings = json.loads((tmp_path / "adapted" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folder)


@pytest.mark.parametrize("name", ["gpt2", "bert_mlm", "llama_tied"])
@pytest.mark.slow
def test_transposed_and_tied_weights(tmp_path, name):
    dense, model = permuted(lambda: zoo.build(name), tmp_path / "compiled")
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    expected = trained(dense, config, tmp_path / "adapter")
    permtriton.adapt(tmp_path / "adapter", tmp_path / "compiled", tmp_path / "adapted")
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "adapted").eval()
    with torch.no_grad():
        torch.testing.assert_close(wrapped(input_ids=zoo.tiny_ids(2, 8)).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_score_head_reads_the_stream_of_the_folder(llama, tmp_path):
    """An adapter of a classifier, on the folder of a model that writes text; some linears were left dense."""
    folder = tmp_path / "compiled"
    permuted(zoo.tiny_llama, folder, ignore=["model.layers.0.mlp.up_proj"])

    def classifier() -> PreTrainedModel:
        torch.manual_seed(3)
        return LlamaForSequenceClassification(LlamaConfig(**zoo.TINY, pad_token_id=0, num_labels=3))

    dense, model = classifier(), classifier()
    dense.model.load_state_dict(zoo.tiny_llama().model.state_dict())
    model.model.load_state_dict(folders.load(folder).model.state_dict())
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["v_proj"], init_lora_weights=False)
    expected = trained(dense, config, tmp_path / "adapter")
    permtriton.adapt(tmp_path / "adapter", folder, tmp_path / "adapted")
    with torch.no_grad():
        got = peft.PeftModel.from_pretrained(model, tmp_path / "adapted").eval()(input_ids=zoo.tiny_ids(2, 8)).logits
    torch.testing.assert_close(got, expected)


def test_what_cannot_be_adapted_is_refused(llama, tmp_path):
    folder, adapter = llama[2], tmp_path / "adapter"
    trained(zoo.tiny_llama(), peft.LoraConfig(target_modules=["v_proj"]), adapter)
    copy = shutil.copytree(folder, tmp_path / "copy")
    for problem, settings in {
        r"of the kind 'LOHA', which cannot be reordered": {"peft_type": "LOHA"},
        r"of experts or some tokens, which cannot be reordered": {"target_parameters": ["mlp.experts.gate_up_proj"]},
        r"began by pissa, which changes the dense weights": {"init_lora_weights": "pissa"},
        r"the adapter has that order already": {"base_model_name_or_path": str(folder)},
        r"trained on \S*copy, .* which permtriton compiled": {"base_model_name_or_path": str(copy)},
    }.items():
        changed = shutil.copytree(adapter, tmp_path / "changed", dirs_exist_ok=True)
        folders.edit_json(changed / "adapter_config.json", lambda found, new=settings: found.update(new))
        with pytest.raises(ModelError, match=problem):
            permtriton.adapt(changed, folder, tmp_path / "out")
    with pytest.raises(ModelError, match=r"holds no adapter_config\.json: give a folder that PEFT"):
        permtriton.adapt(tmp_path, folder, tmp_path.parent / "out")
    with pytest.raises(OutputError, match="changed exists: choose another folder"):
        permtriton.adapt(adapter, folder, tmp_path / "changed")
    fused = shutil.copytree(folder, tmp_path / "fused")
    folders.edit_json(fused / "permtriton.json", lambda found: found["config"].update(layout="fused"))
    with pytest.raises(ModelError, match=r"has the layout fused, .*train the adapter on it"):
        permtriton.adapt(adapter, fused, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_adapter_of_another_model_is_refused(llama, tmp_path):
    folder = llama[2]
    trained(zoo.tiny_llama(num_hidden_layers=3), peft.LoraConfig(target_modules=["v_proj"]), tmp_path / "deep")
    with pytest.raises(ModelError, match=r"layers\.2\.\S* has no place in this model: it belongs to another"):
        permtriton.adapt(tmp_path / "deep", folder, tmp_path / "out")
    trained(zoo.tiny_llama(hidden_size=32), peft.LoraConfig(target_modules=["v_proj"]), tmp_path / "wide")
    with pytest.raises(ModelError, match=r"lora_A\.weight is \[8, 32\], expected 16 channels along dimension 1"):
        permtriton.adapt(tmp_path / "wide", folder, tmp_path / "out")


def test_an_adapter_of_the_dense_model_is_not_merged(llama, tmp_path):
    """Its base is a folder that permtriton did not write; an adapted one names the compiled folder."""
    dense, folder, adapter = tmp_path / "dense", shutil.copytree(llama[2], tmp_path / "compiled"), tmp_path / "adapter"
    zoo.tiny_llama().save_pretrained(dense)
    trained(folders.load(dense), peft.LoraConfig(target_modules=["v_proj"]), adapter)
    folders.prune(model := folders.load(folder))
    model.save_pretrained(folder)
    kept = permtriton.keep_pattern(loaded := folders.load(folder))
    for call in (permtriton.keep_pattern, kept.merge_and_unload):
        with pytest.raises(ModelError, match=r"the adapter was trained on \S*dense, whose channels.*permtriton adapt"):
            call(peft.PeftModel.from_pretrained(loaded, adapter))
    folders.edit_json(adapter / "adapter_config.json", lambda at: at.update(base_model_name_or_path=str(folder)))
    kept = permtriton.keep_pattern(loaded := folders.load(folder))
    assert kept.merge_and_unload(peft.PeftModel.from_pretrained(loaded, adapter)).model is loaded
