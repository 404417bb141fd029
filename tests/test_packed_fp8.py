"""Format packed-fp8: the numbers of format fp8 in 5 bits per weight, or an error."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import permtriton
from permtriton import demo
from permtriton.checkpoint.export import export
from permtriton.cli.main import app
from permtriton.errors import ModelError
from permtriton.model.modules import SparseLinearFp8

from . import folders
from .desk import RUNNER
from .folders import LAST_UP, WEIGHTS, load

IDS = torch.arange(3, 27).view(2, 12)
SHAPE = 112, 64  # of LAST_UP


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return folders.places(tmp_path_factory.mktemp("packed-fp8"))


@pytest.fixture(scope="module")
def written(place) -> Path:
    return place("llama", "packed-fp8")


def linears(model) -> dict[str, SparseLinearFp8]:
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLinearFp8)}


# -- the same numbers ----------------------------------------------------------------------------------------------


def test_five_bits_per_weight_and_a_scale_per_row(written):
    stored, record = load_file(written / WEIGHTS), json.loads((written / "permtriton.json").read_text())["export"]
    parts = {part: stored[f"{LAST_UP}_{part}"] for part in ("values", "positions", "scale")}
    assert {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in parts.items()} == {
        "values": (torch.float8_e4m3fn, (112, 32)),
        "positions": (torch.uint8, (112, 8)),
        "scale": (torch.float32, (112,)),
    }
    rows = sum(stored[f"{name}_scale"].numel() for name in folders.pruned_weights(folders.model_of("llama")))
    assert record["stored_bytes"] == record["dense_bytes"] * 5 // 16 + 4 * rows
    assert (record["format"], record["quantized"], record["weights"]) == ("packed-fp8", 14, 14)
    config = json.loads((written / "config.json").read_text())["quantization_config"]
    assert config["format"] == "packed-fp8"
    assert config["packed"][LAST_UP] == {"shape": [112, 64], "dim": 1, "values": "float8_e4m3fn"}
    card = (written / "README.md").read_text()
    assert "N:M still in 8 bits" in card
    assert "its weights are packed" in card


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_computes_what_the_fp8_folder_computes(place, dtype):
    """Of weights in any dtype, in float32: in 16 bits, transformers also rounds scales and products of the other."""
    ours, theirs, dense = (
        load(place("llama", format, dtype=dtype), dtype=torch.float32) for format in ("packed-fp8", "fp8", "saved")
    )
    assert len(linears(ours)) == 14
    with torch.no_grad():
        found, expected, exact = (model(IDS).logits for model in (ours, theirs, dense))
    assert (found - expected).norm() < 1e-3 * (expected - exact).norm()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(IDS, **options), theirs.generate(IDS, **options))


def test_a_fused_model_gathers_and_permutes(place):
    model, dense = load(place("llama", "packed-fp8", fused=True)), load(place("llama", "saved", fused=True))
    with torch.no_grad():
        difference = (model(IDS).logits - dense(IDS).logits).norm() / dense(IDS).logits.norm()
    assert 0 < difference < 0.3
    assert any(linear.gather is not None for linear in linears(model).values())


@pytest.mark.parametrize(("name", "in_fp8"), [("mixtral", 8), ("gpt2", 0), ("llama_tied", 14)])
def test_what_is_no_linear_is_packed_in_16_bits(place, name, in_fp8):
    """Stacks of experts and transposed weights; they load as from a packed folder."""
    model, packed = load(place(name, "packed-fp8")), load(place(name, "packed"))
    assert len(linears(model)) == in_fp8
    ours, theirs = folders.state(model), folders.state(packed)
    same = [name for name in theirs if name.rpartition(".")[0] not in linears(model)]
    assert folders.differing({key: ours[key] for key in same}, {key: theirs[key] for key in same}) == []


# -- in memory -----------------------------------------------------------------------------------------------------


def test_a_cast_changes_no_weight_and_it_is_saved_as_it_was(written, tmp_path):
    model = load(written)
    before = load_file(written / WEIGHTS)
    model.float().half().bfloat16()
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert model(IDS).logits.dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    after = load_file(tmp_path / WEIGHTS)
    assert folders.differing(before, {**after, "lm_head.weight": before["lm_head.weight"]}) == []  # which was cast
    again = load(tmp_path)
    again.load_state_dict(model.state_dict())
    assert folders.differing(folders.state(model), folders.state(again)) == []


def test_a_linear_unpacks_to_the_dequantized_weight_and_packs_again(written):
    linear = load(written).get_submodule(LAST_UP.removesuffix(".weight"))
    packed = linear.weight_values.float(), linear.weight_scale
    weight = linear.unpack().weight
    assert (weight.dtype, tuple(weight.shape)) == (torch.bfloat16, SHAPE)
    kept = (packed[0] * packed[1].unsqueeze(1)).bfloat16()
    torch.testing.assert_close(weight[weight != 0], kept[kept != 0], rtol=0, atol=0)
    ones = torch.ones(1, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(linear(ones), linear.pack(permtriton.NMPattern(2, 4))(ones), rtol=0.1, atol=0.1)
    with pytest.raises(ModelError, match="packed at 2:4 already"):
        linear.pack(permtriton.NMPattern(2, 4))


def test_what_needs_other_weights_refuses_it(written, tmp_path):
    for format in ("packed", "fp8", "dense"):
        with pytest.raises(ModelError, match="quantized already"):
            export(written, tmp_path / "out", format)
    with pytest.raises(permtriton.PermTritonError, match="already been compiled"):
        permtriton.compile(str(written), recipe="mask")
    model = AutoModelForCausalLM.from_pretrained(written)
    with pytest.raises(permtriton.PermTritonError, match="does not have the N:M weight"):
        permtriton.keep_pattern(model)
    assert not model.hf_quantizer.is_trainable
    assert not (tmp_path / "out").exists()


def test_it_is_measured_reported_and_read(place, tmp_path):
    model = folders.model_of("llama", dtype=torch.bfloat16, vocab_size=2048)
    folders.save(model, tmp_path / "saved")
    AutoTokenizer.from_pretrained(demo.FOLDER).save_pretrained(tmp_path / "saved")
    for format in ("fp8", "packed-fp8"):
        export(tmp_path / "saved", tmp_path / format, format)
    texts = [(demo.FOLDER / "heldout.txt").read_text(encoding="utf-8")[:2000]]
    found = [
        permtriton.evaluate(tmp_path / format, texts, dtype="float32").perplexity for format in ("fp8", "packed-fp8")
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    page = permtriton.report([tmp_path / "saved", tmp_path / "packed-fp8"], tmp_path / "page.html").read_text()
    assert "measured before it was stored in 8 bits" in page


def test_the_command_says_how_weights_were_rounded(place, tmp_path):
    command = ["export", str(place("llama", "saved")), "--format", "packed-fp8", "--output", str(tmp_path / "out")]
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "14, each weight alone" in result.stdout
    assert "make up for each other's errors" in " ".join(result.output.replace("│", "").split())


# -- or an error ---------------------------------------------------------------------------------------------------


def tensors(change):
    return lambda folder: folders.rewrite(folder, change)


def entry(change):
    def apply(folder: Path) -> None:
        folders.rewrite(folder, lambda _: None)
        folders.edit_json(folder / folders.CONFIG, lambda config: change(config["quantization_config"]["packed"]))

    return apply


def scale(value):
    return tensors(lambda t: t.update({f"{LAST_UP}_scale": value}))


DAMAGE = {
    "no scale": (tensors(lambda t: t.pop(f"{LAST_UP}_scale")), [LAST_UP, "_scale is missing, expected F32 [112]"]),
    "a scale of another shape": (scale(torch.ones(111)), [LAST_UP, "F32 [111], expected F32 [112]"]),
    "values in 16 bits": (
        tensors(lambda t: t.update({f"{LAST_UP}_values": t[f"{LAST_UP}_values"].half()})),
        [LAST_UP, "F16", "expected F8_E4M3"],
    ),
    "not listed as FP8": (entry(lambda packed: packed[LAST_UP].pop("values")), [LAST_UP, "F8_E4M3"]),
    "no values": (tensors(lambda t: t.pop(f"{LAST_UP}_values")), [LAST_UP, "incomplete"]),
    "another type listed": (entry(lambda packed: packed[LAST_UP].update(values="int8")), ["values", "damaged"]),
    "another dimension": (entry(lambda packed: packed[LAST_UP].update(dim=0)), [LAST_UP, "the input dimension 0"]),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_gives_no_model(written, tmp_path, case):
    damage, words = DAMAGE[case]
    folder = shutil.copytree(written, tmp_path / "copy")
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


def test_a_changed_byte_is_found_by_its_hash(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "copy")
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(ModelError, match="SHA-256"):
        load(folder)
