"""The losses of objectives are those of plain formulas over all logits, however the tokens are split."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import CohereConfig, CohereForCausalLM, PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.errors import ConfigError
from permtriton.methods.measure import losses as file
from permtriton.methods.measure.losses import (
    Head,
    dense_objective,
    has_head,
    objective_kind,
)
from permtriton.methods.order.learned import Learned
from permtriton.methods.order.searched import Searched
from permtriton.methods.train.distill import Distill
from permtriton.model.forward import hidden_before_norm, hidden_states, last_hidden_state

from . import zoo
from .learning import unchanged

IDS = zoo.token_ids(5, 7)
ROWS = torch.tensor([3, 0, 4])


def cohere() -> PreTrainedModel:
    torch.manual_seed(0)
    model = CohereForCausalLM._from_config(CohereConfig(**zoo._GROUPED, logit_scale=0.3))
    zoo.randomize(model)
    return model.eval()


def softer() -> PreTrainedModel:
    """Soft-capping that bends these small logits."""
    return zoo.build("gemma2", final_logit_softcapping=2.0)


MODELS = {
    **{name: lambda name=name: zoo.build(name) for name in ("llama", "llama_tied", "gpt2", "opt", "phi", "bert_mlm")},
    **{name: lambda name=name: zoo.build(name) for name in ("mixtral", "falcon", "gpt_neox")},
    "cohere: scaled logits": cohere,
    "gemma2: capped logits": softer,
}
every_head = pytest.mark.parametrize("name", MODELS)


def layer_parameters(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """The named parameters of numbered modules."""
    return [(n, p) for n, p in model.base_model.named_parameters() if any(part.isdigit() for part in n.split("."))]


@torch.no_grad()
def damaged(model: PreTrainedModel) -> PreTrainedModel:
    """The model with other weights in its layers, and the same head."""
    for _, parameter in layer_parameters(model):
        if parameter.ndim > 1:
            parameter.mul_(torch.where(torch.rand(parameter.shape) < 0.3, 0.2, 1.0))
    return model


def plain_kl(logits: Tensor, dense: Tensor) -> Tensor:
    tokens = logits.shape[:-1].numel()
    return kl_div(logits.log_softmax(-1), dense.log_softmax(-1), reduction="sum", log_target=True) / tokens


def test_of_a_large_vocabulary_one_position_in_some_is_taken():
    """Another one in each sequence, so that all are taken in the end."""
    small, large = (zoo.tiny_llama(vocab_size=size, tie_word_embeddings=True).eval() for size in (96, 400))
    ids = zoo.token_ids(12, 14)
    assert dense_objective(small, "kl", Samples.of(ids), 4).stride == 1
    assert dense_objective(large, "cosine", Samples.of(ids), 4).stride == 1
    objective = dense_objective(large, "kl", Samples.of(ids), 4)
    assert (stride := objective.stride) == 3
    rows = torch.tensor([3, 1, 5])
    hidden = (objective.target[rows] + 0.1).requires_grad_()
    loss = objective.loss(hidden, rows)
    loss.backward()
    taken = hidden.grad.abs().sum(-1) > 0
    assert taken.nonzero()[:, 1].tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    with torch.no_grad():
        logits, dense = (large.lm_head(each).log_softmax(-1) for each in (hidden, objective.target[rows]))
    expected = kl_div(logits[taken], dense[taken], reduction="batchmean", log_target=True)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-3, atol=1e-6)
    assert stride * int(taken.sum()) <= taken.numel()


@every_head
@pytest.mark.parametrize("tokens_at_once", [4, 1000])
def test_kl_and_its_gradient_are_those_of_all_logits(name, tokens_at_once, monkeypatch):
    """Value, and gradient at the last hidden state and at the weights."""
    monkeypatch.setattr(file, "LOGITS_AT_ONCE", tokens_at_once * zoo.VOCABULARY + 5)
    model = MODELS[name]()
    objective = dense_objective(model, "kl", Samples.of(IDS), 2)
    rows = IDS[ROWS]
    with torch.no_grad():
        dense = model(input_ids=rows).logits
    damaged(model)
    hidden = last_hidden_state(model, Samples.of(rows))
    loss = objective.loss(hidden, ROWS)
    expected = plain_kl(model(input_ids=rows).logits, dense)
    assert loss.dtype == torch.float32
    assert loss.item() > 0.01
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)

    norms = [p for n, p in layer_parameters(model) if p.ndim == 1 and n.endswith("weight")]
    assert len(norms) >= 2
    found = torch.autograd.grad(3 * loss, norms)
    for mine, plain in zip(found, torch.autograd.grad(3 * expected, norms), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("kind", ["kl", "cosine"])
def test_the_mean_is_that_of_all_sequences(kind):
    model = zoo.build("llama")
    objective = dense_objective(model, kind, Samples.of(IDS), 2)
    damaged(model)
    each = [objective.of(torch.tensor([row])).item() for row in range(5)]
    assert len(set(each)) == 5
    for batch in (1, 2, 5):
        assert objective.mean(batch) == pytest.approx(sum(each) / 5, rel=1e-5)
    chosen = objective.of(ROWS).item()
    assert chosen == pytest.approx((each[3] + each[0] + each[4]) / 3, rel=1e-5)


@pytest.mark.parametrize("kind", ["kl", "cosine"])
def test_reordered_is_the_objective_of_the_folded_model(kind):
    model, plan = zoo.planned("llama")
    objective = dense_objective(model, kind, Samples.of(IDS), 2)
    damaged(model)
    expected = objective.mean(2)
    indices = zoo.random_indices(plan)
    zoo.fold(model, plan, indices)
    order = plan.hidden_order(indices)
    assert objective.reordered(order).mean(2) == pytest.approx(expected, rel=1e-4)
    assert objective.mean(2) != pytest.approx(expected, rel=1e-2)
    assert objective.reordered(None) is objective
    assert torch.equal(objective.target, objective.reordered(torch.arange(zoo.HIDDEN)).target)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_the_head_leaves_the_model_as_it_was(name):
    model = zoo.build(name)
    with unchanged(model):
        head = Head(model, Samples.of(IDS))
        head(hidden_states(model, Samples.of(IDS), 2))


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ConfigError, match=r"BertModel has none: choose the loss cosine"):
        dense_objective(zoo.build("bert"), "kl", Samples.of(IDS), 2)


def test_logits_that_do_not_follow_from_the_last_hidden_state_are_refused():
    model = zoo.build("llama")
    shift = torch.nn.Parameter(torch.randn(zoo.VOCABULARY))
    forward = model.forward

    def from_ids(input_ids: Tensor, **named: object):
        result = forward(input_ids=input_ids, **named)
        result.logits = result.logits + shift * input_ids.unsqueeze(-1)
        return result

    model.forward = from_ids
    with pytest.raises(ConfigError, match="do not follow from its last hidden state"):
        Head(model, Samples.of(IDS))


@pytest.mark.parametrize(("name", "kind"), [("llama", "kl"), ("bert", "cosine"), ("bert_mlm", "kl")])
def test_auto_means_the_logits_where_there_is_a_head(name, kind):
    model = zoo.build(name)
    assert has_head(model) == (name != "bert")
    assert objective_kind("auto", model) == kind
    for step in (Searched(), Distill(), Learned(loss="auto")):
        assert objective_kind(step.objective, model) == kind


@pytest.mark.parametrize(("name", "norm"), [("llama", "norm"), ("gpt2", "ln_f"), ("falcon", "ln_f"), ("bert", "")])
def test_what_the_final_norm_reads(name, norm):
    """BERT's last norm is inside its last layer."""
    model, ids = zoo.build(name), Samples.of(zoo.token_ids(2, 5))
    with torch.no_grad():
        before, after = hidden_before_norm(model, ids), last_hidden_state(model, ids)
        assert norm == "" or not torch.equal(before, after)
        torch.testing.assert_close(model.base_model.get_submodule(norm)(before) if norm else before, after)
