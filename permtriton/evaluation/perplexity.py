"""Perplexity by the field's protocol: windows that do not overlap, and the first token of each is not predicted."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from permtriton.errors import CalibrationError
from permtriton.micro_batch import MicroBatch
from permtriton.model.forward import without_cache
from permtriton.progress import NoProgress, Progress

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
        logits: ``[windows, tokens, vocabulary]``.
        rows: token ids on the same device, int64 ``[windows, tokens]``.
    """
    return float(cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum"))


def perplexity_of(loss: float, windows: Tensor, dtype: torch.dtype) -> float:
    """Returns exp of the mean next-token loss.

    Args:
        loss: sum of `next_token_loss` over all windows.
        windows: int64 ``[windows, tokens]``.
        dtype: dtype of the model, for the message.

    Raises:
        CalibrationError: The loss is not finite.
    """
    if not math.isfinite(loss):
        raise CalibrationError(f"the held-out loss is {loss}: activations overflow in {dtype}; try --dtype float32")
    return math.exp(min(loss / windows[:, 1:].numel(), MAX_LOSS))


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
        model: Causal language model.
        windows: int64 ``[windows, tokens]``; the first token of each is not predicted.
        batch: Windows per forward pass; fewer where memory runs out.
        progress: Progress reporter, one step per window.
        watch: Stopwatch of the forward passes.

    Raises:
        CalibrationError: The loss is not finite.
    """
    watch = watch or Stopwatch()

    def total_loss(size: int) -> float:
        total, watch.seconds = 0.0, 0.0
        with (progress or NoProgress()).stage("evaluate", windows.shape[0]) as advance, without_cache(model):
            for rows in windows.split(size):
                rows = rows.to(model.device)
                with watch.running(model.device):
                    logits = model(input_ids=rows).logits
                total += next_token_loss(logits, rows)
                advance(rows.shape[0])
        return total

    return perplexity_of(MicroBatch(batch).run(total_loss), windows, model.dtype)
