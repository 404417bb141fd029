"""Held-out measures: perplexity as defined, and agreement with the dense model for encoders."""

import copy
import math

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, LlamaForCausalLM

from permtriton import find_plan
from permtriton.errors import CalibrationError
from permtriton.evaluation.held_out import Evaluation
from permtriton.evaluation.perplexity import perplexity
from permtriton.util.progress import NoProgress
from permtriton.util.sparsity import NMPattern

from . import zoo
from .zoo import fold

VOCABULARY = zoo.TINY["vocab_size"]


@pytest.fixture
def causal() -> LlamaForCausalLM:
    return zoo.tiny_llama(initializer_range=0.4)  # large enough that its predictions depend on the tokens


def encoder(model_class) -> BertModel | BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.4,
    )
    return model_class(config).eval()


def windows(count: int, tokens: int = 12) -> torch.Tensor:
    return zoo.tiny_ids(count, tokens, seed=1)


@torch.no_grad()
def naive_perplexity(model, rows: torch.Tensor) -> float:
    """Perplexity token by token, each predicted from its own prefix."""
    losses = []
    for row in rows:
        for position in range(1, row.numel()):
            logits = model(input_ids=row[None, :position]).logits[0, -1].double()
            losses.append(-float(logits.log_softmax(0)[row[position]]))
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("batch", [1, 2, 3, 16])
def test_perplexity_is_the_naive_one_for_any_batch(causal, batch):
    rows = windows(5)
    expected = naive_perplexity(causal, rows)
    assert abs(math.log(expected / VOCABULARY)) > 0.1, "its predictions depend on the tokens"
    assert perplexity(causal, rows, batch) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_the_loss_of_a_model_in_16_bits_is_computed_in_float32(causal):
    model, rows = copy.deepcopy(causal).bfloat16(), windows(2)
    scores = model(input_ids=rows).logits[:, :-1].double().log_softmax(-1)
    expected = float(scores.gather(-1, rows[:, 1:, None]).mean().neg().exp())
    assert perplexity(model, rows, 2) == pytest.approx(expected, rel=1e-5)


def test_perplexity_of_an_ignorant_model_is_the_vocabulary(causal):
    causal.lm_head.weight.data.zero_()
    assert perplexity(causal, windows(3), 2) == pytest.approx(VOCABULARY, rel=1e-5)


def test_perplexity_that_is_not_finite_is_refused(causal):
    causal.model.norm.weight.data[0] = float("nan")
    with pytest.raises(CalibrationError, match=r"held-out loss is nan.*`dtype=float32`"):
        perplexity(causal, windows(2), 2)


def test_encoder_cosine_is_the_mean_over_all_tokens():
    model = encoder(BertModel)
    rows = windows(5)
    evaluation = Evaluation(model, rows, NoProgress())
    with torch.no_grad():
        before = model(rows).last_hidden_state
        model.encoder.layer[1].output.dense.weight.mul_(0.5)
        cosine = torch.cosine_similarity(before, model(rows).last_hidden_state, dim=-1)
    assert evaluation.compiled(model, None) == pytest.approx(float(cosine.mean()), rel=1e-5)


def test_encoder_with_permuted_channels_agrees_in_the_old_order():
    model = encoder(BertForMaskedLM)
    plan = find_plan(model, NMPattern(2, 4))
    space = plan.hidden.space
    assert not space.frozen
    evaluation = Evaluation(model, windows(4), NoProgress())
    index = torch.randperm(space.units, generator=torch.Generator().manual_seed(2))
    fold(model, plan, {space.name: index})
    order = plan.hidden.expand(index)
    assert evaluation.compiled(model, order) == pytest.approx(1.0, abs=1e-5)
    assert evaluation.compiled(model, None) < 0.9, "the channels did move"
