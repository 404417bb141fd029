"""Perplexity by the field's protocol: windows that do not overlap, and the first token of each is not predicted.

Special tokens around a window are not predicted either; the first token of text is, where one stands before it.

Of an encoder-decoder, it is that of the second half of each window, given the first.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from permtriton.data.samples import Inputs, Samples
from permtriton.errors import CalibrationError
from permtriton.model.checks import model_outputs, relative_difference
from permtriton.model.core import takes_decoder_ids
from permtriton.model.forward import without_cache
from permtriton.model.seq2seq import arguments_of, first_predicted, predicted
from permtriton.running import ranks
from permtriton.running.layer_stream import LayerStream
from permtriton.running.micro_batch import MicroBatch
from permtriton.util.progress import NoProgress, Progress

TOKENS_WITH_LOGITS = 2048  # at once
MAX_LOSS = 700.0  # nats; exp of more overflows a float
WINDOWS_ASKED, TOKENS_ASKED = 4, 32  # of the held-out text, to see what a model reads
# Largest difference of logits that is rounding, in units of the dtype's precision, but at least so much of their size.
ROUNDING, LEAST_ROUNDING = 4, 1e-4


class Stopwatch:
    """Adds up the time that forward passes take.

    Attributes:
        seconds: time so far.
    """

    seconds = 0.0

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Adds the time of the ``with`` block, and of what it starts on a GPU."""
        started = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds += time.perf_counter() - started


def windows_at_once(tokens: int) -> int:
    """Returns how many windows of ``tokens`` tokens are evaluated at once: logits of a large vocabulary are big."""
    return max(TOKENS_WITH_LOGITS // tokens, 1)


def next_token_loss(logits: Tensor, tokens: Tensor, first: int = 0) -> float:
    """Returns the sum over tokens of ``-log p(token | the tokens before it in its window)``, in nats.

    Args:
        logits: ``[windows, at least first + tokens, vocabulary]``.
        tokens: predicted tokens, int64 ``[windows, tokens]``, on any device.
        first: position of the logits that predict the first of them.
    """
    logits = logits[:, first : first + tokens.shape[1]].flatten(0, 1).float()
    return float(cross_entropy(logits, tokens.flatten().to(logits.device), reduction="sum"))


def perplexity_of(model: PreTrainedModel, loss: float, tokens: int) -> float:
    """Returns exp of the mean next-token loss.

    Args:
        loss: sum of `next_token_loss` over all windows.
        tokens: number of predicted tokens.

    Raises:
        CalibrationError: The loss is not finite, or of no tokens.
    """
    if not tokens:
        raise CalibrationError("each held-out window holds 1 token, so that nothing is predicted: give longer ones")
    if not math.isfinite(loss):
        raise CalibrationError(
            f"the held-out loss is {loss}: activations overflow in {model.dtype}; try `dtype=float32`"
        )
    return math.exp(min(loss / tokens, MAX_LOSS))


def with_perplexity(model: PreTrainedModel, samples: Samples) -> Tensor | None:
    """Returns the tokens that a model in eval mode predicts, as `predicted` does, if it has a perplexity; else None.

    It has none where it sees a token that it predicts, as where attention goes both ways.
    """
    tokens = predicted(model, samples)
    if tokens is None or samples.ids is None or takes_decoder_ids(model):
        return tokens
    windows = samples.ids[:WINDOWS_ASKED, :TOKENS_ASKED].split(1)
    if _change(model, windows[0]) <= LEAST_ROUNDING:  # without more passes: each reads all layers that are on the disk
        return tokens
    # In a mixture, rounding may send a token elsewhere, so that one window shows too much: two must show it.
    change = sorted(_change(model, window) for window in windows)[-2:][0]
    return None if change > max(ROUNDING * torch.finfo(model.dtype).eps, LEAST_ROUNDING) else tokens


def _change(model: PreTrainedModel, window: Tensor) -> float:
    """Returns how much the prediction of the last token of ``[1, tokens]`` changes with that token."""
    others = window[window != window[0, -1]]
    if not others.numel():
        return 0.0
    changed = torch.cat([window[:, :-1], others[None, -1:]], 1)
    before, after = (model_outputs(model, Samples.of(ids))[:, -2] for ids in (window, changed))
    return relative_difference(before, after)


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    windows: Inputs,
    batch: int,
    progress: Progress | None = None,
    watch: Stopwatch | None = None,
) -> float:
    """Returns exp of the mean next-token loss.

    Args:
        model: model that has one, see `with_perplexity`.
        windows: token ids, int64 ``[windows, tokens]``, or the inputs of an encoder and labels; see `predicted`.
        watch: Stopwatch of the forward passes.

    Raises:
        CalibrationError: The loss is not finite.
    """
    samples = Samples.of(windows)
    watch, count, tokens = watch or Stopwatch(), len(samples), _predicted(model, samples)
    turns = torch.arange(-(-count // ranks.count()) * ranks.count())  # the same for all ranks, which may run in step

    def total_loss(size: int) -> float:
        total, watch.seconds = 0.0, 0.0
        with (progress or NoProgress()).stage("evaluate", ranks.own(turns).numel()) as advance, without_cache(model):
            for part in ranks.parts(turns, size):
                rows = Samples(arguments_of(model, samples[part % count].inputs)).to(model.device, model.dtype)
                with watch.running(model.device):
                    logits = model(**rows.inputs).logits
                if new := int((part < count).sum()):  # the last turns may repeat windows
                    total += next_token_loss(logits[:new], tokens[part[:new]], first_predicted(model, samples))
                advance(len(rows))
        return total

    return perplexity_of(model, ranks.total(MicroBatch(batch).run(total_loss)), tokens.numel())


@torch.no_grad()
def perplexity_by_layers(
    model: PreTrainedModel, stream: LayerStream, batches: Sequence[Samples], progress: Progress
) -> float:
    """Returns what `perplexity` does, but runs each layer on all windows before the next one.

    Args:
        model: Causal language model, or an encoder-decoder.
        stream: Its layers, before they have run on these windows.

    Raises:
        CalibrationError: The loss is not finite.
    """
    stream.forward()
    total, count = 0.0, 0
    with progress.stage("evaluate", sum(map(len, batches))) as advance, without_cache(model):
        for rows, hidden in zip(batches, stream.hidden, strict=True):
            arguments, tokens = Samples(arguments_of(model, rows.inputs)), _predicted(model, rows)
            with stream.returning(hidden):
                logits = model(**arguments.to(model.device, model.dtype).inputs).logits
            total += next_token_loss(logits, tokens, first_predicted(model, rows))
            count += tokens.numel()
            advance(len(rows))
    return perplexity_of(model, total, count)


def _predicted(model: PreTrainedModel, samples: Samples) -> Tensor:
    tokens = predicted(model, samples)
    assert tokens is not None, "the caller has asked"
    return tokens
