"""Packed and permuted checkpoints inside transformers: loaded exactly, or not at all."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from permtriton.checkpoint.export import export
from permtriton.errors import ModelError
from permtriton.model.modules import GatheredLinear, PermutedNorm

from . import folders
from .folders import LAST_UP, load

IDS = torch.arange(3, 27).view(2, 12)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return folders.places(tmp_path_factory.mktemp("quantizer"))


@pytest.mark.slow
def test_transformers_alone_refuses(place):
    """It warns that it does not know the method, then fails on the shapes; it must not return a model."""
    code = (
        "import sys\nfrom transformers import AutoModelForCausalLM\n"
        "for folder in sys.argv[1:]:\n"
        "    try:\n"
        "        AutoModelForCausalLM.from_pretrained(folder)\n"
        "    except RuntimeError as error:\n"
        "        print('refused:', 'mismatched_sizes' in str(error))\n"
    )
    names = [str(place("llama", "packed")), str(place("llama", "saved", fused=True))]
    result = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=120, check=True, cwd="/",
        env={name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"},
    )  # fmt: skip
    assert result.stdout.split("\n")[:2] == ["refused: True"] * 2, result.stdout + result.stderr
    assert result.stderr.count("got permtriton") == 2


# -- loading exactly -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "phi3", "mixtral"])
def test_a_packed_model_is_the_plain_model(place, name):
    dense, packed = load(place(name, "saved")), load(place(name, "packed"))
    assert folders.differing(folders.state(dense), folders.state(packed)) == []
    assert [type(module) for module in packed.modules()] == [type(module) for module in dense.modules()]
    assert list(dict(packed.named_parameters())) == list(dict(dense.named_parameters()))
    assert all(parameter.requires_grad and parameter.is_contiguous() for parameter in packed.parameters())
    assert not hasattr(packed.config, "quantization_config")
    assert not packed.is_quantized


@pytest.mark.parametrize(("name", "format"), [("llama", "saved"), ("gemma2", "dense"), ("opt", "packed")])
def test_a_fused_model_is_what_was_saved(place, name, format):
    expected = folders.model_of(name, fused=True, dtype=torch.bfloat16)
    loaded = load(place(name, format, fused=True))
    assert folders.differing(folders.state(expected), folders.state(loaded)) == []
    kinds = [type(m) for m in loaded.modules() if isinstance(m, PermutedNorm | GatheredLinear)]
    assert len(kinds) == len(folders.FUSED_NORMS[name]) + len(folders.FUSED_GATHERS[name])
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, expected(IDS).logits)


@pytest.mark.parametrize(("name", "fused"), [("llama_tied", False), ("gpt2", False), ("llama", True)])
def test_generates_and_saves_again(place, tmp_path, name, fused):
    loaded, expected = load(place(name, "packed", fused=fused)), load(place(name, "saved", fused=fused))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    assert torch.equal(
        loaded.generate(IDS, attention_mask=mask, **options), expected.generate(IDS, attention_mask=mask, **options)
    )
    loaded.save_pretrained(tmp_path / "again")
    quantization_config = json.loads((tmp_path / "again" / "config.json").read_text()).get("quantization_config")
    assert (quantization_config or {}).get("format") == ("dense" if fused else None)
    assert "packed" not in (tmp_path / "again" / "model.safetensors").read_bytes()[:20000].decode("latin1")
    assert folders.differing(folders.state(expected), folders.state(load(tmp_path / "again"))) == []


@pytest.mark.parametrize(
    ("stored", "dtype", "fused"),
    [
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.bfloat16, torch.float32, True),
    ],
)
def test_a_dtype_is_cast_to_as_from_the_dense_checkpoint(place, stored, dtype, fused):
    dense = load(place("llama", "saved", fused=fused, dtype=stored), dtype=dtype)
    packed = load(place("llama", "packed", fused=fused, dtype=stored), dtype=dtype)
    assert {parameter.dtype for parameter in packed.parameters()} == {dtype}
    assert folders.differing(folders.state(dense), folders.state(packed)) == []


def test_modules_that_stay_float32_do(place):
    """T5's wo, in float16."""
    model = transformers.T5ForConditionalGeneration._from_config(
        transformers.T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    )
    folders.prune(model)
    root = place("llama", "saved").parent
    folders.save(model.eval(), root / "t5")
    export(root / "t5", root / "t5-packed")
    kind = transformers.T5ForConditionalGeneration
    dense, packed = (load(root / name, kind, dtype=torch.float16) for name in ("t5", "t5-packed"))
    assert {p.dtype for p in packed.parameters()} == {torch.float16, torch.float32}
    assert folders.differing(folders.state(dense), folders.state(packed)) == []


def test_a_fused_model_can_be_cast_and_moved(place):
    model = load(place("llama", "packed", fused=True))
    for cast in (lambda: model.float(), lambda: model.to(torch.bfloat16), lambda: model.to("cpu").half()):
        cast()
    assert model.model.layers[0].input_layernorm.index.dtype == torch.uint8


@pytest.mark.parametrize("fused", [False, True])
def test_the_base_model_takes_its_part(place, fused):
    whole, base = load(place("llama", "packed", fused=fused)), load(place("llama", "packed", fused=fused), AutoModel)
    assert folders.differing(folders.state(whole.model), folders.state(base)) == []


def test_a_class_with_other_weights_is_refused(place):
    with pytest.raises(ModelError, match=r"no weights for score\.weight.*LlamaForSequenceClassification"):
        load(place("llama", "packed"), AutoModelForSequenceClassification)


def test_hashes_are_left_out_where_the_config_says_so(place, tmp_path):
    folder = shutil.copytree(place("llama", "packed"), tmp_path / "copy")
    folders.edit_tensors(folder, lambda tensors: tensors["model.norm.weight"][3].add_(1))
    changed = load_file(folder / "model.safetensors")["model.norm.weight"]
    with pytest.raises(ModelError, match="SHA-256"):
        load(folder)
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config.pop("sha256")
    assert torch.equal(load(folder, config=config).model.norm.weight, changed)


# -- or not at all -------------------------------------------------------------------------------------------------


def quantization(change):
    """Changes config.json's quantization_config."""

    def apply(folder: Path) -> None:
        folders.rewrite(folder, lambda tensors: None)
        folders.edit_json(folder / folders.CONFIG, lambda config: change(config["quantization_config"]))

    return apply


def tensors(change):
    return lambda folder: folders.rewrite(folder, change)


def duplicated(t):
    index = t["model.layers.0.input_layernorm.index"]
    index[0] = index[1]


INDEX, GATHER = "model.layers.0.input_layernorm.index", "model.layers.0.self_attn.o_proj.gather.index"
FIRST_NORM, O_PROJ = "model.layers.0.input_layernorm", "model.layers.0.self_attn.o_proj"
DAMAGE = {
    "no values": (tensors(lambda t: t.pop(f"{LAST_UP}_values")), [LAST_UP, "incomplete"]),
    "no positions": (tensors(lambda t: t.pop(f"{LAST_UP}_positions")), [LAST_UP, "incomplete"]),
    "no index": (tensors(lambda t: t.pop(INDEX)), [INDEX]),
    "an index twice": (tensors(duplicated), ["input_layernorm", "not a permutation"]),
    "an index of another type": (tensors(lambda t: t.update({GATHER: t[GATHER].long()})), [GATHER, "int64"]),
    "embeddings of another shape": (
        tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1].clone()})),
        ["lm_head.weight", "[89, 64]"],
    ),
    "another version": (quantization(lambda q: q.update(version=9)), ["version is 9"]),
    "another pattern": (quantization(lambda q: q.update(sparsity="1:4")), ["1:4"]),
    "a parameter not listed": (quantization(lambda q: q["packed"].pop(LAST_UP)), [LAST_UP]),
    "a parameter too many": (
        quantization(lambda q: q["packed"].update({"model.embed_tokens.weight": {"shape": [90, 64], "dim": 1}})),
        ["model.embed_tokens.weight", "incomplete"],
    ),
    "another dimension listed": (
        quantization(lambda q: q["packed"][LAST_UP].update(dim=0)),
        [LAST_UP, "the input dimension 0"],
    ),
    "a norm not listed": (quantization(lambda q: q["norms"].pop(FIRST_NORM)), [FIRST_NORM, "[1, 64]"]),
    "a gather not listed": (quantization(lambda q: q["gathers"].clear()), [O_PROJ, "does not list"]),
    "a norm too many": (
        quantization(lambda q: q["norms"].update({"model.norm": q["norms"][FIRST_NORM]})),
        ["model.norm"],
    ),
    "a norm that is none": (
        quantization(lambda q: q["norms"].update({"model.layers.0.mlp": q["norms"][FIRST_NORM]})),
        ["not a norm with 64"],
    ),
    "a gather of other channels": (quantization(lambda q: q["gathers"].update({O_PROJ: 32})), [O_PROJ, "32 input"]),
    "another hidden size": (
        lambda f: folders.edit_json(f / folders.CONFIG, lambda c: c.update(intermediate_size=10**9)),
        ["1000000000"],
    ),
    "a third layer": (
        lambda f: folders.edit_json(f / folders.CONFIG, lambda c: c.update(num_hidden_layers=3)),
        ["layers.2", "incomplete"],
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_gives_no_model(place, tmp_path, case):
    damage, words = DAMAGE[case]
    folder = shutil.copytree(place("llama", "packed", fused=True), tmp_path / "copy")
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


def test_a_shard_outside_the_folder_is_refused(tmp_path):
    model = folders.model_of("llama", fused=True)
    folder = folders.save(model, tmp_path / "in", shard="40KB")
    index = folder / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    name = where["model.norm.weight"]
    shutil.move(folder / name, tmp_path / name)
    folders.edit_json(
        index, lambda found: found.update(weight_map={k: f"../{v}" if v == name else v for k, v in where.items()})
    )
    with pytest.raises(ModelError, match="outside"):
        load(folder)
