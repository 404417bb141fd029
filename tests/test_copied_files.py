"""What stands beside a model's weights, in its folder and config: what comes along, and is it true?"""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import permtriton
from permtriton.checkpoint.save import _correct
from permtriton.data.samples import Samples
from permtriton.errors import ModelError
from permtriton.model.copied_files import copied_files, is_embedder
from permtriton.model.load import load_empty_model, load_model
from permtriton.model.reference import Reference
from permtriton.model.source import Source
from permtriton.util.progress import NoProgress

from . import folders, zoo
from .sentences import trained_tokenizer

MODULES = [{"idx": n, "path": path, "type": "x"} for n, path in enumerate(("", "1_Pooling", "2_Dense", "../secret"))]


def embedder(place: Path, model=None) -> Path:
    """Writes a folder as sentence-transformers saves one."""
    (model or zoo.tiny_llama(vocab_size=280)).save_pretrained(place)
    (place / "modules.json").write_text(json.dumps(MODULES))
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("{}")
    return place


def test_the_states_of_an_embedder_keep_their_order(tmp_path):
    """Of a causal class, too, whose logits alone would let them move."""
    orders = permtriton.inspect(embedder(tmp_path))["permutations"]
    reasons = {each["name"]: each["reason"] for each in orders}
    assert reasons.pop("stream") == "it is an output of the model, whose order must stay"
    assert not any(reasons.values()), "what is inside a layer may move"


def test_the_model_inside_the_folder_of_an_embedder(tmp_path):
    """Older versions save the model in a folder of its own, beside the others."""
    inside = tmp_path / "0_Transformer"
    zoo.tiny_llama().save_pretrained(inside)
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "0_Transformer"}, {"path": "1_Pooling"}]))
    with pytest.raises(
        ModelError, match=r"holds no config\.json: the model that modules\.json names is \S*0_Transformer"
    ):
        permtriton.inspect(tmp_path)
    assert is_embedder(load_empty_model(Source(str(inside))))


def test_what_is_no_weight_comes_along(tmp_path):
    """Weights of another format, states of a training and folders of their own stay."""
    folder = embedder(tmp_path / "dense")
    trained_tokenizer().save_pretrained(folder)
    comes = {"LICENSE", "NOTICE", "tokenizer.model", "labels.txt"}
    training = {"pytorch_model.bin", "model.onnx", "optimizer.pt"}
    stays = training | {"params.json", "quantize_config.json", "onnx/", "big.txt"}
    for name in (*comes, *stays, "README.md", ".env"):
        folder.joinpath(name).mkdir() if name.endswith("/") else (folder / name).write_text("x")
    with (folder / "big.txt").open("w") as file:
        file.truncate(2**27)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("x")
    source = Source(str(folder))
    modules = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json"}
    assert set(copied_files(source)) == comes | modules | {"tokenizer.json", "tokenizer_config.json"}


def test_files_beside_a_trained_model_are_saved(tmp_path):
    """But none of another tokenizer, and no link out of the folder."""
    folder = embedder(folders.save(folders.model_of("llama"), tmp_path / "pruned"), folders.model_of("llama"))
    for name in ("LICENSE", "tokenizer.model"):
        (folder / name).write_text("x")
    (folder / "NOTICE").symlink_to(folder.parent)
    kept = permtriton.keep_pattern(model := folders.load(folder))
    saved = folders.files(kept.save_pretrained(tmp_path / "without"))
    assert {"LICENSE", "tokenizer.model", "1_Pooling/config.json", "2_Dense/model.safetensors"} <= saved.keys()
    assert "NOTICE" not in saved
    saved = folders.files(kept.save_pretrained(tmp_path / "with", trained_tokenizer()))
    assert "LICENSE" in saved
    assert "tokenizer.model" not in saved
    assert not model.training
    permtriton.export(tmp_path / "with", tmp_path / "packed")


@pytest.mark.parametrize("content", ["{}", "[1]", "[{}]", '[{"path": 3}]', "[", '[{"path": "/etc"}]'])
def test_damaged_modules_are_passed_over(tmp_path, content):
    zoo.tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "modules.json").write_text(content)
    assert copied_files(Source(str(tmp_path))) == ["modules.json"]


# -- what transformers leaves out ------------------------------------------------------------------------------------


def test_weights_that_transformers_leaves_out_in_silence_are_named(tmp_path, monkeypatch):
    """Such as the layers of Qwen3-Next and DeepSeek that predict further tokens; but no buffers of earlier versions."""
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp.*", r"inv_freq"])
    zoo.tiny_llama().save_pretrained(tmp_path)
    more = dict.fromkeys(["mtp.0.experts.gate_up_proj", "mtp.0.up.bias", "mtp.0.up.weight", "model.inv_freq"])
    folders.edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.ones(2, 2) for name in more}))
    said = []

    class Said(NoProgress):
        say = said.append

    load_model(Source(str(tmp_path)), progress=Said())
    unused = ", ".join(name for name in more if name.startswith("mtp"))
    assert said[1:] == [f"tensors that LlamaForCausalLM does not use are left out: {unused}"]


FURTHER = {
    "LlamaConfig": {"mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1, "use_mtp": True},
    "Step3p7TextConfig": {"num_nextn_predict_layers": 1},
    "MellumConfig": {"num_mtp_layers": 1},
    "NemotronHConfig": {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]},
    "DeepseekV3Config": {"num_mtp_layers": 1},
    "InklingConfig": {
        "text_config": {}, "mtp_config": {"num_nextn_predict_layers": 2, "local_layer_ids": [0]},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FURTHER)
def test_a_config_declares_no_layers_that_were_left_out(tmp_path, kind):
    """No transformers class loads those that predict further tokens, and tools that do would look for them."""
    if not hasattr(transformers, kind):
        pytest.skip("a later version of transformers has it")
    model = zoo.tiny_llama()
    model.config = getattr(transformers, kind)(**FURTHER[kind])
    model.generation_config.use_mtp = True
    _correct(model)
    model.config.save_pretrained(tmp_path)
    model.generation_config.save_pretrained(tmp_path)
    assert not GenerationConfig.from_pretrained(tmp_path).use_mtp
    loaded = type(model.config).from_pretrained(tmp_path)
    for config in (loaded, loaded.get_text_config()):
        names = [name for name in dir(config) if re.search("mtp|nextn", name) and not name.startswith("get")]
        assert {name: value for name in names if (value := getattr(config, name))} == {}


def test_layers_that_were_loaded_stay_declared():
    model = zoo.tiny_llama(num_nextn_predict_layers=1)
    model.mtp_layers = torch.nn.Linear(2, 2)
    _correct(model)
    assert model.config.num_nextn_predict_layers == 1


@pytest.mark.parametrize("tied", [True, False])
def test_a_config_says_whether_the_head_is_the_embedding(tmp_path, tied):
    """Readers that trust it would leave another head out."""
    zoo.tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    if not tied:
        folders.edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(40, 16)}))
    model = load_model(Source(str(tmp_path)))
    _correct(model)
    assert model.config.tie_word_embeddings is tied


def test_a_forward_that_takes_one_sample_at_a_time():
    """A classifier without a token for padding."""
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**zoo.TINY, num_labels=3)).eval()
    reference = Reference(model, Samples.of(zoo.tiny_ids(4, 8)))
    assert reference.output.shape == (1, 3)
    assert reference.check(model, "unchanged", None) == 0


# -- folders of other kinds ------------------------------------------------------------------------------------------


def test_an_adapter_is_refused_as_one_whatever_is_beside_it(tmp_path):
    for name in ("adapter_config.json", "optimizer.pt"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match="holds an adapter"):
        permtriton.compile(tmp_path)


@pytest.mark.slow
def test_weights_that_another_tool_pruned_are_packed_as_they_are(tmp_path):
    """As both errors say."""
    model = zoo.tiny_llama()
    folders.prune(model)
    model.save_pretrained(tmp_path / "pruned")
    command = r"permtriton compile FOLDER --recipe mask --importance magnitude --save-format packed"
    with pytest.raises(ModelError, match=command):
        permtriton.export(tmp_path / "pruned", tmp_path / "packed")
    with pytest.raises(ModelError, match=command):
        permtriton.keep_pattern(model).save_pretrained(tmp_path / "trained")
    options = {"recipe": "mask", "importance": "magnitude", "save_format": "packed", "eval_data": "none"}
    permtriton.compile(tmp_path / "pruned", output=tmp_path / "packed", data=zoo.tiny_ids(2, 8), **options)
    assert not folders.differing(folders.state(model), folders.state(folders.load(tmp_path / "packed")))
