"""Running a model on many batches layer by layer: each layer runs on all batches before the next layer is needed.

The model itself computes what is before and after the layers, so that its outputs are the same, bit for bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.model.forward import replaced_forwards
from permtriton.running.layer_calls import Form, find_chains, left_out, recorded, run_layer, same
from permtriton.util.store import Store


class LayerStream:
    """A model's longest chain of layers, with their arguments for every batch.

    Attributes:
        layers: layers of the chain; none where the model has no chain, so that it can only run as a whole.
        hidden: hidden states of each batch, ``[sequences, tokens, hidden]``: what the first layer reads, and after
            `forward` what the last one returns.
    """

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, layers: Mapping[str, nn.Module], batches: Sequence[Samples], store: Store
    ) -> None:
        self._model, self._store = model, store
        self._arguments: list[list[tuple[list[Any], pytree.TreeSpec]]] = []  # by batch and layer
        self.layers: list[nn.Module] = []
        self.hidden: list[Tensor] = []
        first = batches[0][:1]
        chain = {name: layers[name] for name in max(find_chains(model, layers, first, ())[0], key=len, default=[])}
        forms = [calls[0].form for calls in recorded(model, chain, first).values()] if len(chain) > 1 else []
        self._forms: dict[nn.Module, Form] = {
            layer: form for layer, form in zip(chain.values(), forms, strict=False) if form is not None
        }
        if not forms or len(self._forms) < len(chain):
            return
        self.layers = list(chain.values())
        for batch in batches:
            with left_out(self._forms):
                calls = [call for (call,) in recorded(model, chain, batch).values()]
            assert calls[0].hidden is not None
            self.hidden.append(self._kept(calls[0].hidden))
            self._arguments.append([(call.leaves, call.structure) for call in calls])
            for (leaves, _), (first_leaves, _) in zip(self._arguments[-1], self._arguments[0], strict=True):
                if len(leaves) == len(first_leaves):  # what is equal for all batches is stored once
                    leaves[:] = [a if same(a, b) else b for a, b in zip(first_leaves, leaves, strict=True)]

    def _kept(self, hidden: Tensor) -> Tensor:
        return self._store.empty(hidden.shape, dtype=hidden.dtype).copy_(hidden)

    @torch.no_grad()
    def forward(self) -> None:
        """Runs each layer on all batches, one layer after another."""
        for number, layer in enumerate(self.layers):
            for batch, hidden in enumerate(self.hidden):
                output = run_layer(layer, hidden.to(self._model.device), *self._arguments[batch][number])
                if output.shape != hidden.shape or output.dtype != hidden.dtype:
                    self.hidden[batch] = self._kept(output)
                else:
                    hidden.copy_(output)

    @contextmanager
    def returning(self, hidden: Tensor) -> Iterator[None]:
        """Inside the context, the model computes none of the layers and takes ``hidden`` for the last one's output."""
        last = self.layers[-1]

        def forward(*positional: Any, **named: Any) -> Any:
            return self._forms[last].of(hidden.to(self._model.device))

        with left_out(self._forms), replaced_forwards([last], lambda _: forward):
            yield
