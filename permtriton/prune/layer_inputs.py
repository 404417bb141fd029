"""What gives the sites of each layer their inputs, layer after layer, in a time that is linear in the depth.

Layers that form a chain run one by one on the outputs of the layer before, which stay on the CPU. What is in no chain
gets its inputs from the model, which then runs from its start.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.model.forward import last_hidden_state
from permtriton.model.plan import Plan, Site, layer_modules, linear_module
from permtriton.prune.layer_calls import LayerCalls, find_chains, record_chain


@dataclass(frozen=True)
class LayerInputs:
    """The sites of a layer, and how to run what they read.

    Attributes:
        sites: the sites.
        parts: numbers of the sequences that run together, int64 ``[at most batch]`` each.
        run: runs as much of the model, on the sequences with such numbers, as gives each site its inputs.
        may_end: whether a run may be ended when every site's input has been seen.
    """

    sites: list[Site]
    parts: Sequence[Tensor]
    run: Callable[[Tensor], object]
    may_end: bool = True


def from_model(model: PreTrainedModel, sites: list[Site], ids: Tensor, batch: int) -> LayerInputs:
    """Returns the inputs of sites as the model gives them, run from its start.

    Args:
        model: model to run.
        sites: sites to watch.
        ids: int64 ``[sequences, tokens]``.
        batch: sequences per forward pass.
    """
    parts = torch.arange(ids.shape[0]).split(batch)
    return LayerInputs(sites, parts, lambda rows: last_hidden_state(model, ids[rows]))


def layer_by_layer(
    model: PreTrainedModel, plan: Plan, ids: Tensor, batch: int, *, changing: bool
) -> Iterator[LayerInputs]:
    """Yields the inputs of each layer's sites, in order. All its parts must be run before the next one is asked for.

    Args:
        model: model to run.
        plan: the model's plan.
        ids: int64 ``[sequences, tokens]``.
        batch: sequences per forward pass.
        changing: whether the weights of a layer change before the next one is asked for: its inputs then follow from
            the new weights, which takes a second run of each layer.
    """
    groups = plan.layers()
    names = _names(model, plan, groups)
    layers = {name: model.get_submodule(name) for name in names if name}
    weights = [linear_module(model, name).get_parameter("weight") for _, name in plan.linears()] if changing else []
    chains = find_chains(model, layers, ids[:1], weights)[0] if len(layers) > 1 else []
    chain_of = {name: chain for chain in chains if len(chain) > 1 for name in chain}
    calls: dict[str, LayerCalls] = {}
    hidden = torch.empty(0)
    for name, sites in zip(names, groups, strict=True):
        if name not in chain_of:
            yield from_model(model, sites, ids, batch)
            continue
        if name not in calls:
            calls, hidden = record_chain(model, {each: layers[each] for each in chain_of[name]}, ids)
        layer = calls[name]
        layer.try_together(hidden)
        # Sequences that run one by one are parts of their own: a run may end when every site has been seen once.
        parts = torch.arange(len(ids)).split(batch if layer.together else 1)
        if changing:
            yield LayerInputs(sites, parts, partial(_run, layer, hidden, None))
            hidden = layer.run(hidden, batch)
        else:
            outputs = torch.empty_like(hidden)
            yield LayerInputs(sites, parts, partial(_run, layer, hidden, outputs), may_end=False)
            hidden = outputs


def _run(layer: LayerCalls, hidden: Tensor, outputs: Tensor | None, rows: Tensor) -> None:
    found = layer(hidden[rows], rows)
    if outputs is not None:
        outputs[rows] = found.to(outputs.device)


def _names(model: nn.Module, plan: Plan, groups: Sequence[Sequence[Site]]) -> list[str]:
    """Returns, for each group of sites, the name of the layer that holds it all and no other group; else "".

    Also "" where other layers run the same linears: their inputs count, too.
    """
    modules = {module: name for name, module in model.named_modules()}
    layer_of = {part: modules[layer] for layer in layer_modules(model, plan) for part in layer.modules()}
    found = []
    for sites in groups:
        names = {layer_of.get(linear_module(model, linear), "") for site in sites for linear in site.linears}
        found.append(names.pop() if len(names) == 1 and all(site.calls == 1 for site in sites) else "")
    counts = Counter(found)
    return [name if counts[name] == 1 else "" for name in found]
