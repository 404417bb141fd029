"""Perplexity, KL and cosine are what they say, in any batches and chunks, and in any channel order."""

import math

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
    XLMConfig,
    XLMWithLMHeadModel,
)

import permtriton
from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError, ConfigError, ModelError
from permtriton.evaluation import measures as library
from permtriton.evaluation.evaluate import measure_model
from permtriton.evaluation.measures import HeldOutMeasure
from permtriton.model.forward import last_hidden_state
from permtriton.util.progress import NoProgress

from . import zoo

CAUSAL = ("llama", "opt", "gpt2", "gemma2", "gpt_neox", "mixtral")
WINDOWS = zoo.token_ids(5, 12)


def changed(name: str):
    """A zoo model and a copy with noise on its weights, the last linear's included."""
    dense, model = zoo.build(name), zoo.build(name)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model, dense


def encoder(model_class=BertModel, **changes: object):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["initializer_range"] = 0.4
    return model_class(BertConfig(**{"vocab_size": zoo.VOCABULARY, **sizes, **changes})).eval()


@torch.no_grad()
def naive_perplexity(model) -> float:
    """Perplexity token by token, each predicted from its own prefix."""
    losses = []
    for row in WINDOWS:
        for position in range(1, row.numel()):
            logits = model(input_ids=row[None, :position]).logits[0, -1].double()
            losses.append(-float(logits.log_softmax(0)[row[position]]))
    return math.exp(sum(losses) / len(losses))


@torch.no_grad()
def naive_distances(model, dense) -> tuple[float, float]:
    """KL and cosine from the whole text at once, with plain softmaxes in float64."""
    p = dense(input_ids=WINDOWS).logits.double().softmax(-1)
    q = model(input_ids=WINDOWS).logits.double().softmax(-1)
    states = [each.base_model(input_ids=WINDOWS).last_hidden_state.double() for each in (model, dense)]
    kl = (p * (p / q).log()).sum(-1).mean()
    return float(kl), float(torch.cosine_similarity(*states, dim=-1).mean())


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize(("batch", "tokens"), [(2, 5), (16, 1000)])
def test_the_measures_are_the_naive_ones(monkeypatch, name, batch, tokens):
    monkeypatch.setattr(library, "LOGITS_AT_ONCE", tokens * zoo.VOCABULARY)
    model, dense = changed(name)
    found = measure_model(model, held_out=WINDOWS, dense=dense, batch=batch)
    kl, cosine = naive_distances(model, dense)
    assert kl > 0.01, "the models differ"
    assert found.kl == pytest.approx(kl, rel=1e-4)
    assert found.cosine == pytest.approx(cosine, rel=1e-5)
    assert found.perplexity == pytest.approx(naive_perplexity(model), rel=1e-5)
    assert found.dense_perplexity == pytest.approx(naive_perplexity(dense), rel=1e-5)
    alone = measure_model(model, held_out=WINDOWS)
    assert alone.perplexity == pytest.approx(found.perplexity, rel=1e-5)
    assert (alone.kl, alone.cosine, alone.dense_perplexity, alone.tasks) == (None, None, None, ())
    assert (found.windows, found.window, found.tokens) == (5, 12, 60)
    assert 60 / found.tokens_per_second < found.seconds, "the dense model's time is not in the speed"


@torch.no_grad()
def test_the_loss_of_a_model_in_16_bits_is_computed_in_float32():
    model = zoo.build("llama").bfloat16()
    scores = model(input_ids=WINDOWS).logits[:, :-1].double().log_softmax(-1)
    expected = float(scores.gather(-1, WINDOWS[:, 1:, None]).mean().neg().exp())
    assert measure_model(model, held_out=WINDOWS).perplexity == pytest.approx(expected, rel=1e-5)


def test_the_dense_model_runs_once_on_its_own_windows():
    model, shapes = zoo.build("llama"), []
    model.register_forward_hook(lambda module, inputs, output: shapes.append(output.logits.shape[:2]))
    found = measure_model(model, held_out=WINDOWS, dense=model)
    assert shapes.count(WINDOWS.shape) == 1
    assert found.kl == 0
    assert found.cosine == pytest.approx(1, abs=1e-6)
    assert [len(module._forward_hooks) for module in model.modules() if module._forward_hooks] == [1]


@pytest.mark.slow
def test_a_permuted_stream_is_compared_in_the_dense_order():
    dense, plan = zoo.planned("llama")
    model = zoo.build("llama")
    indices = zoo.random_indices(plan)
    zoo.fold(model, plan, indices)
    order = plan.hidden_order(indices)
    found = measure_model(model, held_out=WINDOWS, dense=dense, hidden_order=order)
    assert found.cosine == pytest.approx(1, abs=1e-5)
    assert found.kl == pytest.approx(0, abs=1e-5)
    assert found.perplexity == pytest.approx(found.dense_perplexity, rel=1e-4)
    assert measure_model(model, held_out=WINDOWS, dense=dense).cosine < 0.5, "the channels did move"


def test_the_order_of_another_model_is_refused():
    model, dense = zoo.build("llama"), zoo.build("llama")
    for order in ([1, 0], [0] * zoo.HIDDEN):
        with pytest.raises(ModelError, match=f"no permutation of the dense model's {zoo.HIDDEN} channels"):
            permtriton.evaluate(model, WINDOWS, against=dense, hidden_order=order)


def encoder_decoder() -> T5ForConditionalGeneration:
    sizes = {"vocab_size": zoo.VOCABULARY, "d_model": zoo.HIDDEN, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, d_kv=16, decoder_start_token_id=0))


OTHERS = {
    "vocabulary": (
        lambda: zoo.build("llama", vocab_size=91),
        "vocabulary of 90.*vocabulary of 91.*give the dense model",
    ),
    "width": (lambda: zoo.build("llama", hidden_size=32), "hidden size of 64.*hidden size of 32"),
    "kind": (
        lambda: encoder(hidden_size=64, num_attention_heads=4),
        "predicts the next token of its.*does not predict",
    ),
    "decoder": (encoder_decoder, "own input.*is an encoder-decoder"),
    "positions": (lambda: zoo.build("llama", max_position_embeddings=8), "8 positions, but windows have 12 tokens"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_cannot_be_compared_are_refused(name):
    build, words = OTHERS[name]
    with pytest.raises(ModelError, match=words):
        measure_model(zoo.build("llama"), held_out=WINDOWS, dense=build())


@pytest.mark.parametrize("dense", [None, zoo.build("llama")])
def test_measures_that_are_not_finite_are_refused(dense):
    model = zoo.build("llama")
    model.lm_head.weight.data[0] = math.inf
    with pytest.raises(CalibrationError, match=r"held-out loss is (nan|inf).*`dtype=float32`"):
        measure_model(model, held_out=WINDOWS, dense=dense)


@pytest.mark.parametrize("model_class", [BertModel, BertForMaskedLM])
def test_encoders_have_a_cosine_only(model_class):
    """Also where they are compiled."""
    model, dense = encoder(model_class), encoder(model_class)
    compiling = HeldOutMeasure(dense, Samples.of(WINDOWS), NoProgress())
    with torch.no_grad():
        model.base_model.encoder.layer[1].output.dense.weight.mul_(0.5)
        states = [last_hidden_state(each, Samples.of(WINDOWS)) for each in (model, dense)]
    found = measure_model(model, held_out=WINDOWS, dense=dense)
    assert (found.perplexity, found.dense_perplexity, found.kl) == (None, None, None)
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(*states, dim=-1).mean()), rel=1e-5)
    assert found.cosine < 0.99
    assert (compiling.name, compiling.dense) == ("cosine", 1)
    assert compiling.compiled(model, None) == pytest.approx(found.cosine, rel=1e-5)


def xlm() -> XLMWithLMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": zoo.VOCABULARY, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "n_words": zoo.VOCABULARY}
    return XLMWithLMHeadModel(XLMConfig(**sizes, embed_init_std=0.4, init_std=0.4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [lambda: encoder(BertLMHeadModel), xlm], ids=["bert", "xlm"])
def test_a_model_that_reads_the_whole_text_has_no_perplexity(build, dtype):
    """It would be that of tokens which the model sees; the KL, too, is of what it makes of them."""
    model = build().to(dtype)
    found = measure_model(model, held_out=WINDOWS, dense=model)
    assert (found.perplexity, found.dense_perplexity, found.kl) == (None, None, 0)
    with pytest.raises(ConfigError, match=r"reads the whole text, so it has no perplexity.*`against=`"):
        measure_model(model, held_out=WINDOWS)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_model_that_reads_up_to_a_token_has_a_perplexity(name):
    """In whatever mode, and of windows in which no token differs from the last one."""
    model = zoo.build(name).to(torch.bfloat16).train()
    assert measure_model(model, held_out=WINDOWS).perplexity
    assert measure_model(model, held_out=torch.ones_like(WINDOWS)).perplexity
