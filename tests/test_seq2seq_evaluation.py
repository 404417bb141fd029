"""Encoder-decoders are measured on what their decoder predicts, whatever the samples are."""

import pytest
import torch

from permtriton.data.check_samples import check_samples
from permtriton.data.held_out import prepared
from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError, ConfigError
from permtriton.evaluation.evaluate import measure_model
from permtriton.evaluation.measures import HeldOutMeasure
from permtriton.evaluation.tasks import _Harness
from permtriton.model.forward import last_hidden_state
from permtriton.model.seq2seq import arguments_of
from permtriton.running.layer_calls import recorded
from permtriton.util.progress import NoProgress

from .sentences import trained_tokenizer
from .test_layer_calls import recorded_chain
from .test_seq2seq import IDS, build, inputs_of
from .zoo import token_ids

LABELS = IDS[:, :7].contiguous()
SOUND = inputs_of("whisper")["input_features"]
WINDOWS = {
    "t5": {"input_ids": IDS[:, :11], "labels": LABELS},
    "bart": {"input_ids": IDS[:, :5], "labels": LABELS},
    "whisper": {"input_features": SOUND, "labels": LABELS},
}


def changed(name: str):
    """A model, and a copy of it with noise on every weight of its encoder."""
    dense, model = build(name), build(name)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.get_encoder().parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model, dense


@torch.no_grad()
def naive(model, dense, arguments) -> tuple[float, float]:
    """KL and cosine on all samples at once, in float64."""
    p, q = (each(**arguments).logits.double().log_softmax(-1) for each in (dense, model))
    states = [last_hidden_state(each, Samples.of(arguments)).double() for each in (model, dense)]
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return float(kl), float(torch.cosine_similarity(*states, dim=-1).mean())


@pytest.mark.parametrize("name", WINDOWS)
def test_the_labels_are_what_is_predicted(name):
    """Sources and labels may have any length; changes of the encoder show in the decoder's outputs."""
    model, dense = changed(name)
    windows = WINDOWS[name]
    with torch.no_grad():
        perplexities = [float(each(**windows).loss.exp()) for each in (model, dense)]
    found = measure_model(model, held_out=windows, dense=dense, batch=4)
    assert [found.perplexity, found.dense_perplexity] == pytest.approx(perplexities, rel=1e-4)
    assert measure_model(model, held_out=windows).perplexity == pytest.approx(perplexities[0], rel=1e-4)
    kl, cosine = naive(model, dense, arguments_of(dense, windows))
    assert kl > 1e-3, "the models differ"
    assert (found.kl, found.cosine) == pytest.approx((kl, cosine), rel=1e-3)
    assert (found.windows, found.window) == (6, 7)
    compiling = HeldOutMeasure(dense, prepared(dense, windows), NoProgress())
    assert compiling.name == "perplexity"
    assert [compiling.compiled(model, None), compiling.dense] == pytest.approx(perplexities, rel=1e-4)


def test_sound_without_labels_has_no_perplexity():
    with pytest.raises(ConfigError, match=r"WhisperForConditionalGeneration is given no labels.*`against=`"):
        measure_model(build("whisper"), held_out={"input_features": SOUND, "decoder_input_ids": token_ids(6, 4)})
    with pytest.raises(ConfigError, match="reads input_features, not text, so it has no tasks"):
        measure_model(build("whisper"), tasks=object())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention_mask": torch.ones(6, 16).triu(-3)}, "3 of 96 positions are padding"),
        ({"labels": token_ids(6, 17)}, "sequence_length is 17, but the model has 16 positions"),
        ({"labels": torch.full((6, 4), -100)}, "values from 0"),
    ],
)
def test_samples_that_would_be_measured_wrongly_are_refused(changes, problem):
    model = build("bart")
    for check in (check_samples, prepared):
        with pytest.raises(CalibrationError, match=problem):
            check(model, {"input_ids": IDS, "labels": IDS[:, :4], **changes})


@torch.no_grad()
def test_tasks_give_the_context_to_the_encoder():
    model, tokenizer = build("t5"), trained_tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    harness = _Harness(model, tokenizer, 2, NoProgress())
    pairs = [([5, 6, 7], [8, 9]), ([4], [3, 2, 10]), ([11, 12], [6])]
    found = harness._loglikelihood_tokens([(None, *pair) for pair in pairs])
    for (context, answer), (score, _) in zip(pairs, found, strict=True):
        logits = model(input_ids=torch.tensor([context]), labels=torch.tensor([answer])).logits
        expected = logits[0].log_softmax(-1)[torch.arange(len(answer)), answer].sum()
        assert score == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_layers_of_the_decoder_read_the_encoder_of_their_own_sample(name):
    """Layers run without the model, on samples in any order, give what the model does on these samples."""
    model = build(name)
    samples, layers = check_samples(model, WINDOWS[name]), list(model.get_decoder().children())
    (blocks,) = [layer for layer in layers if isinstance(layer, torch.nn.ModuleList)]
    chain = dict(enumerate(blocks))
    calls, hidden = recorded_chain(model, chain, samples)
    rows = torch.tensor([4, 1, 5])
    for number, layer in calls.items():
        expected = recorded(model, {number: blocks[number]}, samples[rows])[number][0].hidden
        torch.testing.assert_close(hidden[rows], expected, rtol=1e-4, atol=1e-5)
        layer.try_together(hidden)
        hidden = torch.cat([layer(hidden[part], part) for part in torch.arange(len(hidden)).split(2)])
    assert layer.together
