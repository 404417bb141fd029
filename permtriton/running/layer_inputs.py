"""What gives the sites of each layer their inputs, layer after layer, in a time that is linear in the depth.

Layers that form a chain run one by one on the outputs of the layer before, which stay on the model's device, unless its
memory is short. What is in no chain gets its inputs from the model, which then runs from its start.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.model.forward import last_hidden_state
from permtriton.passes.plan import Plan, Site, layer_names, linear_module
from permtriton.running import ranks
from permtriton.running.kept_outputs import Keep, KeptOutputs
from permtriton.running.layer_calls import CallContext, LayerCalls, as_it_is, find_chains, record_chain
from permtriton.running.sharding import is_spread
from permtriton.running.store import MEMORY, Store


@dataclass(frozen=True)
class LayerInputs:
    """The sites of a layer, and how to run what they read, on this rank's share of the sequences.

    Attributes:
        sites: the sites.
        parts: numbers of the sequences that run together, int64 ``[at most batch]`` each.
        run: runs as much of the model, on the sequences with such numbers, as gives each site its inputs.
        may_end: whether a run may be ended when every site's input has been seen.
        finish: says that the weights of some sites' linears are final, so that what they return may be kept.
    """

    sites: list[Site]
    parts: Sequence[Tensor]
    run: Callable[[Tensor], object]
    may_end: bool = True
    finish: Callable[[Iterable[Site]], None] = lambda _sites: None


LayerContext = Callable[[str], AbstractContextManager[None]]  # what the layer of a name runs in; "" is the model


def from_model(
    model: PreTrainedModel, sites: list[Site], samples: Samples, batch: int, layer_context: LayerContext = as_it_is
) -> LayerInputs:
    """Returns the inputs of sites as the model gives them, run from its start in the context ``layer_context("")``."""

    def run(rows: Tensor) -> None:
        with layer_context(""):
            last_hidden_state(model, samples[rows])

    parts = ranks.parts(torch.arange(len(samples)), batch)
    # FSDP2 cannot end a pass early. Of linears that run several times, the model may run some for nothing, which the
    # plan does not count.
    may_end = not any(map(is_spread, model.parameters())) and all(site.calls == 1 for site in sites)
    return LayerInputs(sites, parts, run, may_end)


def layer_by_layer(
    model: PreTrainedModel,
    plan: Plan,
    samples: Samples,
    batch: int,
    *,
    changing: bool,
    store: Store = MEMORY,
    layer_context: LayerContext = as_it_is,
    keep: Keep | None = None,
) -> Iterator[LayerInputs]:
    """Yields the inputs of each layer's sites, in order. All its parts must be run before the next one is asked for.

    Args:
        changing: whether the weights of a layer change before the next one is asked for: its inputs then follow from
            the new weights, which takes a second run of each layer.
        layer_context: what the layers, and the model, run in: there, the plan's weights may have other values.
        keep: keeps what linears return once their weights are final, so that each of their products is computed once
            however often the layer runs; None to keep nothing. What the model gives is never kept.
    """
    groups = plan.layers()
    names = _names(model, plan, groups)
    layers = {name: model.get_submodule(name) for name in names if name}
    weights = [linear_module(model, name).get_parameter("weight") for _, name in plan.linears()]
    chains = find_chains(model, layers, samples[:1], weights)[0] if len(layers) > 1 else []
    chain_of = {name: chain for chain in chains if len(chain) > 1 for name in chain}
    calls: dict[str, LayerCalls] = {}
    hidden, own = torch.empty(0), samples[ranks.own_rows(len(samples))]
    store = store.on(model.device)
    for name, sites in zip(names, groups, strict=True):
        if name not in chain_of:
            yield from_model(model, sites, samples, batch, layer_context)
            continue
        if name not in calls:
            with layer_context(""):
                calls, hidden = record_chain(model, {each: layers[each] for each in chain_of[name]}, own, store)
        layer = calls[name]
        with layer_context(name):
            layer.try_together(hidden)
        layer.together = all(ranks.gather(layer.together))  # each rank has tried samples of its own
        # Sequences that run one by one are parts of their own: a run may end when every site has been seen once.
        parts = torch.arange(len(own)).split(batch if layer.together else 1)
        if changing:
            kept = KeptOutputs(model, name, sites, keep)
            run = partial(_run, layer, hidden, None, store, partial(layer_context, name), kept.running)
            yield LayerInputs(sites, parts, run, finish=kept.finish)
            if name != chain_of[name][-1]:  # what follows runs in the model
                with layer_context(name):
                    hidden = layer.run(hidden, batch, store=store, call_context=partial(kept.running, last=True))
            kept.clear()
        else:
            outputs: list[Tensor] = []
            run = partial(_run, layer, hidden, outputs, store, partial(layer_context, name), as_it_is)
            yield LayerInputs(sites, parts, run, may_end=False)
            (hidden,) = outputs


def once_each(
    model: PreTrainedModel, plan: Plan, samples: Samples, batch: int, store: Store = MEMORY
) -> Iterator[LayerInputs]:
    """Yields what `layer_by_layer` does where weights do not change, and all that the model must give at once, last."""
    rest: list[Site] = []
    for layer in layer_by_layer(model, plan, samples, batch, changing=False, store=store):
        if layer.may_end:
            rest += layer.sites
        else:
            yield layer
    if rest:
        yield from_model(model, rest, samples, batch)


def _run(
    layer: LayerCalls,
    hidden: Tensor,
    outputs: list[Tensor] | None,
    store: Store,
    layer_context: Callable[[], AbstractContextManager[None]],
    call_context: CallContext,
    rows: Tensor,
) -> None:
    """Runs a layer on some sequences; the first run adds to ``outputs`` a tensor for all, which every run fills."""
    with layer_context():
        output = layer(hidden[rows], rows, call_context)
    if outputs is not None:
        if not outputs:
            outputs.append(store.empty((len(hidden), *output.shape[1:]), dtype=output.dtype))
        outputs[0][rows] = output.to(outputs[0].device)


def _names(model: nn.Module, plan: Plan, groups: Sequence[Sequence[Site]]) -> list[str]:
    """Returns, for each group of sites, the name of the layer that holds it all and no other group; else "".

    Also "" where other layers run the same linears: their inputs count, too.
    """
    layer_of = layer_names(model, plan)
    layers = []
    for sites in groups:
        names = {layer_of.get(linear_module(model, linear), "") for site in sites for linear in site.linears}
        layers.append(names.pop() if len(names) == 1 and all(site.calls == 1 for site in sites) else "")
    counts = Counter(layers)
    return [name if counts[name] == 1 else "" for name in layers]
