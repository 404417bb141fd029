"""Walks through a model's layers and computes the inputs of each layer's sites, in time linear in a chain's depth.

The layers of a chain run one by one. Each reads the outputs of the layer before it, which stay on the model's device,
or in host memory where layers come to a GPU one by one. Layers outside every chain need runs of the whole model.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.model.forward import last_hidden_state
from permtriton.passes.plan import Plan, Site, linear_module, named_layers
from permtriton.running.kept_outputs import KeptOutputs
from permtriton.running.layer_calls import LayerCalls, find_chains, record_calls
from permtriton.running.sharding import is_spread
from permtriton.util import ranks
from permtriton.util.store import MEMORY, Store

# name of a layer, or "" for the model -> context in which it runs
LayerContext = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class LayerInputs:
    """The sites of a layer, and how to compute their inputs, for this rank's share of the sequences."""

    sites: list[Site]
    parts: Sequence[Tensor]  # indices of the sequences of each batch, int64 ``[at most batch]``
    # runs the part of the model that computes the sites' inputs, on the sequences with these indices
    run: Callable[[Tensor], object]
    may_stop_early: bool = True  # whether a run may stop once every site's input has been seen
    # marks the weights of some sites' linears as final, so that their outputs may be kept
    finish: Callable[[Iterable[Site]], None] = lambda _sites: None


def from_model(
    model: PreTrainedModel, sites: list[Site], samples: Samples, batch: int, layer_context: LayerContext = nullcontext
) -> LayerInputs:
    """Returns the inputs of sites from runs of the whole model in the context ``layer_context("")``."""

    def run(rows: Tensor) -> None:
        with layer_context(""):
            last_hidden_state(model, samples[rows])

    parts = ranks.parts(torch.arange(len(samples)), batch)
    # FSDP2 cannot end a pass early. A linear that is called several times may be called more often than the plan says,
    # which leaves out calls whose results are not used.
    may_stop_early = not any(map(is_spread, model.parameters())) and all(site.num_calls == 1 for site in sites)
    return LayerInputs(sites, parts, run, may_stop_early)


@dataclass
class _Layer:
    """A layer of a chain, with the hidden states of all sequences, on which it runs.

    Attributes:
        context: returns the context in which the layer runs.
        store: where the outputs of its last runs are collected.
    """

    calls: LayerCalls
    hidden_states: Tensor
    context: Callable[[], AbstractContextManager[object]]
    kept: KeptOutputs
    store: Store
    outputs: Tensor | None = None

    @torch.no_grad()
    def run(self, rows: Tensor, *, last: bool) -> None:
        with self.context(), self.kept.running(rows, last=last):
            output = self.calls(self.hidden_states[rows], rows)
        if last:
            if self.outputs is None:
                self.outputs = self.store.empty((len(self.hidden_states), *output.shape[1:]), dtype=output.dtype)
            self.outputs[rows] = output.to(self.outputs.device)


class LayerWalk:
    """Walks over the layers of a model; the chains that the layers form are found once, when they are first needed."""

    def __init__(self, model: PreTrainedModel, plan: Plan, samples: Samples, batch: int, store: Store = MEMORY) -> None:
        self.model, self.plan, self.samples = model, plan, samples
        self._batch, self._store = batch, store

    def walk_dense(self, weights: Mapping[str, Tensor] | None = None) -> Iterator[LayerInputs]:
        """Yields the inputs of each layer's sites. All parts of a layer must have run when the next layer is requested.

        While a layer or the model runs, ``weights`` (linear -> weight) replace the weights of its linears.
        """
        return self._walk(_with_weights(self.model, self.plan, weights) if weights else nullcontext, False, False)

    def walk_and_change(self, keep: bool = False) -> Iterator[LayerInputs]:
        """Yields the inputs of each layer's sites; a layer's weights may change before the next layer is requested.

        The next layer's inputs come from the new weights, so each layer runs once more after its weights were changed.

        Args:
            keep: whether `KeptOutputs` stores final outputs, so that they are computed once, however often the layer
                runs. Runs of the whole model never store outputs.
        """
        return self._walk(nullcontext, keep, True)

    @cached_property
    def _layers(self) -> list[tuple[str, list[Site], list[str]]]:
        """For each group of sites its layer's name, the sites, and the names of the layers of its chain.

        Without a chain the whole model must run. The name is empty, too, if the sites are in no layer, share their
        layer with another group, or are in several layers.
        """
        groups, layer_of = self.plan.layers(), dict[nn.Module, str]()
        for name, layer in named_layers(self.model, self.plan).items():
            layer_of |= dict.fromkeys(layer.modules(), name)
        names = []
        for sites in groups:
            inside = {layer_of.get(linear_module(self.model, linear), "") for site in sites for linear in site.linears}
            # If linears run in several layers, their inputs in all these layers count.
            names.append(inside.pop() if len(inside) == 1 and all(site.num_calls == 1 for site in sites) else "")
        counts = Counter(names)
        names = [name if counts[name] == 1 else "" for name in names]
        layers = {name: self.model.get_submodule(name) for name in names if name}
        weights = [linear_module(self.model, name).get_parameter("weight") for _, name in self.plan.linears()]
        chains = find_chains(self.model, layers, self.samples[:1], weights) if len(layers) > 1 else []
        chain_of = {name: chain for chain in chains if len(chain) > 1 for name in chain}
        return [(name, sites, chain_of.get(name, [])) for name, sites in zip(names, groups, strict=True)]

    def _walk(self, layer_context: LayerContext, keep: bool, changing: bool) -> Iterator[LayerInputs]:
        calls: dict[str, LayerCalls] = {}
        model, samples, batch, store = self.model, self.samples, self._batch, self._store.on(self.model.device)
        hidden_states, own_samples = torch.empty(0), samples[ranks.own_rows(len(samples))]
        for name, sites, chain in self._layers:
            if not chain:
                yield from_model(model, sites, samples, batch, layer_context)
                continue
            if name not in calls:
                with layer_context(""):
                    calls, hidden_states = self._recorded(chain, own_samples)
            with layer_context(name):
                calls[name].try_together(hidden_states)
            # Sequences that cannot run together are one part each: a run may stop once every site's input has been
            # seen, and kept outputs belong to the sequences of a run.
            parts = torch.arange(len(own_samples)).split(batch if calls[name].together else 1)
            kept = KeptOutputs(model, name, sites, keep)
            layer = _Layer(calls[name], hidden_states, partial(layer_context, name), kept, store)
            yield LayerInputs(sites, parts, partial(layer.run, last=not changing), changing, kept.finish)
            if changing and name != chain[-1]:  # layers after the chain get their inputs from the model
                for rows in parts:
                    layer.run(rows, last=True)
            kept.clear()
            if layer.outputs is not None:
                hidden_states = layer.outputs

    def _recorded(self, chain: list[str], samples: Samples) -> tuple[dict[str, LayerCalls], Tensor]:
        """Returns the calls of a chain's layers on every sample, and the hidden states that its first layer reads."""
        calls = {name: LayerCalls(self.model.get_submodule(name), self.model.device) for name in chain}
        hidden_states = torch.empty(0)
        for row, sample in enumerate(samples.split(1)):
            hidden = record_calls(self.model, calls, sample)
            if not row:
                store = self._store.on(self.model.device)
                hidden_states = store.empty((len(samples), *hidden.shape[1:]), dtype=hidden.dtype)
            hidden_states[row] = hidden[0]
        return calls, hidden_states

    def walk_once(self) -> Iterator[LayerInputs]:
        """Yields the inputs of all sites in the dense model, from one pass of the whole model over the samples.

        Where layers come to a GPU one by one, inputs come from `walk_dense` instead. One pass of the whole model at the
        end then serves all sites that are outside chains and whose runs may stop early.
        """
        sites = self.plan.sites
        if self._store.onloads:
            sites = []
            for layer in self.walk_dense():
                if layer.may_stop_early:
                    sites += layer.sites
                else:
                    yield layer
        if sites:
            yield from_model(self.model, sites, self.samples, self._batch)


def _with_weights(model: nn.Module, plan: Plan, weights: Mapping[str, Tensor]) -> LayerContext:
    """Returns a function: name of a layer ("" for the model) -> context in which ``weights`` replace its weights.

    A layer runs in its context many times, so its new weights are moved to its device once and stay there until another
    layer runs.
    """
    new_weights = {id(linear_module(model, name).get_parameter("weight")): weights[name] for _, name in plan.linears()}
    moved: dict[int, Tensor] = {}  # new weights of the layer that ran last, on its device

    @contextmanager
    def layer_context(layer: str) -> Iterator[None]:
        replaced = [parameter for parameter in model.get_submodule(layer).parameters() if id(parameter) in new_weights]
        original_data = [parameter.data for parameter in replaced]
        try:
            if moved.keys() != {id(parameter) for parameter in replaced}:
                moved.clear()
                moved.update({id(parameter): new_weights[id(parameter)].to(parameter.device) for parameter in replaced})
            for parameter in replaced:
                parameter.data = moved[id(parameter)]
            yield
        finally:
            for parameter, data in zip(replaced, original_data, strict=True):
                parameter.data = data

    return layer_context
