"""Saving in the `fused` layout: the permutations are stored with the weights and verified."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import permtriton
from permtriton.driver.pipeline import compile_model
from permtriton.errors import VerificationError

from . import folders, zoo


@pytest.fixture(scope="module")
def fused() -> permtriton.CompiledModel:
    config = permtriton.config_from({"layout": "fused"}, "heuristic,mask")
    return compile_model(zoo.tiny_llama(), None, config, ids=zoo.tiny_ids(4, 16))


def test_a_fused_model_is_saved_with_its_permutations(fused, tmp_path):
    output = fused.save_pretrained(tmp_path / "out")
    quantization = json.loads((output / "config.json").read_text())["quantization_config"]
    assert (quantization["quant_method"], quantization["format"], len(quantization["norms"])) == (
        "permtriton",
        "dense",
        4,
    )
    stored = load_file(output / "model.safetensors")
    indices = {name: tensor for name, tensor in stored.items() if name.endswith(".index")}
    assert {tensor.dtype for tensor in indices.values()} == {torch.uint8}
    assert len(indices) == 4
    reloaded = AutoModelForCausalLM.from_pretrained(output)
    ids = torch.arange(16).view(1, 16)
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, fused.model(ids).logits)
    assert all(torch.equal(fused.model.state_dict()[k], v) for k, v in reloaded.state_dict().items())


def test_a_fused_model_that_saves_itself_says_what_it_is(fused, tmp_path):
    fused.save_pretrained(tmp_path / "out")
    fused.model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]["format"] == "dense"


def reverse(index: torch.Tensor) -> torch.Tensor:
    return index.flip(0)


@pytest.mark.parametrize("change", [reverse, None])
def test_a_damaged_permutation_is_found(fused, tmp_path, monkeypatch, change):
    name = "model.layers.1.input_layernorm.index"
    folders.after_saving(monkeypatch, fused, folders.change_tensor(name, change))
    with pytest.raises(VerificationError, match=name):
        fused.save_pretrained(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
