"""Models of images and sound: calibrated on folders, compiled in both layouts, saved with their processors."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForImageClassification,
    AutoProcessor,
    PvtConfig,
    PvtModel,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor

import permtriton
from permtriton import NMPattern, config_from, find_plan
from permtriton.data.held_out import held_out_windows
from permtriton.data.media import media_samples
from permtriton.data.samples import Samples
from permtriton.driver.pipeline import compile_model
from permtriton.errors import CalibrationError, ConfigError, MissingExtraError, ModelError
from permtriton.evaluation.measure import measure_model
from permtriton.model.forward import last_hidden_state
from permtriton.model.source import Source
from permtriton.passes.trace import trace

from . import media, zoo

PREPROCESSOR = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
OPTIONS = {"importance": "wanda"}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return media.image_folder(tmp_path_factory.mktemp("data") / "images")


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
    compiled = compile_model(model, None, config, ids=media.inputs(name), evaluation_windows=held_out)
    found = compiled.report["evaluation"]
    order = compiled.plan.hidden_order(compiled.indices)
    expected, got = (last_hidden_state(each, Samples.of(held_out)) for each in (dense, model))
    assert found["measure"] == "cosine"
    cosine = torch.cosine_similarity(got, expected if order is None else expected[..., order], dim=-1).mean()
    assert found["compiled"] == pytest.approx(float(cosine), abs=1e-5)
    assert found["compiled"] > 0.5
    assert measure_model(model, windows=held_out, dense=dense, hidden_order=order).cosine == pytest.approx(
        float(cosine)
    )
    assert compiled.report["calibration"]["shape"] == [6, expected.shape[1]]


@pytest.mark.parametrize("name", ["dinov2", "dinov3", "whisper"])
def test_the_trace_ends_at_the_last_hidden_state(name):
    model, given = media.build(name), media.inputs(name)
    traced = trace(model, Samples.of(given)[:1])
    found = traced.graph_module(*Samples.of(given)[:1].inputs.values())[traced.hidden]
    torch.testing.assert_close(found, last_hidden_state(model, Samples.of(given)[:1]), rtol=1e-4, atol=1e-5)


# -- the command ---------------------------------------------------------------------------------------------------


def test_a_folder_of_images_from_end_to_end(vit, images, tmp_path, monkeypatch):
    from permtriton.cli import main

    output = tmp_path / "out"
    arguments = ["compile", str(vit), "--calibration", str(images), "--samples", "4", "--recipe", "heuristic,mask",
                 "--eval-data", str(images), "--output", str(output), "--device", "cpu"]  # fmt: skip
    main.app(arguments, standalone_mode=False)
    report = json.loads((output / "permtriton.json").read_text())
    assert report["evaluation"]["text"] == str(images)
    assert report["calibration"]["shape"] == [4, 5]
    processor = AutoProcessor.from_pretrained(output)
    model = AutoModelForImageClassification.from_pretrained(output)
    samples = media_samples(str(images), model, processor, 2)
    weight = model.get_parameter("vit.layers.0.mlp.fc2.weight")
    assert ((weight.unflatten(1, (-1, 4)) != 0).sum(-1) == 2).all()
    dense = media_samples(str(images), model, AutoImageProcessor.from_pretrained(vit), 2)
    assert torch.equal(samples.inputs["pixel_values"], dense.inputs["pixel_values"])
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


def test_inspect_reads_only_the_config(vit, capsys, tmp_path):
    from permtriton.cli import main

    (tmp_path / "config.json").write_bytes((vit / "config.json").read_bytes())
    main.app(["inspect", str(tmp_path), "--json"], standalone_mode=False)
    assert "vit.layers.0.mlp.fc2" in {site["name"] for site in json.loads(capsys.readouterr().out)["sites"]}


# -- sources -------------------------------------------------------------------------------------------------------


def processor_of(folder):
    return AutoImageProcessor.from_pretrained(folder)


def test_the_draw_follows_the_seed(vit, images):
    model, processor = media.build("vit"), processor_of(vit)

    def draw(seed):
        return media_samples(str(images), model, processor, 4, torch.Generator().manual_seed(seed))

    assert draw(0).sha256 == draw(0).sha256 != draw(1).sha256
    assert len(media_samples(str(images), model, processor, None)) == 6, "text files do not count"


@pytest.mark.parametrize("rate", [16000, 8000, 22050])
@pytest.mark.parametrize("kind", ["int16", "int32", "uint8", "float32"])
def test_sounds_of_any_kind_are_the_same_sound(tmp_path, rate, kind):
    media.write_sound(tmp_path / "a.wav", rate, kind)
    extractor = Wav2Vec2FeatureExtractor(do_normalize=False)
    found = media_samples(str(tmp_path), media.build("wav2vec2"), extractor, 1).inputs["input_values"][0]
    assert found.shape == (8000,)
    time = torch.arange(8000) / 16000
    assert (found - 0.5 * torch.sin(2 * torch.pi * 440 * time))[500:-500].abs().max() < 0.02


def test_sounds_are_cut_to_the_shortest_unless_the_extractor_pads(tmp_path):
    for number, seconds in enumerate((0.5, 0.25, 0.3)):
        media.write_sound(tmp_path / f"{number}.wav", 16000, seconds=seconds)
    found = media_samples(str(tmp_path), media.build("wav2vec2"), Wav2Vec2FeatureExtractor(), None)
    assert {name: tuple(tensor.shape) for name, tensor in found.inputs.items()} == {"input_values": (3, 4000)}
    padded = media_samples(
        str(tmp_path), media.build("whisper"), WhisperFeatureExtractor(feature_size=8, chunk_length=1), None
    )
    assert {name: tuple(tensor.shape) for name, tensor in padded.inputs.items()} == {"input_features": (3, 8, 100)}


def test_stored_tensors(tmp_path):
    file = tmp_path / "inputs.safetensors"
    save_file(media.inputs("vit"), file)
    found = media_samples(str(file), media.build("vit"), None, None)
    assert torch.equal(found.inputs["pixel_values"], media.inputs("vit")["pixel_values"])
    ids = zoo.token_ids(6, 8)
    save_file({"input_ids": ids}, file)
    config = config_from({"calibration": str(file), "samples": 4}, "mask")
    compiled = compile_model(zoo.build("bert"), None, config)
    assert compiled.report["calibration"]["shape"] == [4, 8]


def broken(folder):
    (folder / "b.png").write_text("no image")


def sounds(folder):
    media.write_sound(folder / "a.wav", 16000)


SOURCES = {
    "empty": (lambda folder: None, {}, ["holds no images", ".png"]),
    "only sound": (sounds, {}, ["holds no images", "end in .wav", "Convert"]),
    "not readable": (broken, {}, ["b.png", "cannot be read"]),
    "too few": (lambda folder: media.image_folder(folder / "more", 3), {"count": 4}, ["holds 3 samples", "`samples=`"]),
    "no processor": (lambda folder: media.image_folder(folder / "more", 3), {"processor": None}, ["no processor"]),
    "mixed sizes": (lambda folder: media.image_folder(folder / "more", 3), {"resize": False}, ["shape", "one size"]),
}


@pytest.mark.parametrize("case", SOURCES)
def test_folders_that_cannot_be_used(case, vit, tmp_path):
    prepare, options, words = SOURCES[case]
    prepare(tmp_path)
    processor = options.get("processor", processor_of(vit))
    if processor is not None:
        processor.do_resize = options.get("resize", True)
    with pytest.raises(CalibrationError) as caught:
        media_samples(str(tmp_path), media.build("vit"), processor, options.get("count"))
    assert all(word in str(caught.value) for word in words), caught.value


def test_other_sources_and_files_that_cannot_be_used(vit, images, tmp_path, monkeypatch):
    model = media.build("vit")
    for source, word in (("c4", "c4 is no folder"), (str(tmp_path / "no.safetensors"), "cannot be read")):
        with pytest.raises(CalibrationError, match=word):
            media_samples(source, model, processor_of(vit), None)
    (tmp_path / "a.wav").write_text("no sound")
    with pytest.raises(CalibrationError, match=r"a\.wav cannot be read"):
        media_samples(str(tmp_path), media.build("wav2vec2"), Wav2Vec2FeatureExtractor(), None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"an image, needs PIL, which is not installed: pip install .*\[data\]"):
        media_samples(str(images), model, processor_of(vit), None)


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


def test_a_sampling_rate_that_no_filter_can_change_is_refused(tmp_path):
    media.write_sound(tmp_path / "a.wav", 100_000_007, seconds=0.00001)
    with pytest.raises(CalibrationError, match="its sampling rate is 100000007"):
        media_samples(str(tmp_path), media.build("wav2vec2"), Wav2Vec2FeatureExtractor(), None)


@pytest.mark.parametrize("name", ["opt", "kosmos2"])
@pytest.mark.slow
def test_images_and_token_ids_together(name):
    model = media.image_and_text(name)
    inputs = media.image_and_text_inputs(name)
    with pytest.raises(ModelError, match=r"does not run by itself on pixel_values .* mapping of input_ids and pix"):
        compile_model(model, config=config_from(OPTIONS), ids=inputs["input_ids"])
    compile_model(model, config=config_from(OPTIONS), ids=inputs)


@pytest.mark.slow
def test_an_encoder_decoder_inside_of_a_model_writes_no_text():
    model, inputs = media.image_and_text("t5"), media.image_and_text_inputs("t5")
    with pytest.raises(CalibrationError, match="give decoder_input_ids or labels beside input_ids, pixel_values"):
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
        lambda: held_out_windows(Source("clip"), "images", None, model),
        lambda: find_plan(model, NMPattern(2, 4)),
        lambda: compile_model(model, None, config, ids=inputs),
    ):
        with pytest.raises(
            ModelError, match=r"save one as a model of its own, as by model\.text_model\.save_pretrained"
        ):
            refused()
