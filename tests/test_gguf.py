"""Models in GGUF files: read by transformers, dequantized, and from then on like any other model."""

import json
import math
import shutil
import struct
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from permtriton.checkpoint.card import CARD_FILE
from permtriton.cli.main import app
from permtriton.errors import ModelError
from permtriton.model import gguf_file
from permtriton.model.load import config_of, load_empty_model, load_model, load_original
from permtriton.model.modules import SparseLinearFp8
from permtriton.model.prunable import check_original
from permtriton.model.source import Source
from permtriton.model.tokenizer import load_tokenizer
from permtriton.util.extras import install_command
from permtriton.util.progress import Event, EventProgress

from .desk import RUNNER, Desk
from .gguf_files import llama, write_gguf, write_tokenizer
from .sentences import SENTENCE, trained_tokenizer

FILE, WORDS = "tiny.Q8_0.gguf", "15 tensors of Q8_0, 5 of F32"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    expected = write_gguf(folder / FILE, llama())
    np.savez(folder / "expected.npz", **expected)
    (folder / "text.txt").write_text(SENTENCE * 60, encoding="utf-8")
    return folder


@pytest.fixture
def file(pristine, tmp_path) -> Path:
    return Path(shutil.copy(pristine / FILE, tmp_path / FILE))


@pytest.fixture
def workplace(pristine, file, monkeypatch) -> Desk:
    monkeypatch.chdir(file.parent)
    return Desk(file.parent, pristine / FILE)


def same_as_file(model: LlamaForCausalLM, pristine: Path) -> None:
    expected = np.load(pristine / "expected.npz")
    found = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    assert set(found) == set(expected.files)
    assert [name for name in found if not np.array_equal(found[name], expected[name])] == []


def test_the_weights_are_those_of_the_file(pristine, file):
    source = Source(str(file))
    model, tokenizer = load_original(source, saved=True)
    assert type(model) is LlamaForCausalLM
    assert model.dtype == torch.float32
    assert model.name_or_path == str(file)
    assert not hasattr(model.config, "quantization_config"), "it would be saved, and then nothing could load the model"
    same_as_file(model, pristine)
    assert tokenizer(SENTENCE).input_ids == trained_tokenizer()(SENTENCE).input_ids
    assert source.described == f"{file}, dequantized: {WORDS}"


def test_lists_of_words_are_read_at_once_and_as_gguf_reads_them(file, monkeypatch):
    calls, read = [], GGUFReader._get_field_parts
    monkeypatch.setattr(GGUFReader, "_get_field_parts", lambda *call: calls.append(call) or read(*call))
    expected = GGUFReader(file).fields
    elements = len(calls)
    found = gguf_file._reader()(file).fields
    assert len(calls) - elements < len(expected), "no call per word"
    assert {name: each.contents() for name, each in found.items()} == {
        name: each.contents() for name, each in expected.items()
    }
    assert [each.types for each in found.values()] == [each.types for each in expected.values()]


def test_a_file_in_a_folder(pristine, file):
    """What lies beside the file is another model's."""
    for name in ("config.json", "permtriton.json", "model.safetensors"):
        (file.parent / name).write_text("{")
    source = Source(str(file.parent), gguf_file=FILE)
    same_as_file(load_original(source)[0], pristine)
    assert load_empty_model(source).config.num_hidden_layers == 2
    assert source.described == f"{file.parent}, dequantized from {FILE}: {WORDS}"


def test_a_file_beside_a_hub_name(pristine, monkeypatch):
    calls = []
    download = lambda name, **options: calls.append((name, *options["allow_patterns"])) or str(pristine)  # noqa: E731
    monkeypatch.setattr("permtriton.model.source.snapshot_download", download)
    source = Source("someone/model", gguf_file=FILE)
    same_as_file(load_original(source)[0], pristine)
    assert {*calls} == {("someone/model", FILE)}, "nothing but the file"


def test_a_file_of_the_same_name_in_the_current_folder_is_another_model(pristine, tmp_path, monkeypatch):
    (tmp_path / FILE).write_bytes(b"another")
    monkeypatch.chdir(tmp_path)
    for source in (Source(str(pristine / FILE)), Source(str(pristine), gguf_file=FILE)):
        same_as_file(load_original(source, saved=True)[0], pristine)


def test_a_header_and_tensors_that_change_nothing(pristine, tmp_path):
    fields = {"rope.freq_base": 1e4, "rope.dimension_count": 8, "rope.scaling.type": "none", "split.count": 1}
    ones, zeros = np.ones(4, dtype=np.float32), np.zeros(32, dtype=np.float32)
    further = {"rope_freqs.weight": ones, "blk.0.attn_q.bias": zeros}
    write_gguf(tmp_path / FILE, llama(), further=further, **fields)
    same_as_file(load_model(Source(str(tmp_path / FILE))), pristine)


def test_experts_whose_gates_and_ups_transformers_merges(tmp_path):
    """They are used, by another name than that of the file."""
    model, (experts, width) = llama(), (4, 768)
    for layer in model.model.layers:
        layer.mlp = torch.nn.Module()
    shapes = {
        "ffn_gate_exps": (experts, width, 32), "ffn_up_exps": (experts, width, 32),
        "ffn_down_exps": (experts, 32, width), "ffn_gate_inp": (experts, 32), "attn_q_norm": (8,), "attn_k_norm": (8,),
    }  # fmt: skip
    further = {f"blk.{i}.{name}.weight": np.ones(shape, np.float32) for i in range(2) for name, shape in shapes.items()}
    fields = {"expert_count": experts, "expert_used_count": 2, "attention.key_length": 8}
    write_gguf(tmp_path / FILE, model, "qwen3moe", further=further, **fields)
    assert (load_model(Source(str(tmp_path / FILE))).model.layers[1].mlp.experts.gate_up_proj == 1).all()


# Architecture -> how its layers rotate 8 channels a head, where transformers reads it as that.
ROTATIONS: dict[str, dict[str, Any]] = {
    "qwen2": {"rope.freq_base": 1e6, "rope.dimension_count": 8},
    "gemma2": {"rope.freq_base": 1e4, "attention.key_length": 8},
    "gemma3": {"rope.freq_base": 5e5, "attention.key_length": 8},
    "gemma4": {"rope.freq_base": 1e6, "rope.dimension_count": 8, "attention.key_length": 8},
    "phi3": {"rope.freq_base": 1e4, "rope.dimension_count": 8},
    "nemotron": {"rope.freq_base": 1e4, "rope.dimension_count": 4, "attention.key_length": 8},
    "gpt2": {},
}


@pytest.mark.parametrize("architecture", ROTATIONS)
def test_rotations_that_transformers_reads(tmp_path, architecture):
    write_gguf(tmp_path / FILE, llama(), architecture, **ROTATIONS[architecture])
    config_of(Source(str(tmp_path / FILE)))


UNSAID: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Flan-T5": ("t5", {}, {"dense_act_fn": "gelu_new", "feed_forward_proj": "gated-gelu"}),
    "Gemma 2 9B": ("gemma2", {"block_count": 42, "attention.key_length": 8}, {"query_pre_attn_scalar": 256}),
    "Gemma 2 27B": ("gemma2", {"block_count": 46, "attention.key_length": 8}, {"query_pre_attn_scalar": 8}),
    "Phi-3": ("phi3", {"attention.sliding_window": 8}, {"sliding_window": 8}),
    "Phi-4": ("phi3", {"attention.sliding_window": 0}, {"sliding_window": None}),
    "Qwen 2, whose window is turned off": ("qwen2", {"attention.sliding_window": 8}, {"sliding_window": None}),
    "a window that no text exceeds": ("llama", {"attention.sliding_window": 4096}, {"model_type": "llama"}),
}


@pytest.mark.parametrize("name", UNSAID)
def test_what_transformers_does_not_read_from_the_header(tmp_path, name):
    architecture, fields, expected = UNSAID[name]
    layers = {f"blk.{layer}.ffn_norm.weight": np.ones(32, dtype=np.float32) for layer in range(2, 46)}
    write_gguf(tmp_path / FILE, llama(), architecture, further=layers, **fields)
    config = config_of(Source(str(tmp_path / FILE)))
    assert {key: getattr(config, key) for key in expected} == expected


def factors_of_llama_3(base: float, size: int, factor: float) -> list[float]:
    """As llama.cpp writes them, in ``rope_freqs.weight``, for LLaMA 3.1 (a factor of 8), 3.2 (32) and 3.3 (8)."""
    context, low, high, factors = 8192, 1, 4, []
    for channel in range(0, size, 2):
        wavelength = 2 * math.pi * base ** (channel / size)
        smooth = (context / wavelength - low) / (high - low)
        blend = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1 if wavelength < context / high else factor if wavelength > context / low else blend)
    return factors


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rotation_of_llama_3_follows_from_its_factors(tmp_path, factor):
    factors = np.array(factors_of_llama_3(5e5, 8, factor), dtype=np.float32)
    write_gguf(tmp_path / FILE, llama(), further={"rope_freqs.weight": factors}, **{"rope.freq_base": 5e5})
    model = load_model(Source(str(tmp_path / FILE)))
    parameters = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert model.config.rope_parameters == parameters
    expected = type(model)(type(model.config)(**{**model.config.to_dict(), "rope_parameters": parameters}))
    expected.load_state_dict(model.state_dict())
    ids = torch.arange(5, 105)[None] % 90
    assert torch.equal(model(ids).logits, expected.eval()(ids).logits)
    model.save_pretrained(tmp_path / "saved")
    assert load_model(Source(str(tmp_path / "saved"))).config.rope_parameters == parameters


def test_a_file_without_a_tokenizer_has_none(tmp_path):
    write_gguf(tmp_path / "bare.gguf", llama(), tokenizer=False)
    assert load_tokenizer(Source(str(tmp_path / "bare.gguf"))) is None


BYTES = ["<end>", *sorted(ByteLevel.alphabet()), "ĠĠ", "xx", "zq"]  # no merges lead to the last one
PIECES = ["<unk>", "\u2581", "a", "\u2581a"]
# Architecture, kind, tokens and fields of the header -> a text, and its tokens by the original tokenizer.
TOKENIZERS: dict[str, tuple[str, str, list[str], dict[str, Any], str, list[str]]] = {
    "LLaMA 3": ("llama", "gpt2", BYTES, {"pre": "llama-bpe", "bos_token_id": 0}, "zq", ["<end>", "zq"]),
    "LLaMA 3 that adds none": (
        "llama", "gpt2", BYTES, {"pre": "llama-bpe", "bos_token_id": 0, "add_bos_token": False}, "zq", ["zq"]
    ),
    "LLaMA 3 that has none": ("llama", "gpt2", BYTES, {"pre": "llama-bpe"}, "zq", ["zq"]),
    "SmolLM2": ("llama", "gpt2", BYTES, {"pre": "smollm"}, "z  12", ["z", "ĠĠ", "1", "2"]),
    "Qwen 2": ("qwen2", "gpt2", BYTES, {"pre": "qwen2"}, "e\u0301", ["Ã", "©"]),
    "SentencePiece": ("llama", "llama", PIECES, {"add_bos_token": False}, "a a", ["\u2581a", "\u2581a"]),
    "SentencePiece without a space before": (
        "llama", "llama", PIECES, {"add_bos_token": False, "add_space_prefix": False}, " a a", ["\u2581a", "\u2581a"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_those_of_the_original_also_once_saved(tmp_path, name):
    architecture, kind, vocabulary, fields, text, tokens = TOKENIZERS[name]
    write_tokenizer(tmp_path / FILE, architecture, kind, vocabulary, **fields)
    tokenizer = load_tokenizer(Source(str(tmp_path / FILE)))
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == tokens
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == unicodedata.normalize("NFC", text)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture}))
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer(text).input_ids


@pytest.mark.parametrize(
    ("split", "said"), [("falcon", True), (None, True), ("gpt-2", False), ("qwen2", False), ("smollm", False)]
)
def test_a_split_that_transformers_does_not_know_is_named(tmp_path, split, said):
    events: list[Event] = []
    write_tokenizer(tmp_path / FILE, "llama", "gpt2", BYTES, **({"pre": split} if split else {}))
    load_tokenizer(Source(str(tmp_path / FILE)), EventProgress(events.append))
    assert [f"is {split or 'missing'}" in event.text for event in events] == [True] * said


# -- what cannot be read ---------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def written(architecture: str = "llama", **fields: Any) -> Callable[[Path], object]:
    return lambda path: write_gguf(path, llama(), architecture, **fields)


def holding(name: str, *values: float) -> Callable[[Path], object]:
    return written(further={name: np.array(values, dtype=np.float32)})


def endless(path: Path) -> None:
    """Leaves one field, an array that claims 2^62 numbers, of which the file has none."""
    array = struct.pack("<Q1sIIQ", 1, b"a", 9, 4, 2**62)
    path.write_bytes(path.read_bytes()[:16] + struct.pack("<Q", 1) + array)


# The damage to a file, and the words that its error must contain.
DAMAGED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "cut off": (cut, ["damaged or truncated"]),
    "not GGUF": (lambda path: path.write_bytes(b"garbage" * 99), ["not a complete GGUF file"]),
    "empty": (lambda path: path.write_bytes(b""), ["not a complete GGUF file"]),
    "unknown architecture": (written("marvel"), ["transformers", "cannot read it", "marvel"]),
    "no class predicts tokens": (written("clip"), ["clip"]),
    "an endless array": (endless, ["it ends before"]),
    "a part": (written(**{"split.count": 2}), ["is one of 2 parts", "llama-gguf-split --merge"]),
    "biases": (holding("blk.1.attn_q.bias", *[0, 1] * 16), ["blk.1.attn_q.bias", "no such tensor", "safetensors"]),
    "norms of queries": (holding("blk.0.attn_q_norm.weight", *[3] * 8), ["blk.0.attn_q_norm.weight", "no such tensor"]),
    "scales of weights": (holding("blk.0.ffn_down.scale", 0.01), ["blk.0.ffn_down.scale", "safetensors"]),
    "further layers": (written(block_count=1), ["blk.1.attn_k.weight", "no such tensor"]),
    "factors of positions": (holding("rope_freqs.weight", 1, 1, 2, 8), ["rope_freqs.weight", "safetensors"]),
    "another base": (written("starcoder2", **{"rope.freq_base": 1e6}), ["rope.freq_base is 1000000.0", "10000.0"]),
    "scaling": (written(**{"rope.scaling.type": "linear"}), ["llama.rope.scaling.type is linear", "safetensors"]),
    "scaling without a type": (written(**{"rope.scaling.factor": 4.0}), ["rope.scaling.factor is 4.0"]),
    "scaling by its older name": (written(**{"rope.scale_linear": 4.0}), ["rope.scale_linear is 4.0"]),
    "another base of windows": (
        written("gemma3", **{"rope.freq_base_swa": 5e4}), ["rope.freq_base_swa is 50000.0", "10000.0"]
    ),
    "partly rotated": (written("stablelm", **{"rope.dimension_count": 4}), ["rope.dimension_count is 4", "as 2"]),
    "a window": (written(**{"attention.sliding_window": 8}), ["attention.sliding_window is 8", "reads it as 0"]),
    "FalconMamba": (
        written("mamba", **{"ssm.dt_b_c_rms": True}), ["mamba.ssm.dt_b_c_rms is True", "reads it as False"]
    ),
    "a layer is missing": (written(block_count=3), ["holds no weights for model.layers.2"]),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(file, case):
    damage, words = DAMAGED[case]
    damage(file)
    with pytest.raises(ModelError) as caught:
        load_model(Source(str(file)))
    assert "\n" not in str(caught.value)
    assert [word for word in [FILE, *words] if word not in str(caught.value)] == []


def test_names_without_a_file(tmp_path):
    for source in (Source(str(tmp_path / "no.gguf")), Source(str(tmp_path), gguf_file="no.gguf")):
        with pytest.raises(ModelError, match=r"no\.gguf"):
            load_model(source)


def test_a_file_and_a_name_inside(file):
    with pytest.raises(ModelError, match=r"\.gguf is not a folder"):
        load_model(Source(str(file), gguf_file="another.gguf"))


def test_the_package_that_reads_the_files_may_be_missing(workplace, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    workplace.refuses(workplace.compile(), f"{FILE} needs gguf", install_command("gguf"))


# -- commands --------------------------------------------------------------------------------------------------------


def test_an_output_that_holds_the_file_is_refused(workplace):
    """With --overwrite, the file would be removed with what is replaced."""
    refused = ["compile", FILE, "--output", "..", "--overwrite"]
    workplace.refuses(refused, "is, contains or is in", FILE)


def test_compile(pristine, workplace):
    words = ["compile", FILE, "--recipe", "sparsegpt", "--calibration", workplace.text, "--samples", 4]
    words += ["--sequence-length", 16, "--eval-data", workplace.text]
    result = RUNNER.invoke(app, list(map(str, words)))
    assert result.exit_code == 0, result.output
    assert f"loading {FILE}, dequantized: {WORDS}" in result.stderr
    folder = workplace.folder / "tiny.Q8_0-2of4"
    record = json.loads((folder / "permtriton.json").read_text())
    assert record["gguf"] == {"file": FILE, "tensors": {"Q8_0": 15, "F32": 5}}
    assert record["model"] == FILE
    assert record["command"].startswith(f"permtriton compile {FILE} --recipe sparsegpt")
    assert f"| weights, dequantized from GGUF | `{FILE}: {WORDS}` |" in (folder / CARD_FILE).read_text()
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    up = AutoModelForCausalLM.from_pretrained(folder).get_parameter("model.layers.0.mlp.up_proj.weight")
    assert int((up == 0).sum()) == up.numel() // 2
    result = RUNNER.invoke(
        app, ["evaluate", str(folder), "--against", FILE, "--eval-data", str(workplace.text), "--json"]
    )
    measured = json.loads(result.stdout)
    assert measured["dense_perplexity"] == pytest.approx(record["evaluation"]["dense"])
    assert measured["kl"] > 0


def test_one_command_from_blocks_to_packed_fp8(workplace):
    words = ["compile", FILE, "--recipe", "mask,round", "--importance", "magnitude", "--calibration", workplace.text]
    words += ["--samples", 4, "--sequence-length", 16, "--eval-data", "none", "--save-format", "packed-fp8"]
    result = RUNNER.invoke(app, list(map(str, [*words, "--output", "packed"])))
    assert result.exit_code == 0, result.output
    stored = load_file("packed/model.safetensors")["model.layers.0.mlp.up_proj.weight_values"]
    assert stored.dtype == torch.float8_e4m3fn
    model = AutoModelForCausalLM.from_pretrained("packed")
    assert isinstance(model.model.layers[0].mlp.up_proj, SparseLinearFp8)
    assert bool(model(torch.tensor([[1, 2, 3]])).logits.isfinite().all())


def test_weights_that_are_still_blocks_are_refused(pristine):
    model = AutoModelForCausalLM.from_pretrained(pristine, gguf_file=FILE)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ModelError, match=r"lm_head.weight is still in GGUF's blocks.*GgufConfig\(dequantize=True\)"):
        check_original(model)
