"""How close a model stays to the dense one on the same windows: KL of the next token, cosine of the last hidden states.

The KL is that of `permtriton.prune.objective`, ``KL(dense || model)`` in nats per token. Here each model computes its
own logits, since the head of the model may differ from the dense one's, and nothing but sums outlives a forward pass.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from permtriton.errors import CalibrationError, ModelError
from permtriton.evaluation.perplexity import Stopwatch, next_token_loss, perplexity_of
from permtriton.micro_batch import MicroBatch
from permtriton.model.forward import last_hidden_state, max_tokens, without_cache
from permtriton.progress import NoProgress, Progress
from permtriton.prune.objective import LOGITS_AT_ONCE


@dataclass(frozen=True)
class Fidelity:
    """What was measured of a model on held-out text, averaged over all tokens.

    Attributes:
        perplexity: perplexity of the model; None where it predicts no next token (encoders).
        dense_perplexity: the same of the dense model.
        kl: ``KL(dense || model)`` of the next token's distribution, in nats; None for encoders.
        cosine: cosine similarity of the last hidden states; None without a dense model.
    """

    perplexity: float | None
    dense_perplexity: float | None
    kl: float | None
    cosine: float | None


@torch.no_grad()
def fidelity(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    windows: Tensor,
    batch: int,
    hidden_order: Tensor | None = None,
    progress: Progress | None = None,
    watch: Stopwatch | None = None,
) -> Fidelity:
    """Measures a model against the dense one, with one forward pass of each per batch.

    Args:
        model: model to measure.
        dense: dense model.
        windows: int64 ``[windows, tokens]``.
        batch: windows per forward pass; fewer where memory runs out.
        hidden_order: index ``[C]`` from the dense model's channels of the last hidden state to the model's; None where
            the channels did not move.
        progress: progress reporter, one step per window.
        watch: stopwatch of the model's forward passes, not of the dense model's.

    Raises:
        ModelError: the models cannot be compared, see `check_comparable`.
        CalibrationError: the loss or the KL is not finite.
    """
    check_comparable(model, dense, windows.shape[1])
    watch = watch or Stopwatch()

    def totals(size: int) -> tuple[float, float, float, float]:
        loss = dense_loss = kl = cosine = watch.seconds = 0.0
        with (progress or NoProgress()).stage("evaluate", windows.shape[0]) as advance:
            for rows in windows.split(size):
                expected, dense_logits = _outputs(dense, rows)
                with watch.running(model.device):
                    hidden, logits = _outputs(model, rows)
                cosine += _cosines(hidden, expected if hidden_order is None else expected[..., hidden_order])
                if logits is not None and dense_logits is not None:
                    loss += next_token_loss(logits, rows.to(logits.device))
                    dense_loss += next_token_loss(dense_logits, rows.to(dense_logits.device))
                    kl += _divergence(logits, dense_logits.to(logits.device))
                advance(rows.shape[0])
        return loss, dense_loss, kl, cosine

    loss, dense_loss, kl, cosine = MicroBatch(batch).run(totals)
    tokens = windows.numel()
    if not model.can_generate():
        return Fidelity(None, None, None, _finite("cosine", cosine / tokens, model))
    return Fidelity(
        perplexity_of(loss, windows, model.dtype),
        perplexity_of(dense_loss, windows, dense.dtype),
        _finite("KL", kl / tokens, model),
        _finite("cosine", cosine / tokens, model),
    )


def check_comparable(model: PreTrainedModel, dense: PreTrainedModel, tokens: int) -> None:
    """Refuses a dense model that is not one of the same kind and size as the model.

    Args:
        model: model to measure.
        dense: dense model.
        tokens: tokens per window.

    Raises:
        ModelError: the vocabularies, the widths of the hidden states or the kinds of output differ, or the dense model
            cannot take windows as long as the model can.
    """
    vocabularies, widths, kinds = ([read(each) for each in (model, dense)] for read in (_vocabulary, _width, _kind))
    limit = max_tokens(dense)
    for what, (found, expected) in (
        ("has a vocabulary of {}", vocabularies),
        ("has a hidden size of {}", widths),
        ("{}", kinds),
    ):
        if found != expected:
            raise ModelError(
                f"the model {what.format(found)}, but the model that it is compared with {what.format(expected)}: give "
                "the dense model that it was compiled from"
            )
    if limit is not None and limit < tokens:
        raise ModelError(
            f"the model that it is compared with has {limit} positions, but windows have {tokens} tokens: give the "
            "dense model that it was compiled from"
        )


def _vocabulary(model: PreTrainedModel) -> int:
    embedding: Any = model.get_input_embeddings()
    return embedding.weight.shape[0]


def _width(model: PreTrainedModel) -> int:
    return model.config.get_text_config().hidden_size


def _kind(model: PreTrainedModel) -> str:
    return "predicts the next token" if model.can_generate() else "does not predict the next token"


def _outputs(model: PreTrainedModel, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the last hidden state ``[windows, tokens, hidden]`` and the logits; None for those of an encoder.

    OPT's head calls the decoder inside the base model, so both are watched; the base model ends last.
    """
    if not model.can_generate():
        return last_hidden_state(model, rows), None
    states: list[Tensor] = []
    modules = {id(each): each for each in (model.base_model, model.get_decoder()) if each is not None}.values()
    hooks = [each.register_forward_hook(lambda _, __, output: states.append(output[0])) for each in modules]
    try:
        with without_cache(model):
            logits = model(input_ids=rows.to(model.device)).logits
    finally:
        for hook in hooks:
            hook.remove()
    return states[-1], logits


def _cosines(hidden: Tensor, expected: Tensor) -> float:
    """Returns the sum over tokens of the cosine similarity."""
    return float(torch.cosine_similarity(hidden.float(), expected.to(hidden.device).float(), dim=-1).sum())


def _divergence(logits: Tensor, dense: Tensor) -> float:
    """Returns the sum over tokens of ``KL(dense || model)``, a chunk of tokens at a time."""
    tokens = max(LOGITS_AT_ONCE // logits.shape[-1], 1)
    pairs = zip(logits.flatten(0, 1).split(tokens), dense.flatten(0, 1).split(tokens), strict=True)
    return sum(
        float(
            kl_div(log_softmax(found.float(), -1), log_softmax(expected.float(), -1), reduction="sum", log_target=True)
        )
        for found, expected in pairs
    )


def _finite(name: str, value: float, model: PreTrainedModel) -> float:
    if not math.isfinite(value):
        raise CalibrationError(f"the {name} is {value}: activations overflow in {model.dtype}; try --dtype float32")
    return value
