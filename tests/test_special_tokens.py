"""Sequences begin and end as users' texts do: with what the tokenizer puts around a single text."""

import copy
import functools

import pytest
import torch
from tokenizers import processors
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import (
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
)

import permtriton
from permtriton import config_from
from permtriton.data.calibration import calibration_samples
from permtriton.data.check_samples import check_samples, line_of_ids_without
from permtriton.data.generated import beginnings
from permtriton.data.held_out import held_out_windows
from permtriton.data.samples import Samples
from permtriton.data.special_tokens import special_tokens_of
from permtriton.data.tokenize import Encoder
from permtriton.driver.pipeline import compile_model
from permtriton.errors import CalibrationError, ConfigError
from permtriton.methods.measure.losses import LOSSES, dense_objective
from permtriton.methods.run import Run
from permtriton.model.seq2seq import divided

from . import zoo
from .sentences import SENTENCE, trained_tokenizer
from .test_seq2seq import T5

ADDED = ["<s>", "</s>", "[CLS]", "[SEP]"]
KINDS = {
    "BOS": ("<s> $A", ["<s>"], []),
    "EOS": ("$A </s>", [], ["</s>"]),
    "both": ("<s> $A </s>", ["<s>"], ["</s>"]),
    "CLS and SEP": ("[CLS] $A [SEP]", ["[CLS]"], ["[SEP]"]),
    "a token and a language": ("<s> $A </s> [SEP]", ["<s>"], ["</s>", "[SEP]"]),
    "none": (None, [], []),
}
DOCUMENTS = [SENTENCE * 9, "one fox and two dogs sleep. " * 30, "noon. " * 50]


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    tokenizer = trained_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ADDED})
    if template := KINDS[kind][0]:
        ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ADDED]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=ids)
    return tokenizer


def around(kind: str) -> tuple[list[int], list[int]]:
    return tuple(tokenizer_of(kind).convert_tokens_to_ids(tokens) for tokens in KINDS[kind][1:])


@functools.cache
def model() -> LlamaForCausalLM:
    return zoo.tiny_llama(vocab_size=290, hidden_size=32, intermediate_size=48, max_position_embeddings=64).eval()


def drawn(kind: str, **options) -> Samples:
    config = config_from({"samples": 4, "sequence_length": 16, **options})
    return calibration_samples(config, tokenizer_of(kind), model(), DOCUMENTS)[0]


def held_out_of(tokenizer, documents=DOCUMENTS, length: int = 16, vocabulary: int = 290, **options) -> Samples:
    return held_out_windows(Encoder(documents, "text", tokenizer, vocabulary, **options), length)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_tokenizer_puts_around_a_text_stands_around_each_sequence(kind):
    before, after = around(kind)
    samples, tokenizer = drawn(kind), tokenizer_of(kind)
    held_out = held_out_of(tokenizer)
    found = special_tokens_of(tokenizer)
    assert ([*found.before], [*found.after]) == (before, after)
    end = after or [tokenizer.eos_token_id]
    for ids in (samples.ids, samples.surplus.ids, held_out.ids):
        assert ids.shape[1] == 16
        for row in ids.tolist():
            assert (row[: len(before)], row[16 - len(after) :]) == (before, after)
    text = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in DOCUMENTS]
    stream = functools.reduce(lambda one, other: [*one, *end, *other], text) + ([] if before or after else end)
    inside = held_out.ids[:, held_out.counted].flatten().tolist()
    assert inside == stream[: len(inside)]
    assert len(stream) - len(inside) < 16


@pytest.mark.parametrize("kind", KINDS)
def test_none_cuts_as_the_literature_does(kind):
    tokenizer = tokenizer_of(kind)
    samples = drawn(kind, special_tokens="none")
    held_out = held_out_of(tokenizer, special_tokens="none")
    stream = []
    for each in DOCUMENTS:
        ids = tokenizer(each)["input_ids"]
        stream += [*ids, tokenizer.eos_token_id]
    assert held_out.ids.flatten().tolist() == stream[: held_out.ids.numel()]
    assert held_out.special.words == samples.special.words == "without special tokens"
    assert samples.counted == slice(0, None)


def test_special_tokens_are_in_the_vocabulary():
    """A tokenizer may have got more tokens than the model."""
    known = around("BOS")[0][0]
    with pytest.raises(CalibrationError, match=f"run from .* to {known}, but the model's vocabulary is 0 to"):
        held_out_of(tokenizer_of("BOS"), vocabulary=known)
    small = zoo.tiny_llama(vocab_size=known)
    config = config_from({"samples": 4, "sequence_length": 16})
    with pytest.raises(CalibrationError, match=f"run from .* to {known}, but the model's vocabulary is 0 to"):
        calibration_samples(config, tokenizer_of("BOS"), small, DOCUMENTS)


def test_a_sequence_of_one_document_has_them_too():
    samples = drawn("CLS and SEP", one_document=True)
    assert (samples.ids[:, 0] == around("CLS and SEP")[0][0]).all()
    assert samples.ids.shape == (4, 16)


def test_documents_that_have_them_do_not_double_them():
    """Formatted chats often do; a tokenizer reads its special tokens in a text, too."""
    chats = [f"<s>{each}</s>" for each in DOCUMENTS]
    plain, own = (held_out_of(tokenizer_of("both"), texts) for texts in (DOCUMENTS, chats))
    assert torch.equal(plain.ids, own.ids)


def test_a_sequence_of_a_classifier_is_no_pair():
    """Its decoder reads the encoder's text again."""
    config = config_from({"samples": 4, "sequence_length": 16})
    classifier = T5ForSequenceClassification(T5Config(**{**T5, "vocab_size": 290}))
    drawn_samples, _ = calibration_samples(config, tokenizer_of("both"), classifier, DOCUMENTS)
    read = check_samples(classifier, drawn_samples).inputs
    assert torch.equal(read["input_ids"], drawn("both").ids)
    assert torch.equal(read["decoder_input_ids"][:, 1:], read["input_ids"][:, :-1])


@pytest.mark.parametrize(("kind", "length", "least"), [("BOS", 1, 2), ("both", 2, 3), ("CLS and SEP", 2, 3)])
def test_a_sequence_of_special_tokens_alone_is_refused(kind, length, least):
    with pytest.raises(ConfigError, match=rf"`window={length}`: .* expected at least {least}"):
        held_out_of(tokenizer_of(kind), length=length)


# -- what counts -------------------------------------------------------------------------------------------------------


def logits_of(ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model()(ids).logits


@pytest.mark.parametrize("kind", KINDS)
def test_perplexity_is_that_of_a_plain_loop_over_users_texts(kind):
    """Each token of text counts but one that nothing stands before; no special token does."""
    before, after = around(kind)
    ids = held_out_of(tokenizer_of(kind)).ids
    labels = ids.clone()
    labels[:, : len(before)] = labels[:, 16 - len(after) :] = -100
    loss = cross_entropy(logits_of(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    found = permtriton.evaluate(model(), DOCUMENTS, tokenizer=tokenizer_of(kind), window=16)
    assert found.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)
    words = special_tokens_of(tokenizer_of(kind)).words
    assert f"tokens that do not overlap, {words}; " in str(found)


def test_a_distance_counts_no_special_position():
    other = zoo.tiny_llama(
        vocab_size=290, hidden_size=32, intermediate_size=48, max_position_embeddings=64, num_hidden_layers=1
    ).eval()
    ids = held_out_of(tokenizer_of("both")).ids
    with torch.no_grad():
        own, dense = (each(ids).logits[:, 1:-1].flatten(0, 1).log_softmax(-1) for each in (other, model()))
    expected = kl_div(own, dense, reduction="batchmean", log_target=True)
    found = permtriton.evaluate(other, DOCUMENTS, tokenizer=tokenizer_of("both"), window=16, against=model())
    assert found.kl == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("kind", ["kl", "cosine"])
def test_no_loss_counts_a_special_position(kind):
    samples = drawn("both")
    objective = dense_objective(model(), kind, samples, 4)
    objective.target[:, [0, -1]] = 9.0
    assert float(objective.of(torch.arange(4))) == pytest.approx(0, abs=1e-5)
    objective.target[:, 1] = 9.0
    assert float(objective.of(torch.arange(4))) > 1e-3


@pytest.mark.parametrize("kind", ["kl", "cosine"])
def test_row_weights_count_no_special_position(kind):
    """The end of each sequence, which no token of text attends to, gets no gradient."""
    samples = drawn("both")
    embedded = []
    with model().model.embed_tokens.register_forward_hook(
        lambda _module, _inputs, output: embedded.append(output) or output.retain_grad()
    ):
        LOSSES[kind].drawn(model(), samples, lambda draw, like: draw(like.shape)).backward()
    model().zero_grad()
    gradients = embedded[0].grad.abs().sum(-1)
    assert not gradients[:, -1].any()
    assert gradients[:, :-1].all()


# -- encoder-decoders --------------------------------------------------------------------------------------------------


def test_both_halves_of_an_encoder_decoder_have_theirs():
    """The labels' end counts in no loss."""
    tokenizer, t5 = tokenizer_of("EOS"), T5ForConditionalGeneration(T5Config(**{**T5, "vocab_size": 290})).eval()
    (end,) = around("EOS")[1]
    windows = held_out_of(tokenizer, length=12, halves=True)
    source, labels = divided(windows.ids)
    assert (source[:, -1] == end).all()
    assert (labels[:, -1] == end).all()
    assert windows.special.words == "each half ending with </s>"
    with torch.no_grad():
        logits = t5(input_ids=source, labels=labels.contiguous()).logits[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), labels[:, :-1].flatten())
    found = permtriton.evaluate(t5, DOCUMENTS, tokenizer=tokenizer, window=12)
    assert found.perplexity == pytest.approx(float(loss.exp()), rel=1e-4)
    config = config_from({"samples": 4, "sequence_length": 12})
    assert calibration_samples(config, tokenizer, t5, DOCUMENTS)[0].special == windows.special


# -- a user's own ids --------------------------------------------------------------------------------------------------


def test_a_users_ids_stay_as_they_are_and_a_line_says_what_they_lack():
    ids, tokenizer, said = zoo.tiny_ids(4, 16) % 250, tokenizer_of("BOS"), []
    samples = Samples.of(ids)
    assert "hold no <s>, which the tokenizer puts before a text" in line_of_ids_without(samples, tokenizer)
    with_one = ids.clone()
    with_one[0, 0] = around("BOS")[0][0]
    assert not line_of_ids_without(Samples.of(with_one), tokenizer)
    assert not line_of_ids_without(samples, tokenizer_of("EOS"))
    assert not line_of_ids_without(samples, None)
    found = permtriton.evaluate(
        model(), ids, tokenizer=tokenizer, progress=lambda event: said.append(event.text), window=None
    )
    assert any("hold no <s>" in line for line in said)
    loss = cross_entropy(logits_of(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert found.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)
    windows = held_out_of(tokenizer, ids.tolist())
    assert torch.equal(windows.ids, ids)
    assert windows.special is None


# -- in a compilation --------------------------------------------------------------------------------------------------


def test_written_text_begins_and_ends_as_the_samples_do(monkeypatch):
    before, after = around("both")
    starts = beginnings(drawn("both"), 5, 4)
    assert starts.shape == (6, 5)
    assert (starts[:, 0] == before[0]).all()
    read, samples_for = [], Run.samples_for
    monkeypatch.setattr(Run, "samples_for", lambda *given: read.append(samples_for(*given)) or read[-1])
    samples = drawn("both")
    config = config_from({"recipe": "mask,distill", "generated": 3, "distill_epochs": 1})
    compile_model(copy.deepcopy(model()), tokenizer_of("both"), config, ids=samples)
    assert len(read[0]) == 7
    assert read[0].ids[:, [0, -1]].unique(dim=0).tolist() == [before + after]
    assert read[0].special == samples.special


def test_the_record_and_the_card_say_what_was_done(tmp_path):
    said = {}
    for choice in ("auto", "none"):
        compiled = permtriton.compile(
            copy.deepcopy(model()), data=DOCUMENTS, tokenizer=tokenizer_of("BOS"), eval_data=DOCUMENTS, recipe="mask",
            samples=4, sequence_length=16, special_tokens=choice,
        )  # fmt: skip
        said[choice] = compiled.report["calibration"]["special_tokens"]
        assert compiled.report["evaluation"]["special_tokens"] == said[choice]
        assert said[choice] in str(compiled.evaluate(DOCUMENTS, window=16))
        compiled.save_pretrained(tmp_path / choice)
        assert said[choice] in (tmp_path / choice / "README.md").read_text()
    assert said == {"auto": "each beginning with <s>", "none": "without special tokens"}


def test_the_literatures_protocol_has_none_and_says_so():
    given = permtriton.recipe.overrides_of({}, protocol="wanda")
    assert given["special_tokens"] == "none"
    found = permtriton.evaluate(
        model(), DOCUMENTS, tokenizer=tokenizer_of("BOS"), window=16, protocol="wanda", tasks="none"
    )
    assert "without special tokens" in str(found)
    with pytest.raises(ConfigError, match="`special_tokens=` is 'bos': expected one of auto, none"):
        permtriton.evaluate(model(), DOCUMENTS, tokenizer=tokenizer_of("BOS"), special_tokens="bos")
