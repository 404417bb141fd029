"""Packed checkpoints on a GPU, as far as a CPU can test: what stays packed, what it computes, how it is saved."""

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from permtriton.checkpoint import packed, quantizer
from permtriton.checkpoint.export import export
from permtriton.checkpoint.replace_modules import device_of
from permtriton.errors import ModelError
from permtriton.kernels import cusparselt
from permtriton.model.headers import REPORT_FILE
from permtriton.model.load import load_empty_model, load_model, load_original
from permtriton.model.modules import SparseLinear, is_packed
from permtriton.model.prunable import check_original
from permtriton.model.source import Source

from . import folders
from .folders import LAST_UP, load
from .kernel_inputs import compressed

IDS = torch.arange(3, 27).view(2, 12)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return folders.places(tmp_path_factory.mktemp("packed"))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Loads as if parameters went to a GPU; the operators run their references."""
    monkeypatch.setattr(quantizer, "device_of", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(packed, "has_kernels", lambda device: device.type == "cuda")


def packed_names(model) -> list[str]:
    return [name for name, module in model.named_modules() if is_packed(module)]


@pytest.mark.parametrize(
    ("name", "fused", "packed_of_each_layer"),
    [("llama", True, 7), ("phi3", False, 4), ("mixtral", False, 4), ("gpt2", False, 0)],
)
def test_on_a_gpu_linears_stay_packed(as_on_a_gpu, place, tmp_path, name, fused, packed_of_each_layer):
    """They are saved packed, too; stacks of experts and transposed weights become dense."""
    loaded, expected = load(place(name, "packed", fused=fused)), load(place(name, "saved", fused=fused))
    assert len(packed_names(loaded)) == packed_of_each_layer * loaded.config.num_hidden_layers
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, expected(IDS).logits)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(loaded.generate(IDS, **options), expected.generate(IDS, **options))
    loaded.save_pretrained(tmp_path / "again", save_original_format=False)
    stored = json.loads((tmp_path / "again" / "config.json").read_text()).get("quantization_config", {})
    assert stored.get("format") == ("packed" if packed_of_each_layer else None)
    assert sorted(stored.get("packed", {})) == sorted(f"{name}.weight" for name in packed_names(loaded))
    assert not (tmp_path / "again" / REPORT_FILE).exists()
    again = load(tmp_path / "again")
    assert folders.differing(folders.state(loaded), folders.state(again)) == []
    for module in again.modules():
        if isinstance(module, SparseLinear):
            module.unpack()
    assert folders.differing(folders.state(expected), folders.state(again)) == []


def test_on_a_gpu_the_compressed_form_is_made_and_not_saved(as_on_a_gpu, place, tmp_path, monkeypatch):
    monkeypatch.setattr(cusparselt, "supports", lambda *_: True)
    monkeypatch.setattr(cusparselt, "compress", compressed)
    loaded = load(place("llama", "packed"))
    layers = [module for module in loaded.modules() if is_packed(module)]
    assert all(torch.equal(m.weight_compressed, compressed(copy.deepcopy(m).unpack().weight)) for m in layers)
    loaded.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(load_file(place("llama", "packed") / "model.safetensors"))
    assert torch.equal(
        stored[f"{LAST_UP}_values"], load_file(place("llama", "packed") / "model.safetensors")[f"{LAST_UP}_values"]
    )


def test_on_a_gpu_only_what_has_kernels_stays_packed(as_on_a_gpu, place):
    assert packed_names(load(place("llama", "packed"), dtype=torch.float32)) == []
    half = load(place("llama", "packed", dtype=torch.float32), dtype=torch.float16)
    assert packed_names(half)
    dense = load(place("llama", "saved", dtype=torch.float32), dtype=torch.float16)
    with torch.no_grad():
        assert torch.equal(half(IDS).logits, dense(IDS).logits)


@pytest.mark.parametrize("how", ["while loading", "afterwards"])
def test_on_a_gpu_a_cast_that_makes_zeros_is_saved_as_zeros(as_on_a_gpu, tmp_path, how):
    model = folders.model_of("llama", dtype=torch.bfloat16)
    weight = model.model.layers[1].mlp.up_proj.weight.data
    row, column = (int(place) for place in weight.nonzero()[0])
    weight[row, column] = -1e-20  # -0.0 in float16
    folders.save(model, tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "packed")
    if how == "while loading":
        loaded = load(tmp_path / "packed", dtype=torch.float16)
    else:
        loaded = load(tmp_path / "packed").half()
    loaded.save_pretrained(tmp_path / "again")
    found = copy.deepcopy(load(tmp_path / "again").get_submodule("model.layers.1.mlp.up_proj")).unpack().weight
    assert torch.equal(found, weight.half())
    assert not bool(found[row, column].signbit())


def test_a_packed_model_is_not_compiled_again(as_on_a_gpu, place):
    with pytest.raises(ModelError, match=r"compiled already \(model\.layers\.0\.\S+ is a SparseLinear"):
        check_original(load(place("llama", "packed")))


@pytest.mark.parametrize("fused", [False, True])
def test_a_packed_folder_without_our_report_is_refused_before_it_is_loaded(
    as_on_a_gpu, place, tmp_path, fused, monkeypatch
):
    """`save_pretrained` writes no permtriton.json; on a CPU the weights would be unpacked and taken for dense."""
    load(place("llama", "packed", fused=fused)).save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / REPORT_FILE).exists()
    monkeypatch.undo()
    source = Source(str(tmp_path / "again"), device="cpu")
    with pytest.raises(ModelError, match="already been compiled by permtriton: pass the original model"):
        load_original(source)
    dense = load(place("llama", "saved", fused=fused))
    assert torch.equal(load_model(source)(IDS).logits, dense(IDS).logits)  # its quality may be measured
    assert load_empty_model(source).device.type == "meta"


@pytest.mark.parametrize(
    ("device_map", "device"),
    [
        (None, "cpu"),
        ({"": "cpu"}, "cpu"),
        ({"": 1}, "cuda:1"),
        ({"": torch.device("cuda", 0)}, "cuda:0"),
        ({"model.layers.0": "cpu", "model.layers": 0}, "cpu"),
        ({"model.layers.01": "cpu", "model.layers.0.mlp": 2, "model": "cpu"}, "cuda:2"),
        ({"lm_head": 0}, "cpu"),
        ("auto", "cpu"),
    ],
)
def test_where_a_parameter_goes(device_map, device):
    assert device_of("model.layers.0.mlp.up_proj.weight", device_map) == torch.device(device)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_a_device_map_is_taken(place, device_map):
    dense, packed = load(place("llama", "saved")), load(place("llama", "packed"), device_map=device_map)
    assert folders.differing(folders.state(dense), folders.state(packed)) == []


def test_tensor_parallelism_is_refused(place, monkeypatch):
    """Each GPU would hold whole packed tensors, but results are summed over the GPUs."""
    packed, fused = place("llama", "packed"), place("llama", "saved", fused=True)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_tp_size", 2)
    with pytest.raises(ModelError, match=r"tensor parallelism.*--format dense"):
        load(packed)
    with pytest.raises(ModelError, match=r"layout fused cannot be divided by tensor parallelism.*portable"):
        load(fused)


def test_being_divided_by_fsdp2_while_loading_is_refused(place, monkeypatch):
    """Each rank would hold a part of tensors that are unpacked, or take another shape, when they are loaded."""
    packed, fused = place("llama", "packed"), place("llama", "saved", fused=True)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_fsdp_size", 2, raising=False)
    with pytest.raises(ModelError, match=r"packed checkpoints cannot be divided by FSDP2.*--format dense"):
        load(packed)
    with pytest.raises(ModelError, match=r"layout fused cannot be divided by FSDP2.*portable, or load it whole"):
        load(fused)


@pytest.mark.parametrize("elsewhere", ["disk", "cpu"])
def test_offloading_is_refused_whenever_it_is_known(place, elsewhere):
    model = load(place("llama", "packed", fused=True))
    with pytest.raises(ModelError, match="offloaded to disk, nor divided"):
        model.hf_quantizer._process_model_before_weight_loading(model, [], {"model": 0, "lm_head": elsewhere})
    model.hf_device_map = {"model": torch.device("cuda", 1), "lm_head": elsewhere}
    with pytest.raises(ModelError, match="offloaded to disk, nor divided"):
        model.hf_quantizer._process_model_after_weight_loading(model)
