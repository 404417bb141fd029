"""Format fp8: zeros are zeros still, the rest is as it was, and other programs load it without permtriton."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

import permtriton
from permtriton import demo
from permtriton.checkpoint import fp8
from permtriton.checkpoint.export import export
from permtriton.errors import ConfigError, ModelError
from permtriton.kernels.quantize import dequantized, round_to_fp8
from permtriton.model.load import load_original
from permtriton.model.source import Source

from . import folders, zoo
from .folders import LAST_UP, WEIGHTS

FLOAT8 = torch.float8_e4m3fn
OUTSIDE_LAYERS = r"re:(?!$|(.*\.)?(layers\.\d+\.))"


def saved(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: object) -> Path:
    """A pruned LLaMA with a tokenizer."""
    model = folders.model_of("llama", dtype=dtype, vocab_size=2048, **changes)
    folders.save(model, folder)
    AutoTokenizer.from_pretrained(demo.FOLDER).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("fp8") / "saved")


@pytest.fixture(scope="module")
def written(source) -> Path:
    export(source, source.parent / "written", "fp8")
    return source.parent / "written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_stay_zeros_and_weights_move_by_rounding_only(dtype):
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3], weight[4] = 0, weight[4] * 1e-3
    weight[5, ::2] *= 1e-5
    folders.prune_weight(weight)
    stored, scale = round_to_fp8(weight)
    back = dequantized(stored, scale)
    assert (stored.dtype, scale.dtype, scale.shape, back.dtype) == (FLOAT8, dtype, (64, 1), dtype)
    assert not back[weight == 0].any()
    assert not (stored.view(torch.uint8) == 0x80).any()
    assert ((back - weight).abs() <= weight.abs() / 15 + scale / 1000).all()
    assert (back.abs().amax(1) > 0.9 * weight.abs().amax(1))[weight.any(1)].all()


def test_only_linears_beside_pruned_ones_change(source, written):
    before, after = load_file(source / WEIGHTS), load_file(written / WEIGHTS)
    linears = {name for name in before if "proj" in name}
    assert {name for name in after if after[name].dtype == FLOAT8} == linears
    assert after.keys() - before.keys() == {f"{name}_scale" for name in linears}
    rest = before.keys() - linears
    assert folders.differing({name: before[name] for name in rest}, {name: after[name] for name in rest}) == []
    config = json.loads((written / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["ignore"]) == ("compressed-tensors", ["lm_head", OUTSIDE_LAYERS])


def test_the_record_and_the_card_say_what_it_is(written):
    found = json.loads((written / "permtriton.json").read_text())["export"]
    assert (found["format"], found["quantized"], found["weights"]) == ("fp8", 14, 14)
    assert 0.5 < found["ratio"] < 0.54  # of 16 bits, with a scale per row
    assert found["further_zeros"] >= 0
    card = (written / "README.md").read_text()
    assert "- export: N:M still in 8 bits" in card
    assert "vLLM loads it by itself" in card


@pytest.mark.parametrize(
    ("kind", "others", "part"),
    [
        (BertForSequenceClassification, (BertModel, BertForQuestionAnswering, BertForMaskedLM), "encoder.layer"),
        (BertForSequenceClassification, (BertModel, BertForQuestionAnswering), "intermediate"),
        (BertForSequenceClassification, (BertModel,), "pooler"),
        (BertModel, (BertForSequenceClassification,), "intermediate"),
        (LlamaForCausalLM, (LlamaModel, LlamaForSequenceClassification), "layers"),
        (LlamaForCausalLM, (LlamaModel,), "mlp"),
        (LlamaModel, (LlamaForCausalLM,), "self_attn"),
    ],
)
@pytest.mark.slow
def test_other_classes_compute_the_same_hidden_states(tmp_path, kind, others, part):
    """They name what they share otherwise, and have heads of their own, whose linears are not quantized."""
    torch.manual_seed(0)
    model = kind(kind.config_class(**zoo.SIZES)).eval()
    zoo.randomize(model)
    folders.prune(model)
    folders.save(model, tmp_path / "saved")

    def only(record):
        record["pruned_weights"] = {name: dim for name, dim in record["pruned_weights"].items() if part in name}

    folders.edit_json(tmp_path / "saved" / "permtriton.json", only)
    export(tmp_path / "saved", tmp_path / "fp8", "fp8")
    found = []
    for each in (kind, *others):
        model = each.from_pretrained(tmp_path / "fp8")
        assert all(output.isfinite().all() for output in zoo.outputs(model, zoo.token_ids()))
        found.append(zoo.outputs(model.base_model, zoo.token_ids()))  # decompressed by the call before
    assert all(torch.equal(a, b) for each in found for a, b in zip(found[0], each, strict=False))


@pytest.mark.slow
def test_transformers_loads_it_without_permtriton(source, written):
    """In a process of its own: no quantizer of permtriton is registered there."""
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM as Auto;"
        "ids = torch.arange(40).view(2, 20); torch.set_grad_enabled(False);"
        "logits = [Auto.from_pretrained(each)(ids).logits.float() for each in sys.argv[1:]];"
        "print(float((logits[0] - logits[1]).norm() / logits[0].norm()), 'permtriton' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, source, written], capture_output=True, text=True, timeout=300, check=True
    )
    difference, imported = done.stdout.split()
    assert 0 < float(difference) < 0.3
    assert imported == "False"


def test_a_dense_linear_beside_pruned_ones_is_quantized_too(tmp_path):
    """Engines join query, key and value to one linear, which has one dtype."""
    folder, name = saved(tmp_path / "saved"), "model.layers.1.self_attn.q_proj.weight"
    folders.edit_json(folder / "permtriton.json", lambda record: record["pruned_weights"].pop(name))
    folders.change_tensor(name, torch.ones_like)(folder)
    result = export(folder, tmp_path / "out", "fp8")
    assert load_file(tmp_path / "out" / WEIGHTS)[name].dtype == FLOAT8
    assert (result["quantized"], result["weights"]) == (14, 13)


def test_a_packed_folder_gives_the_same(source, written, tmp_path):
    export(source, tmp_path / "packed", "packed")
    export(tmp_path / "packed", tmp_path / "again", "fp8")
    assert folders.differing(load_file(written / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)) == []


def test_what_cannot_be_quantized_is_refused(tmp_path, written, monkeypatch):
    for name, words in (("mixtral", "stacked experts"), ("gpt2", "transposed")):
        folder = folders.save(folders.model_of(name), tmp_path / name)
        with pytest.raises(ModelError, match=words):
            export(folder, tmp_path / "out", "fp8")
        with pytest.raises(ModelError, match=words):  # before any work
            permtriton.compile(
                str(folder_of(name, tmp_path)), output=tmp_path / "out", save_format="fp8", recipe="mask"
            )
    fused = folders.save(folders.model_of("llama", fused=True), tmp_path / "fused")
    with pytest.raises(ConfigError, match=r"`layout=portable` for a fp8"):
        export(fused, tmp_path / "out", "fp8")
    for format in ("packed", "fp8"):
        with pytest.raises(ModelError, match="quantized already"):
            export(written, tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


def folder_of(name: str, root: Path) -> Path:
    """The dense model as its author publishes it."""
    zoo.build(name).save_pretrained(root / f"{name}-dense")
    return root / f"{name}-dense"


def test_it_is_measured_and_reported_but_not_compiled(source, written, tmp_path):
    texts = [(demo.FOLDER / "heldout.txt").read_text(encoding="utf-8")[:2000]]
    measured = permtriton.evaluate(written, texts)
    assert measured.perplexity == pytest.approx(permtriton.evaluate(source, texts).perplexity, rel=0.05)
    page = permtriton.report([source, written], tmp_path / "page.html").read_text()
    assert "measured before it was stored in 8 bits" in page
    with pytest.raises(permtriton.PermTritonError, match="already been compiled"):
        permtriton.compile(str(written), recipe="mask")


@pytest.mark.slow
def test_what_another_tool_quantized_is_dequantized_and_compiled(written, tmp_path):
    """The folder lacks the record, which alone says who wrote it."""
    other = shutil.copytree(written, tmp_path / "other", ignore=shutil.ignore_patterns("permtriton.json"))
    stored = load_file(other / WEIGHTS)
    weight = load_original(Source(str(other)))[0].get_parameter(LAST_UP)
    assert torch.equal(weight, dequantized(stored[LAST_UP], stored[f"{LAST_UP}_scale"]))
    permtriton.compile(other, recipe="mask", data=zoo.token_ids(), output=tmp_path / "out")
    assert load_file(tmp_path / "out" / WEIGHTS)[LAST_UP].dtype == torch.bfloat16
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_are_rounded_as_compressed_tensors_rounds_them(dtype):
    """Bit for bit; rows of small weights keep their precision."""
    weight = (torch.randn(4, 32) * torch.tensor([[1.0], [1e-6], [1e4], [1e-3]])).to(dtype)
    scheme = preset_name_to_scheme(fp8.SCHEME, ["Linear"])
    scale, _ = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), scheme.weights)
    compressor = BaseCompressor.get_value_from_registry(fp8.LAYOUT)
    theirs = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)["weight"]
    stored, found = round_to_fp8(weight)
    assert torch.equal(found, scale)
    assert torch.equal(stored.float(), theirs.float())
    unpacked = compressor.decompress({"weight": stored, "weight_scale": found}, scheme)["weight"]
    assert torch.equal(dequantized(stored, found), unpacked)
    if dtype == torch.float32:
        assert ((unpacked - weight).norm(dim=1) / weight.norm(dim=1) < 0.05).all()


@pytest.mark.slow
def test_compile_saves_it_in_one_command(tmp_path):
    zoo.build("llama").save_pretrained(tmp_path / "dense")
    ids, out = zoo.token_ids(), tmp_path / "out"
    compiled = permtriton.compile(tmp_path / "dense", recipe="mask", data=ids, output=out, save_format="fp8")
    assert load_file(out / WEIGHTS)[LAST_UP].dtype == FLOAT8
    assert "--save-format fp8" in compiled.report["command"]
    assert compiled.report == json.loads((out / "permtriton.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]
