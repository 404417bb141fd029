"""What a compilation measures on held-out text: perplexity of causal LMs, encoders' agreement with the dense model."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.evaluation.perplexity import perplexity, windows_at_once
from permtriton.model.forward import hidden_states, mean_cosine_loss
from permtriton.progress import Progress

MAX_ENCODER_WINDOWS = 64  # the dense model's hidden states on these windows stay in memory


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
