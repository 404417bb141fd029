"""Perplexity by the field's protocol: windows that do not overlap, and the first token of each is not predicted.

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

from permtriton import ranks
from permtriton.errors import CalibrationError
from permtriton.micro_batch import MicroBatch
from permtriton.model.core import takes_decoder_ids
from permtriton.model.forward import without_cache
from permtriton.model.seq2seq import divided, samples_of
from permtriton.progress import NoProgress, Progress
from permtriton.prune.layer_stream import LayerStream

TOKENS_WITH_LOGITS = 2048  # at once
MAX_LOSS = 700.0  # nats; exp of more overflows a float


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


def next_token_loss(logits: Tensor, rows: Tensor) -> float:
    """Returns the sum over tokens of ``-log p(token | the tokens before it in its window)``, in nats.

    Args:
        logits: ``[windows, tokens, vocabulary]``; of an encoder-decoder, of the decoder's half of the tokens.
        rows: token ids on the same device, int64 ``[windows, tokens]``.
    """
    decoded = logits.shape[1]
    if decoded == rows.shape[1]:  # the logits at a token predict the next one
        logits, decoded = logits[:, :-1], decoded - 1
    return float(cross_entropy(logits.flatten(0, 1).float(), rows[:, -decoded:].flatten(), reduction="sum"))


def perplexity_of(model: PreTrainedModel, loss: float, windows: Tensor) -> float:
    """Returns exp of the mean next-token loss.

    Args:
        model: model that was measured.
        loss: sum of `next_token_loss` over all windows.
        windows: int64 ``[windows, tokens]``.

    Raises:
        CalibrationError: The loss is not finite.
    """
    if not math.isfinite(loss):
        raise CalibrationError(
            f"the held-out loss is {loss}: activations overflow in {model.dtype}; try --dtype float32"
        )
    predicted = divided(windows)[1] if takes_decoder_ids(model) else windows[:, 1:]
    return math.exp(min(loss / predicted.numel(), MAX_LOSS))


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    windows: Tensor,
    batch: int,
    progress: Progress | None = None,
    watch: Stopwatch | None = None,
) -> float:
    """Returns exp of the mean next-token loss.

    Args:
        model: Causal language model, or an encoder-decoder.
        windows: int64 ``[windows, tokens]``; the first token of each is not predicted, nor are the encoder's.
        batch: Windows per forward pass; fewer where memory runs out.
        progress: Progress reporter, one step per window.
        watch: Stopwatch of the forward passes.

    Raises:
        CalibrationError: The loss is not finite.
    """
    watch, count = watch or Stopwatch(), windows.shape[0]
    turns = torch.arange(-(-count // ranks.count()) * ranks.count())  # the same for all ranks, which may run in step

    def total_loss(size: int) -> float:
        total, watch.seconds = 0.0, 0.0
        with (progress or NoProgress()).stage("evaluate", ranks.own(turns).numel()) as advance, without_cache(model):
            for part in ranks.parts(turns, size):
                rows = windows[part % count].to(model.device)
                arguments = samples_of(model, rows).inputs
                with watch.running(model.device):
                    logits = model(**arguments).logits
                if new := int((part < count).sum()):  # the last turns may repeat windows
                    total += next_token_loss(logits[:new], rows[:new])
                advance(rows.shape[0])
        return total

    return perplexity_of(model, ranks.total(MicroBatch(batch).run(total_loss)), windows)


@torch.no_grad()
def perplexity_by_layers(
    model: PreTrainedModel, stream: LayerStream, batches: Sequence[Tensor], progress: Progress
) -> float:
    """Returns what `perplexity` does, but runs each layer on all windows before the next one.

    Args:
        model: Causal language model, or an encoder-decoder.
        stream: Its layers, before they have run on these windows.
        batches: Windows, int64 ``[windows, tokens]`` each.
        progress: Progress reporter, one step per window.

    Raises:
        CalibrationError: The loss is not finite.
    """
    stream.forward()
    total = 0.0
    with progress.stage("evaluate", sum(rows.shape[0] for rows in batches)) as advance, without_cache(model):
        for rows, hidden in zip(batches, stream.hidden, strict=True):
            rows = rows.to(model.device)
            with stream.returning(hidden):
                logits = model(**samples_of(model, rows).inputs).logits
            total += next_token_loss(logits, rows)
            advance(rows.shape[0])
    return perplexity_of(model, total, torch.cat(list(batches)))
