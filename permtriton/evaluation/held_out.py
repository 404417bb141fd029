"""What a compilation measures on held-out samples: perplexity, or the agreement with the dense model."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.data.samples import Inputs, Samples
from permtriton.evaluation.perplexity import perplexity, perplexity_by_layers, windows_at_once, with_perplexity
from permtriton.model.forward import hidden_states, mean_cosine_loss, with_tokens
from permtriton.model.seq2seq import arguments_of
from permtriton.running.layer_stream import LayerStream
from permtriton.running.store import MEMORY, Store
from permtriton.util.progress import Progress

MAX_ENCODER_WINDOWS = 64  # the dense model's hidden states on these samples stay in memory
FEW_TOKENS = 1000  # a perplexity of fewer says little


class Evaluation:
    """Held-out measure of one model: the dense model is measured at construction, the compiled model later.

    Args:
        windows: Held-out samples: token ids, int64 ``[windows, tokens]``, or what else the model reads.

    Attributes:
        measure: ``perplexity`` for a language model that has one (`with_perplexity`), else ``cosine``: the mean
            cosine similarity of the last hidden state with the dense model's.
        dense: The measure of the dense model.
        special: The special tokens that were put around each window; None where the samples are a user's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Inputs,
        progress: Progress,
        layers: Mapping[str, nn.Module] | None = None,
        store: Store = MEMORY,
    ) -> None:
        self._layers, self._store = layers or {}, store
        windows = with_tokens(model, Samples.of(windows))
        self._windows, self._batch, self._progress = windows, windows_at_once(windows.longest), progress
        self._hidden, self.special = torch.empty(0), windows.special
        if (predicted := with_perplexity(model, windows)) is not None:
            if predicted.numel() < FEW_TOKENS:
                count = f"{predicted.numel():,} tokens are predicted"
                progress.say(f"the held-out text is short: {count}, and their perplexity says little")
            self.measure = "perplexity"
            self.dense = self._perplexity(model)
        else:
            self.measure = "cosine"
            self.dense = 1.0
            first = windows[:MAX_ENCODER_WINDOWS]
            self._windows = replace(first, inputs=arguments_of(model, first.inputs))
            self._hidden = hidden_states(model, self._windows, self._batch)

    @property
    def shape(self) -> list[int]:
        """Number of the samples that are measured, and of the tokens or positions of each."""
        return [len(self._windows), self._windows.tokens]

    @torch.no_grad()
    def compiled(self, model: PreTrainedModel, hidden_order: Tensor | None) -> float:
        """Returns the measure of the compiled model.

        Args:
            hidden_order: Index ``[C]`` of the last hidden state's channels; None where compiling did not move them.
        """
        if self.measure == "perplexity":
            return self._perplexity(model)
        return 1 - mean_cosine_loss(model, self._windows, self._hidden, self._batch, hidden_order)

    def _perplexity(self, model: PreTrainedModel) -> float:
        if self._store.onloads:
            batches = list(self._windows.split(self._batch))
            arguments = [Samples(arguments_of(model, rows.inputs)) for rows in batches]
            stream = LayerStream(model, self._layers, arguments, self._store)
            if stream.layers:
                return perplexity_by_layers(model, stream, batches, self._progress)
        return perplexity(model, self._windows, self._batch, self._progress)
