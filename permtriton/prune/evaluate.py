"""How good a model is on held-out text: perplexity for causal LMs, agreement with the dense model for encoders."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from permtriton.errors import CalibrationError
from permtriton.model.forward import hidden_states, mean_cosine_loss, without_cache
from permtriton.progress import NoProgress, Progress

TOKENS_AT_ONCE = 2048
MAX_ENCODER_WINDOWS = 64  # the dense model's hidden states on these windows stay in memory
MAX_LOSS = 700.0  # nats; exp of more overflows a float


def windows_at_once(tokens: int) -> int:
    """Returns how many windows of ``tokens`` tokens are evaluated at once: logits of a large vocabulary are big."""
    return max(TOKENS_AT_ONCE // tokens, 1)


@torch.no_grad()
def perplexity(model: PreTrainedModel, windows: Tensor, batch: int, progress: Progress | None = None) -> float:
    """Returns exp of the mean next-token loss.

    Args:
        model: Causal language model.
        windows: int64 ``[windows, tokens]``; the first token of each is not predicted.
        batch: Windows per forward pass.
        progress: Progress reporter, one step per window.

    Raises:
        CalibrationError: The loss is not finite.
    """
    total, count = 0.0, 0
    with (progress or NoProgress()).stage("evaluate", windows.shape[0]) as advance, without_cache(model):
        for rows in windows.split(batch):
            rows = rows.to(model.device)
            logits = model(input_ids=rows).logits[:, :-1]
            total += float(cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum"))
            count += rows[:, 1:].numel()
            advance(rows.shape[0])
    if not math.isfinite(total):
        raise CalibrationError(
            f"the held-out loss is {total}: activations overflow in {model.dtype}; try --dtype float32"
        )
    return math.exp(min(total / count, MAX_LOSS))


class Evaluation:
    """Held-out measure of one model: the dense model is measured at construction, the compiled model later.

    Args:
        model: Model, still dense.
        windows: int64 ``[windows, tokens]``.
        progress: Progress reporter, one step per window.

    Attributes:
        measure: ``perplexity`` for a causal language model, else ``cosine``: the mean cosine similarity of the last
            hidden state with the dense model's.
        dense: The measure of the dense model.
    """

    def __init__(self, model: PreTrainedModel, windows: Tensor, progress: Progress) -> None:
        self._windows, self._batch, self._progress = windows, windows_at_once(windows.shape[1]), progress
        self._hidden = torch.empty(0)
        if model.can_generate():
            self.measure = "perplexity"
            self.dense = perplexity(model, windows, self._batch, progress)
        else:
            self.measure = "cosine"
            self.dense = 1.0
            self._windows = windows[:MAX_ENCODER_WINDOWS]
            self._hidden = hidden_states(model, self._windows, self._batch)

    def measured(self, model: PreTrainedModel, hidden_order: Tensor | None) -> dict[str, Any]:
        """Returns the measure's name and its values for the dense and the compiled model; arguments as `compiled`."""
        return {"measure": self.measure, "dense": self.dense, "compiled": self.compiled(model, hidden_order)}

    @torch.no_grad()
    def compiled(self, model: PreTrainedModel, hidden_order: Tensor | None) -> float:
        """Returns the measure of the compiled model.

        Args:
            model: Compiled model.
            hidden_order: Index ``[C]`` of the last hidden state's channels; None where compiling did not move them.
        """
        if self.measure == "perplexity":
            return perplexity(model, self._windows, self._batch, self._progress)
        return 1 - mean_cosine_loss(model, self._windows, self._hidden, self._batch, hidden_order)
