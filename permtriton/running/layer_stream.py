"""Running a model on many batches layer by layer: each layer runs on all batches before the next layer is needed.

The model itself computes what is before and after the layers, so that its outputs are the same, bit for bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.model.forward import replaced_forwards
from permtriton.running.layer_calls import Form, LayerCalls, find_chains, left_out, record_calls
from permtriton.util.store import Store


class LayerStream:
    """A model's longest chain of layers, with their arguments for every batch.

    Attributes:
        layers: layers of the chain, with one call per batch; none where the model has no chain, so that it can only run
            as a whole.
        hidden: hidden states of each batch, ``[sequences, tokens, hidden]``: what the first layer reads, and after
            `forward` what the last one returns.
    """

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, layers: Mapping[str, nn.Module], batches: Sequence[Samples], store: Store
    ) -> None:
        self._model, self._store = model, store
        self.layers: list[LayerCalls] = []
        self.hidden: list[Tensor] = []
        self._forms: dict[nn.Module, Form] = {}
        chain = max(find_chains(model, layers, batches[0][:1], ()), key=len, default=[])
        if len(chain) < 2:
            return
        calls = {name: LayerCalls(layers[name], model.device) for name in chain}
        for batch in batches:
            hidden = record_calls(model, calls, batch)
            self._forms = {layer.layer: layer.form for layer in calls.values() if layer.form is not None}
            if len(self._forms) < len(chain):
                return
            self.hidden.append(self._kept(hidden))
        self.layers = list(calls.values())

    def _kept(self, hidden: Tensor) -> Tensor:
        return self._store.empty(hidden.shape, dtype=hidden.dtype).copy_(hidden)

    @torch.no_grad()
    def forward(self) -> None:
        """Runs each layer on all batches, one layer after another."""
        for layer in self.layers:
            for batch, hidden in enumerate(self.hidden):
                output = layer.run(hidden, [batch])
                if output.shape != hidden.shape or output.dtype != hidden.dtype:
                    self.hidden[batch] = self._kept(output)
                else:
                    hidden.copy_(output)

    @contextmanager
    def returning(self, hidden: Tensor) -> Iterator[None]:
        """Inside the context, the model computes none of the layers and takes ``hidden`` for the last one's output."""
        last = self.layers[-1].layer

        def forward(*positional: Any, **named: Any) -> Any:
            return self._forms[last].of(hidden.to(self._model.device))

        with left_out(self._forms), replaced_forwards([last], lambda _: forward):
            yield
