"""Models of images and sound: calibrated on tensors, compiled in both layouts, saved with their processors."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageClassification, AutoProcessor, PvtConfig, PvtModel

import permtriton
from permtriton import NMPattern, config_from
from permtriton.data.calibration import calibration_samples
from permtriton.data.held_out import read_held_out
from permtriton.data.media import stored_samples
from permtriton.data.samples import Samples
from permtriton.driver.pipeline import compile_model
from permtriton.errors import CalibrationError, ConfigError, ModelError
from permtriton.evaluation.evaluate import measure_model
from permtriton.model.forward import last_hidden_state
from permtriton.passes.trace import trace

from . import media, zoo
from .zoo import find_plan

PREPROCESSOR = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
OPTIONS = {"importance": "wanda"}


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """A folder of a ViT with its image processor."""
    folder = tmp_path_factory.mktemp("models") / "vit"
    media.build("vit").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


# -- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", media.MODELS)
@torch.no_grad()
@pytest.mark.slow(but=["vit", "whisper"])
def test_channels_move_and_outputs_stay(name):
    model, given = media.build(name), media.inputs(name)
    plan = find_plan(model, NMPattern(2, 4))
    free = [site for site in plan.sites if not site.space.frozen]
    moving = {len(site.linears) for site in free} - {1}
    assert moving == ({3} if name in ("vit", "whisper") else set()), "the streams of the others keep their order"
    assert sum(site.layer == 0 for site in free) >= 2, "attention output and down projection"
    before = [value for value in model(**given).to_tuple() if isinstance(value, torch.Tensor)]
    zoo.fold(model, plan, zoo.random_indices(plan))
    after = [value for value in model(**given).to_tuple() if isinstance(value, torch.Tensor)]
    assert zoo.difference(before, after) < 1e-4


@pytest.mark.parametrize(
    ("name", "layout"), [("vit", "fused"), ("wav2vec2", "portable"), ("whisper", "fused"), ("dinov3", "fused")]
)
@pytest.mark.slow(but=["vit-fused", "dinov3-fused"])
def test_compiled_from_a_dict_of_inputs(name, layout):
    """The held-out measure is the cosine of the hidden states, computed here from a second model."""
    config = config_from({**OPTIONS, "layout": layout}, "heuristic,sparsegpt")
    held_out = {key: tensor.flip(0) for key, tensor in media.inputs(name).items()}
    dense, model = media.build(name), media.build(name)
    compiled = compile_model(model, None, config, ids=media.inputs(name), held_out=held_out)
    found = compiled.report["evaluation"]
    order = compiled.plan.hidden_order(compiled.indices)
    expected, got = (last_hidden_state(each, Samples.of(held_out)) for each in (dense, model))
    assert found["measure"] == "cosine"
    cosine = torch.cosine_similarity(got, expected if order is None else expected[..., order], dim=-1).mean()
    assert found["compiled"] == pytest.approx(float(cosine), abs=1e-5)
    assert found["compiled"] > 0.5
    assert measure_model(model, held_out=held_out, dense=dense, hidden_order=order).cosine == pytest.approx(
        float(cosine)
    )
    assert compiled.report["calibration"]["shape"] == [6, expected.shape[1]]


@pytest.mark.parametrize("name", ["dinov2", "dinov3", "whisper"])
def test_the_trace_ends_at_the_last_hidden_state(name):
    model, given = media.build(name), media.inputs(name)
    graph_module, _ = trace(model, Samples.of(given)[:1])
    found = graph_module(*Samples.of(given)[:1].inputs.values())[-1]
    torch.testing.assert_close(found, last_hidden_state(model, Samples.of(given)[:1]), rtol=1e-4, atol=1e-5)


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "images.safetensors"
    save_file(media.inputs("vit"), file)
    return file


def test_a_file_of_images_from_end_to_end(vit, images, tmp_path):
    from permtriton.cli import main

    output = tmp_path / "out"
    arguments = ["compile", str(vit), "--calibration", str(images), "--samples", "4", "--recipe", "heuristic,mask",
                 "--eval-data", str(images), "--output", str(output), "--device", "cpu"]  # fmt: skip
    main.app(arguments, standalone_mode=False)
    report = json.loads((output / "permtriton.json").read_text())
    assert report["evaluation"]["text"] == str(images)
    assert report["calibration"]["shape"] == [4, 5]
    assert AutoProcessor.from_pretrained(output).size == {"height": 16, "width": 16}
    weight = AutoModelForImageClassification.from_pretrained(output).get_parameter("vit.layers.0.mlp.fc2.weight")
    assert ((weight.unflatten(1, (-1, 4)) != 0).sum(-1) == 2).all()
    assert "AutoModelForImageClassification" in (output / "README.md").read_text()


def test_a_length_of_images_is_refused(vit, images):
    with pytest.raises(ConfigError, match=r"`sequence_length=64` has no effect on a ViT\w+, which reads no text"):
        permtriton.compile(str(vit), data=str(images), samples=4, sequence_length=64, recipe="mask")


def test_a_model_whose_config_counts_no_layers_is_compared(tmp_path, monkeypatch):
    """Such a model of images says its ``depths``, stage by stage."""
    monkeypatch.chdir(tmp_path)
    stages = {"num_encoder_blocks": 1, "depths": [1], "hidden_sizes": [16], "num_attention_heads": [2]}
    per_stage = {"sequence_reduction_ratios": [1], "patch_sizes": [8], "strides": [8], "mlp_ratios": [2]}
    PvtModel(PvtConfig(image_size=16, **stages, **per_stage)).save_pretrained("pvt")
    save_file({"pixel_values": torch.randn(6, 3, 16, 16)}, "images.safetensors")
    texts = {"calibration": "images.safetensors", "samples": 6, "eval_data": "images.safetensors"}
    found = permtriton.compare("pvt", methods="magnitude", **texts)
    assert [row["method"] for row in found["rows"]] == ["dense", "magnitude"]


# -- sources -------------------------------------------------------------------------------------------------------


def test_stored_tensors(tmp_path):
    file = tmp_path / "inputs.safetensors"
    save_file(media.inputs("vit"), file)
    found = stored_samples(str(file), media.build("vit"))
    assert torch.equal(found.inputs["pixel_values"], media.inputs("vit")["pixel_values"])
    ids = zoo.token_ids(6, 8)
    save_file({"input_ids": ids}, file)
    config = config_from({"calibration": str(file), "samples": 4}, "mask")
    compiled = compile_model(zoo.build("bert"), None, config)
    assert compiled.report["calibration"]["shape"] == [4, 8]


def test_the_draw_follows_the_seed(images):
    model = media.build("vit")

    def draw(seed, samples=4):
        config = config_from({"calibration": str(images), "samples": samples, "seed": seed})
        return calibration_samples(config, None, model)[0]

    assert draw(0).sha256 == draw(0).sha256 != draw(1).sha256
    with pytest.raises(CalibrationError, match=r"holds 6 samples, but 7 are needed: lower `samples=`"):
        draw(0, 7)


@pytest.mark.parametrize(
    ("source", "words"), [("c4", "give a .safetensors file with pixel_values"), ("no.safetensors", "cannot be read")]
)
def test_sources_that_cannot_be_used(source, words):
    with pytest.raises(CalibrationError, match=words):
        stored_samples(source, media.build("vit"))


WRONG_INPUTS = {
    "not finite": ({"pixel_values": torch.full((4, 3, 16, 16), torch.nan)}, "3072 of 3072 values are NaN"),
    "too few dimensions": ({"pixel_values": torch.zeros(4, 16, 16)}, r"does not run on samples of .*\[4, 16, 16\]"),
    "another size": ({"pixel_values": torch.zeros(4, 3, 24, 24)}, "does not run on samples"),
    "labels": ({"pixel_values": torch.zeros(4, 3, 16, 16), "labels": torch.zeros(4)}, "labels is no argument"),
}


@pytest.mark.parametrize("case", WRONG_INPUTS)
def test_inputs_that_the_model_cannot_read(case):
    inputs, message = WRONG_INPUTS[case]
    with pytest.raises(CalibrationError, match=message):
        compile_model(media.build("vit"), None, config_from({"samples": 4}), ids=inputs)


@pytest.mark.parametrize("name", ["opt", "kosmos2"])
@pytest.mark.slow
def test_images_and_token_ids_together(name):
    model = media.image_and_text(name)
    inputs = media.image_and_text_inputs(name)
    with pytest.raises(ModelError, match=r"runs on pixel_values alone, or on a mapping"):
        compile_model(model, config=config_from(OPTIONS), ids=inputs["input_ids"])
    compile_model(model, config=config_from(OPTIONS), ids=inputs)


@pytest.mark.slow
def test_an_encoder_decoder_inside_of_a_model_writes_no_text():
    model, inputs = media.image_and_text("t5"), media.image_and_text_inputs("t5")
    with pytest.raises(CalibrationError, match="input_ids, pixel_values alone: give labels or decoder_input_ids"):
        compile_model(model, ids=inputs)
    config = config_from({"importance": "magnitude"}, "mask")
    compile_model(model, config=config, ids={**inputs, "labels": inputs["input_ids"]})


def test_a_model_with_two_towers_is_refused():
    from transformers import CLIPConfig, CLIPModel

    vision, text = {**media.SIZES, **media.PIXELS}, {**media.SIZES, "vocab_size": 20}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision))
    inputs = {"input_ids": zoo.token_ids(4, 4) % 20, "pixel_values": torch.zeros(4, 3, 8, 8)}
    config = config_from({}, "mask")
    for refused in (
        lambda: read_held_out("clip", "images", None, model),
        lambda: find_plan(model, NMPattern(2, 4)),
        lambda: compile_model(model, None, config, ids=inputs),
    ):
        with pytest.raises(
            ModelError, match=r"save one as a model of its own, as by model\.text_model\.save_pretrained"
        ):
            refused()
