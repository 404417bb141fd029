"""Encoder-decoders: what each half reads, and the whole pipeline on T5, BART and Whisper."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartForSequenceClassification,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
    T5Model,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from permtriton import NMPattern, config_from
from permtriton.arguments import CompileArgs
from permtriton.data.check_samples import check_samples
from permtriton.driver.job import Job
from permtriton.driver.memory_forecast import Devices
from permtriton.driver.pipeline import compile_model
from permtriton.errors import CalibrationError
from permtriton.evaluation.evaluate import measure_model
from permtriton.methods.measure.losses import Head, has_head
from permtriton.model.forward import last_hidden_state, max_tokens
from permtriton.model.seq2seq import arguments_of
from permtriton.passes.plan import Destination
from permtriton.util.progress import NoProgress

from .zoo import VOCABULARY, find_plan, randomize, token_ids

T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
WHISPER = {
    **BART, "num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": 16, "decoder_start_token_id": 3,
    "begin_suppress_tokens": None,
}  # fmt: skip
MODELS = {
    "t5": lambda: T5ForConditionalGeneration._from_config(T5Config(**T5)),
    "bart": lambda: BartForConditionalGeneration._from_config(BartConfig(**BART)),
    "whisper": lambda: WhisperForConditionalGeneration._from_config(WhisperConfig(**WHISPER)),
}
IDS = token_ids(6, 16)


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[name]()
    randomize(model)
    return model.eval()


def inputs_of(name: str):
    if name != "whisper":
        return IDS
    return {"input_features": torch.randn(6, 4, 12, generator=torch.Generator().manual_seed(0)), "labels": IDS[:, :8]}


@pytest.mark.parametrize(
    ("name", "layout", "pruning"),
    [("t5", "portable", "sparsegpt"), ("bart", "fused", "mask"), ("whisper", "portable", "mask")],
)
@pytest.mark.slow
def test_compiled_saved_and_generating(name, layout, pruning, tmp_path):
    model = build(name)
    compiled = compile_model(
        model,
        None,
        config_from({"layout": layout, "importance": "wanda"}, f"heuristic,{pruning}"),
        ids=inputs_of(name),
        held_out=None if name == "whisper" else IDS,
    )
    assert not any(space.frozen for space in compiled.plan.spaces)
    assert len(list(compiled.plan.linears())) == 2 * 6 + 2 * 10
    assert compiled.report["proof"]["lowered_graph"] == "same outputs"
    reloaded = type(model).from_pretrained(compiled.save_pretrained(tmp_path / "out")).eval()
    inputs = compiled.reference.inputs
    with torch.no_grad():
        torch.testing.assert_close(reloaded(**inputs)[0], model(**inputs)[0], rtol=0, atol=0)
    encoded = {key: tensor for key, tensor in inputs.items() if not key.startswith("decoder")}
    written = [
        each.generate(**encoded, max_new_tokens=4, do_sample=False, use_cache=cache).tolist()
        for each, cache in ((model, True), (model, False), (reloaded, True))
    ]
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize(("name", "layout"), [("bart", "portable"), ("t5", "fused")])
@pytest.mark.slow
def test_the_encoders_state_is_read_by_one_site_of_all_decoder_layers(name, layout):
    plan = find_plan(build(name), NMPattern(2, 4), layout=layout)
    (cross,) = [site for site in plan.sites if len(site.layer_paths) > 1]
    assert len(cross.linears) == 4
    assert cross.space.placement is (Destination.FOLDED if layout == "portable" else Destination.IN_NORM)
    layers = plan.layers()
    assert [len({path for site in layer for path in site.layer_paths}) for layer in layers] == [1, 1, 2, 1, 1]
    assert layers[2] == [cross]


@pytest.mark.slow
def test_a_headless_model_keeps_the_order_of_both_states():
    model = T5Model._from_config(T5Config(**T5))
    randomize(model.eval())
    plan = find_plan(model, NMPattern(2, 4))
    assert [space.name for space in plan.spaces if space.frozen] == ["stream"]
    assert last_hidden_state(model, check_samples(model, IDS)).shape == (6, 8, 32)


@pytest.mark.slow
def test_t5_in_float16_keeps_its_float32_weights(tmp_path):
    """The output of ``wo`` makes the stream float32; the norms go back to float16."""
    torch.manual_seed(0)
    T5EncoderModel._from_config(T5Config(**T5)).save_pretrained(tmp_path / "dense")
    model = T5EncoderModel.from_pretrained(tmp_path / "dense", dtype=torch.float16).eval()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16, torch.float32}
    config = config_from({"layout": "fused"}, "heuristic,mask")
    compiled = compile_model(model, None, config, ids=IDS)
    assert Destination.IN_NORM in {space.placement for space in compiled.plan.spaces}


# -- what each half reads ----------------------------------------------------------------------------------------------


def test_a_text_is_cut_in_the_middle_and_labels_are_shifted():
    model = build("t5")
    arguments = arguments_of(model, {"input_ids": IDS[:, :7]})
    assert torch.equal(arguments["input_ids"], IDS[:, :3])
    assert torch.equal(
        arguments["decoder_input_ids"], torch.cat([torch.zeros(6, 1, dtype=torch.int64), IDS[:, 3:6]], 1)
    )
    labels = IDS[:, 3:7]
    assert torch.equal(arguments_of(model, {"input_ids": IDS, "labels": labels})["input_ids"], IDS)
    given = {"input_ids": IDS, "decoder_input_ids": labels}
    assert arguments_of(model, given) == given
    with pytest.raises(CalibrationError, match="at least 2"):
        arguments_of(model, {"input_ids": IDS[:, :1]})
    with pytest.raises(CalibrationError, match=r"labels alone.*add input_ids"):
        arguments_of(model, {"labels": labels})
    with pytest.raises(CalibrationError, match=r"input_features alone: give labels or decoder_input_ids"):
        arguments_of(build("whisper"), {"input_features": torch.randn(2, 4, 12)})
    model.config.decoder_start_token_id = None  # T5's own shift needs one
    assert "decoder_input_ids" in arguments_of(model, {"input_ids": IDS, "labels": labels})


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_perplexity_is_that_of_the_decoders_half(name):
    model = build(name)
    with torch.no_grad():
        expected = model(input_ids=IDS[:, :8], labels=IDS[:, 8:].contiguous()).loss
    assert measure_model(model, held_out=IDS).perplexity == pytest.approx(float(expected.exp()), rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_head_follows_from_the_last_hidden_state(name):
    model = build(name)
    assert has_head(model)
    samples = check_samples(model, inputs_of(name))
    with torch.no_grad():
        hidden = last_hidden_state(model, samples)
        torch.testing.assert_close(Head(model, samples)(hidden), model(**samples.inputs).logits)


def test_sequences_may_fill_both_halves():
    assert max_tokens(build("bart")) == 32
    with pytest.raises(CalibrationError, match="32 positions"):
        check_samples(build("bart"), token_ids(2, 33))


# -- classifiers, whose decoder reads the encoder's tokens again -------------------------------------------------------

CLASSIFIERS = {
    "bart": lambda: BartForSequenceClassification._from_config(BartConfig(**BART)),
    "t5": lambda: T5ForSequenceClassification._from_config(T5Config(**{**T5, "eos_token_id": 2})),
}


def classifier_and_ids(name: str, tokens: int = 16) -> tuple[PreTrainedModel, torch.Tensor]:
    torch.manual_seed(0)
    model, ids = CLASSIFIERS[name](), token_ids(6, tokens)
    randomize(model)
    ids[:, -1] = 2
    return model.eval(), ids


@pytest.mark.parametrize(("name", "tokens"), [("bart", 16), ("t5", 80)])
@pytest.mark.slow
def test_a_classifier_is_compiled(name, tokens, tmp_path):
    """Its head reads the decoder's state at the end token, which stands behind what a proof takes of a long sample."""
    model, ids = classifier_and_ids(name, tokens)
    compiled = compile_model(model, None, config_from({"importance": "wanda"}, "heuristic,mask"), ids=ids)
    assert len(list(compiled.plan.linears())) == 2 * 6 + 2 * 10
    assert compiled.report["proof"]["lowered_graph"] == "same outputs"
    assert compiled.report["calibration"]["shape"] == [6, tokens]
    reloaded = type(model).from_pretrained(compiled.save_pretrained(tmp_path / "out")).eval()
    with torch.no_grad():
        torch.testing.assert_close(reloaded(ids)[0], model(ids)[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifiers_decoder_reads_what_it_reads_without_our_help(name):
    model, ids = classifier_and_ids(name)
    with torch.no_grad():
        assert torch.equal(model(ids)[0], model(**check_samples(model, ids).inputs)[0])


def test_a_classifier_takes_whole_sequences_that_end():
    model, ids = classifier_and_ids("bart")
    assert max_tokens(model) == 16
    with pytest.raises(CalibrationError, match="use `sequence_length=16` or less"):
        check_samples(model, token_ids(2, 17))
    ids[2, -2:] = torch.tensor([2, 5])  # a language may follow
    ids[4:, -1] = 5
    with pytest.raises(CalibrationError, match=r"2 of 6 sequences do not end with the end token \(eos_token_id=2\)"):
        compile_model(model, None, config_from({}, "mask"), ids=ids)


def test_a_classifier_refuses_labels_and_a_config_without_an_end_token():
    model, ids = classifier_and_ids("bart")
    with pytest.raises(CalibrationError, match="labels is no argument of BartModel"):
        check_samples(model, {"input_ids": ids, "labels": torch.zeros(6, 1, dtype=torch.int64)})
    model.config.eos_token_id = None
    with pytest.raises(CalibrationError, match="eos_token_id is None in the config of this BartForSequence"):
        compile_model(model, None, config_from({}, "mask"), ids=ids)


def test_a_classifier_is_planned_for_other_devices_without_text():
    model, _ = classifier_and_ids("bart")
    job = Job(model, config_from({}, "mask"), (), CompileArgs())
    assert job.dry_run(NoProgress(), Devices("cuda", 1, 2**30)).plan.sites
