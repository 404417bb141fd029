"""Measures of a model on held-out samples. **Add one: its function, and its lines in `Distances` and `DISTANCES`.**

Perplexity is by the field's protocol: windows do not overlap, and the first token of each is not predicted. Special
tokens around a window are not predicted either; after a special token, the first token of text is predicted, too. For
an encoder-decoder, it is the perplexity of the second half of each window, given the first half.

The KL is that of `permtriton.methods.measure.losses`, ``KL(dense || model)`` in nats per token. Here each model
computes its own logits, since the head of the model may differ from the dense one's, and only sums are kept after a
forward pass."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError, ModelError
from permtriton.methods.measure.losses import LOGITS_AT_ONCE
from permtriton.model.checks import model_outputs, relative_difference
from permtriton.model.core import recorded_states, takes_decoder_ids
from permtriton.model.forward import (
    hidden_states,
    last_hidden_state,
    max_tokens,
    mean_cosine_loss,
    windows_at_once,
    without_cache,
)
from permtriton.model.headers import REPORT_FILE
from permtriton.model.seq2seq import arguments_of, first_predicted, predicted
from permtriton.util import ranks
from permtriton.util.micro_batch import MicroBatch
from permtriton.util.permutation import is_permutation
from permtriton.util.progress import NoProgress, Progress

MAX_LOSS = 700.0  # nats; exp of more overflows a float
WINDOWS_TRIED, TOKENS_TRIED = 4, 32  # size of the test whether a model sees the tokens that it predicts
# Relative difference of logits that counts as rounding: ROUNDING epsilons of the dtype, or LEAST_ROUNDING if larger.
ROUNDING, LEAST_ROUNDING = 4, 1e-4
MAX_ENCODER_WINDOWS = 64  # the dense model's hidden states on these samples stay in memory
FEW_TOKENS = 1000  # a perplexity over fewer tokens is unreliable


# -- the measures ------------------------------------------------------------------------------------------------------


def next_token_loss(logits: Tensor, tokens: Tensor, first: int) -> float:
    """Returns the sum over tokens of ``-log p(token | the tokens before it in its window)``, in nats.

    Args:
        logits: ``[windows, at least first + tokens, vocabulary]``.
        tokens: predicted tokens, int64 ``[windows, tokens]``, on any device.
        first: position of the logits that predict the first of ``tokens``.
    """
    logits = logits[:, first : first + tokens.shape[1]].flatten(0, 1).float()
    return float(cross_entropy(logits, tokens.flatten().to(logits.device), reduction="sum"))


def kl_divergence(logits: Tensor, dense: Tensor) -> float:
    """Returns the sum over tokens of ``KL(dense || model)``, in nats, from logits ``[windows, tokens, vocabulary]``."""
    tokens = max(LOGITS_AT_ONCE // logits.shape[-1], 1)  # float32 copies of all logits would take too much memory
    pairs = zip(logits.flatten(0, 1).split(tokens), dense.flatten(0, 1).split(tokens), strict=True)
    return sum(
        float(
            kl_div(log_softmax(chunk.float(), -1), log_softmax(expected.float(), -1), reduction="sum", log_target=True)
        )
        for chunk, expected in pairs
    )


def cosine_similarity(hidden: Tensor, dense: Tensor) -> float:
    """Returns the sum over tokens of the cosine similarity."""
    return float(torch.cosine_similarity(hidden.float(), dense.float(), dim=-1).sum())


@dataclass(frozen=True)
class Distance:
    """How a distance from the dense model is computed and shown."""

    short: str  # name of the distance within a sentence
    words: str  # its name as a row of ``permtriton evaluate``
    header: str  # its name as a column of ``permtriton compare``
    dense: float  # its value for the dense model itself
    # called with the outputs of the model and the dense model, ``[windows, tokens, ...]``; returns the sum over tokens
    total: Callable[[Tensor, Tensor], float]
    output: str  # what it compares: ``logits``, or ``hidden``, the last hidden states with channels in the same order


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Distances from the dense model, averaged over all tokens; None without a dense model.

    Attributes:
        kl: ``KL(dense || model)`` of the next token's distribution, in nats; None for encoders.
        cosine: cosine similarity of the last hidden states.
    """

    kl: float | None = None
    cosine: float | None = None


DISTANCES = {
    "kl": Distance("KL", "KL to dense, nats per token", "KL, nats", 0.0, kl_divergence, "logits"),
    "cosine": Distance("cosine", "cosine to dense, hidden states", "cosine", 1.0, cosine_similarity, "hidden"),
}


# -- measuring ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_samples(
    model: PreTrainedModel,
    samples: Samples,
    tokens: Tensor | None,
    batch: int,
    dense: PreTrainedModel | None = None,
    hidden_order: Tensor | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, float | None], float]:
    """Measures a model with one forward pass per batch, and one of ``dense``, unless that is the model itself.

    Args:
        samples: held-out samples, as `permtriton.data.held_out.prepared` returns them.
        tokens: the predicted tokens of the samples, as `predicted_tokens` returns them.
        dense, hidden_order: as `permtriton.evaluation.evaluate.measure_model` takes them.

    Returns:
        The measures, averaged over all tokens, by the names that `permtriton.evaluation.evaluate.Evaluated` gives them;
            and the seconds of the model's forward passes.
    """
    if dense is not None:
        check_comparable(model, dense, samples.tokens)
    has_logits, known = model.can_generate(), DISTANCES.items() if dense is not None else ()
    distances = {name: distance for name, distance in known if has_logits or distance.output != "logits"}
    count, first, counted = len(samples), first_predicted(model, samples), samples.counted
    turns = torch.arange(-(-count // ranks.count()) * ranks.count())  # each rank has equally many, as `in_step` needs

    def totals(size: int) -> dict[str, float]:
        sums = dict.fromkeys(("seconds", "loss", "dense_loss", "positions", *distances), 0.0)
        with (progress or NoProgress()).stage("evaluate", ranks.own(turns).numel()) as advance:
            for part in ranks.parts(turns, size):
                rows, new = samples[part % count], int((part < count).sum())  # the last turns may repeat windows
                started = time.perf_counter()
                actual = _outputs(model, rows, hidden=dense is not None)
                if model.device.type == "cuda":
                    torch.cuda.synchronize(model.device)
                sums["seconds"] += time.perf_counter() - started
                expected = None if dense is None else actual if dense is model else _outputs(dense, rows, hidden=True)
                for name, outputs in (("loss", actual), ("dense_loss", expected)):
                    if outputs is not None and tokens is not None:
                        sums[name] += next_token_loss(outputs["logits"][:new], tokens[part[:new]], first)
                if expected is not None:
                    expected = {**expected, "hidden": _in_order(expected["hidden"], hidden_order)}
                    sums["positions"] += actual["hidden"][:new, counted].shape[:-1].numel()
                    for name, distance in distances.items():
                        ours, theirs = (outputs[distance.output][:new, counted] for outputs in (actual, expected))
                        sums[name] += distance.total(ours, theirs.to(ours.device))
                advance(len(rows))
        return sums

    sums = {name: ranks.total(value) for name, value in MicroBatch(batch).run(totals).items()}
    measures = {
        "perplexity": perplexity_of(model, sums["loss"], tokens),
        "dense_perplexity": None if dense is None else perplexity_of(dense, sums["dense_loss"], tokens),
    }
    for name, distance in distances.items():
        measures[name] = _finite(distance.short, sums[name] / sums["positions"], model)
    return measures, sums["seconds"]


def _outputs(model: PreTrainedModel, rows: Samples, *, hidden: bool) -> dict[str, Tensor]:
    """Returns ``logits``, if there is a head, and the last hidden states, if ``hidden``: ``[windows, tokens, ...]``."""
    samples = replace(rows, inputs=arguments_of(model, rows.inputs))
    if not model.can_generate():
        return {"hidden": last_hidden_state(model, samples)}
    with without_cache(model), recorded_states(model) if hidden else nullcontext() as states:
        logits = model(**samples.to(model.device, model.dtype).inputs).logits
    return {"logits": logits} | ({"hidden": states[-1]} if states else {})


def _in_order(dense: Tensor, order: Tensor | None) -> Tensor:
    """Returns the dense model's hidden states with their channels in ``order``; unchanged if it is None."""
    if order is not None and (len(order) != dense.shape[-1] or not is_permutation(order)):
        raise ModelError(
            f"the order of hidden states (hidden_states in {REPORT_FILE}, or `hidden_order=`) is no permutation of the "
            f"dense model's {dense.shape[-1]} channels: give this model's order, int64 [{dense.shape[-1]}]"
        )
    return dense if order is None else dense[..., order]


def perplexity_of(model: PreTrainedModel, loss: float, tokens: Tensor | None) -> float | None:
    """Returns exp of the mean loss of the predicted ``tokens``; None where no tokens are predicted."""
    if tokens is None:
        return None
    if not tokens.numel():
        raise CalibrationError("each held-out window holds 1 token, so that nothing is predicted: give longer ones")
    return math.exp(min(_finite("held-out loss", loss, model) / tokens.numel(), MAX_LOSS))


def _finite(name: str, value: float, model: PreTrainedModel) -> float:
    if not math.isfinite(value):
        raise CalibrationError(f"the {name} is {value}: activations overflow in {model.dtype}; try `dtype=float32`")
    return value


def predicted_tokens(model: PreTrainedModel, samples: Samples) -> Tensor | None:
    """Returns the tokens that a model in eval mode predicts, as `predicted` does; None if it has no perplexity.

    A model has no perplexity if it sees the tokens that it predicts, as with bidirectional attention.
    """
    tokens = predicted(model, samples)
    if tokens is None or samples.ids is None or takes_decoder_ids(model):
        return tokens
    windows = samples.ids[:WINDOWS_TRIED, :TOKENS_TRIED].split(1)
    if _change(model, windows[0]) <= LEAST_ROUNDING:  # saves passes, each of which may copy all layers to a GPU
        return tokens
    # In a mixture of experts, rounding may reroute a token of one window: the second largest change decides.
    change = sorted(_change(model, window) for window in windows)[-2:][0]
    return None if change > max(ROUNDING * torch.finfo(model.dtype).eps, LEAST_ROUNDING) else tokens


def _change(model: PreTrainedModel, window: Tensor) -> float:
    """Returns how much another last token of ``window [1, tokens]`` changes the logits that predict this token."""
    others = window[window != window[0, -1]]
    if not others.numel():
        return 0.0
    changed = torch.cat([window[:, :-1], others[None, -1:]], 1)
    before, after = (model_outputs(model, Samples.of(ids))[:, -2] for ids in (window, changed))
    return relative_difference(before, after)


def check_comparable(model: PreTrainedModel, dense: PreTrainedModel, tokens: int) -> None:
    """Refuses a dense model that differs from the model in kind or size, or that takes shorter windows."""
    texts = [network.config.get_text_config() for network in (model, dense)]
    facts: dict[str, list[Any]] = {
        "has a vocabulary of {}": [getattr(config, "vocab_size", None) for config in texts],
        "has a hidden size of {}": [getattr(config, "hidden_size", None) for config in texts],
        "{}": [_kind(model), _kind(dense)],
    }
    for what, (fact, expected) in facts.items():
        if fact != expected:
            raise ModelError(
                f"the model {what.format(fact)}, but the model that it is compared with {what.format(expected)}: give "
                "the dense model that it was compiled from"
            )
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


# -- what a compilation measures ---------------------------------------------------------------------------------------


class HeldOutMeasure:
    """A measure of a dense model, which the constructor computes, and of a model compiled from it (`compiled`).

    Args:
        samples: held-out samples, as `permtriton.data.held_out.prepared` returns them.

    Attributes:
        name: ``perplexity`` for a language model that has one (`predicted_tokens`), else ``cosine``: the mean cosine
            similarity of the last hidden state with the dense model's.
        dense: the measure of the dense model.
        samples: the samples that are measured; for the cosine, at most `MAX_ENCODER_WINDOWS`.
    """

    def __init__(self, model: PreTrainedModel, samples: Samples, progress: Progress) -> None:
        self.samples, self._batch, self._progress = samples, windows_at_once(samples.longest), progress
        self._tokens = predicted_tokens(model, samples)
        if self._tokens is not None:
            if self._tokens.numel() < FEW_TOKENS:
                count = f"{self._tokens.numel():,} tokens are predicted"
                progress.say(f"the held-out text is short: only {count}, and a perplexity over so few is unreliable")
            self.name, self.dense = "perplexity", self.compiled(model, None)
        else:
            first = samples[:MAX_ENCODER_WINDOWS]
            self.samples = replace(first, inputs=arguments_of(model, first.inputs))
            self.name, self.dense = "cosine", 1.0
            self._hidden = hidden_states(model, self.samples, self._batch)

    def compiled(self, model: PreTrainedModel, hidden_order: Tensor | None) -> float:
        if self._tokens is None:
            return 1 - mean_cosine_loss(model, self.samples, self._hidden, self._batch, hidden_order)
        measures, _ = measure_samples(model, self.samples, self._tokens, self._batch, progress=self._progress)
        perplexity = measures["perplexity"]
        assert perplexity is not None
        return perplexity
