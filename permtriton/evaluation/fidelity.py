"""How close a model stays to the dense one on the same windows: KL of the next token, cosine of the last hidden states.

The KL is that of `permtriton.methods.measure.objective`, ``KL(dense || model)`` in nats per token. Here each model
computes its own logits, since the head of the model may differ from the dense one's, and nothing but sums outlives a
forward pass."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from permtriton.data.samples import Inputs, Samples
from permtriton.errors import CalibrationError, ModelError
from permtriton.evaluation.perplexity import Stopwatch, next_token_loss, perplexity_of, with_perplexity
from permtriton.methods.measure.objective import LOGITS_AT_ONCE
from permtriton.model.core import recorded_states, takes_decoder_ids
from permtriton.model.forward import last_hidden_state, max_tokens, with_tokens, without_cache
from permtriton.model.headers import REPORT_FILE
from permtriton.model.seq2seq import arguments_of, first_predicted, predicted, with_decoder_ids
from permtriton.running.micro_batch import MicroBatch
from permtriton.util.progress import NoProgress, Progress


def _cosines(hidden: Tensor, expected: Tensor) -> float:
    """Returns the sum over tokens of the cosine similarity."""
    return float(torch.cosine_similarity(hidden.float(), expected.float(), dim=-1).sum())


def _divergence(logits: Tensor, dense: Tensor) -> float:
    """Returns the sum over tokens of ``KL(dense || model)``, a chunk of tokens at a time."""
    tokens = max(LOGITS_AT_ONCE // logits.shape[-1], 1)
    pairs = zip(logits.flatten(0, 1).split(tokens), dense.flatten(0, 1).split(tokens), strict=True)
    return sum(
        float(
            kl_div(log_softmax(chunk.float(), -1), log_softmax(expected.float(), -1), reduction="sum", log_target=True)
        )
        for chunk, expected in pairs
    )


@dataclass(frozen=True)
class Distance:
    """What `permtriton.evaluation.fidelity.Distances` has a field for, and how it is computed and shown.

    Attributes:
        short: what it is called within a sentence.
        words: the same as a row of ``permtriton evaluate``.
        header: the same as a column of ``permtriton compare``.
        dense: that of the dense model from itself.
        total: called with what the model and the dense model put out, ``[windows, tokens, ...]``; returns the sum over
            tokens.
        of_logits: whether that is logits; else the last hidden states, their channels in the same order.
    """

    short: str
    words: str
    header: str
    dense: float
    total: Callable[[Tensor, Tensor], float]
    of_logits: bool = False


def _distance(*facts: Any, **more: Any) -> Any:
    return field(default=None, metadata={"distance": Distance(*facts, **more)})


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Distances from the dense model, averaged over all tokens; None without one. **Add a measure here.**

    Attributes:
        kl: ``KL(dense || model)`` of the next token's distribution, in nats; None for encoders.
        cosine: cosine similarity of the last hidden states.
    """

    kl: float | None = _distance("KL", "KL to dense, nats per token", "KL, nats", 0.0, _divergence, of_logits=True)
    cosine: float | None = _distance("cosine", "cosine to dense, hidden states", "cosine", 1.0, _cosines)


DISTANCES: Mapping[str, Distance] = {each.name: each.metadata["distance"] for each in fields(Distances)}


@dataclass(frozen=True, kw_only=True)
class _Perplexities:
    perplexity: float | None = None
    dense_perplexity: float | None = None


@dataclass(frozen=True, kw_only=True)
class Fidelity(Distances, _Perplexities):  # fields of the last base come first
    """What was measured of a model on held-out text, averaged over all tokens.

    Attributes:
        perplexity: perplexity of the model; None where it predicts no next token (encoders), sees the tokens that it
            should predict, or these are unknown (sound without labels).
        dense_perplexity: the same of the dense model.
    """


@torch.no_grad()
def fidelity(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    windows: Inputs,
    batch: int,
    hidden_order: Tensor | None = None,
    progress: Progress | None = None,
    watch: Stopwatch | None = None,
) -> Fidelity:
    """Measures a model against the dense one, which may be itself, with one forward pass of each per batch.

    Args:
        windows: token ids, int64 ``[windows, tokens]``, or other samples. What a decoder reads of sound or images
            without a text, the dense model writes.
        hidden_order: index ``[C]`` from the dense model's channels of the last hidden state to the model's; None where
            the channels did not move.
        watch: stopwatch of the model's forward passes, not of the dense model's.

    Raises:
        ModelError: the models cannot be compared, see `check_comparable`, or the order has another length.
        CalibrationError: the loss or the KL is not finite.
    """
    check_comparable(model, dense)
    samples = with_tokens(model, with_decoder_ids(dense, Samples.of(windows)))
    _check_positions(dense, samples.tokens)
    watch, predicts = watch or Stopwatch(), with_perplexity(model, samples)

    def totals(size: int) -> tuple[float, float, dict[str, float], int]:
        loss = dense_loss = watch.seconds = 0.0
        sums, positions = dict.fromkeys(DISTANCES, 0.0), 0
        with (progress or NoProgress()).stage("evaluate", len(samples)) as advance:
            for rows in samples.split(size):
                with watch.running(model.device):
                    hidden, logits = _outputs(model, rows)
                expected, dense_logits = (hidden, logits) if model is dense else _outputs(dense, rows)
                pairs = {False: (hidden, _in_order(expected, hidden_order).to(hidden.device))}
                positions += hidden[:, samples.counted].shape[:-1].numel()
                if logits is not None and dense_logits is not None:
                    pairs[True] = logits, dense_logits.to(logits.device)
                    if predicts is not None and (tokens := predicted(model, rows)) is not None:
                        first = first_predicted(model, rows)
                        loss += next_token_loss(logits, tokens, first)
                        dense_loss += next_token_loss(dense_logits, tokens, first)
                for name, distance in DISTANCES.items():
                    if distance.of_logits in pairs:
                        own, theirs = pairs[distance.of_logits]
                        sums[name] += distance.total(own[:, samples.counted], theirs[:, samples.counted])
                advance(len(rows))
        return loss, dense_loss, sums, positions

    loss, dense_loss, sums, positions = MicroBatch(batch).run(totals)
    return Fidelity(
        perplexity=None if predicts is None else perplexity_of(model, loss, predicts.numel()),
        dense_perplexity=None if predicts is None else perplexity_of(dense, dense_loss, predicts.numel()),
        **{
            name: _finite(distance.short, sums[name] / positions, model)
            for name, distance in DISTANCES.items()
            if model.can_generate() or not distance.of_logits
        },
    )


def check_comparable(model: PreTrainedModel, dense: PreTrainedModel) -> None:
    """Refuses a dense model that is not one of the same kind and size as the model.

    Raises:
        ModelError: the vocabularies, the widths of the hidden states or the kinds of output differ.
    """
    texts = [each.config.get_text_config() for each in (model, dense)]
    facts: dict[str, list[Any]] = {
        "has a vocabulary of {}": [getattr(each, "vocab_size", None) for each in texts],
        "has a hidden size of {}": [getattr(each, "hidden_size", None) for each in texts],
        "{}": [_kind(model), _kind(dense)],
    }
    for what, (own, expected) in facts.items():
        if own != expected:
            raise ModelError(
                f"the model {what.format(own)}, but the model that it is compared with {what.format(expected)}: give "
                "the dense model that it was compiled from"
            )


def _check_positions(dense: PreTrainedModel, tokens: int) -> None:
    """Refuses a dense model that cannot take windows as long as the model can."""
    limit = max_tokens(dense)
    if limit is not None and limit < tokens:
        raise ModelError(
            f"the model that it is compared with has {limit} positions, but windows have {tokens} tokens: give the "
            "dense model that it was compiled from"
        )


def _kind(model: PreTrainedModel) -> str:
    if not model.can_generate():
        return "does not predict the next token"
    return "is an encoder-decoder" if takes_decoder_ids(model) else "predicts the next token of its own input"


def _outputs(model: PreTrainedModel, rows: Samples) -> tuple[Tensor, Tensor | None]:
    """Returns the last hidden state ``[windows, tokens, hidden]`` and the logits; None for those of an encoder."""
    samples = replace(rows, inputs=arguments_of(model, rows.inputs))
    if not model.can_generate():
        return last_hidden_state(model, samples), None
    with without_cache(model), recorded_states(model) as states:
        logits = model(**samples.to(model.device, model.dtype).inputs).logits
    return states[-1], logits


def _in_order(dense: Tensor, order: Tensor | None) -> Tensor:
    """Returns the dense model's hidden states with their channels in this order, or as they are."""
    if order is not None and len(order) != dense.shape[-1]:
        raise ModelError(
            f"the order of hidden states (hidden_states in {REPORT_FILE}, or `hidden_order=`) has {len(order)} "
            f"channels, but the last hidden state of the dense model has {dense.shape[-1]}: give that of this model"
        )
    return dense if order is None else dense[..., order]


def _finite(name: str, value: float, model: PreTrainedModel) -> float:
    if not math.isfinite(value):
        raise CalibrationError(f"the {name} is {value}: activations overflow in {model.dtype}; try `dtype=float32`")
    return value
