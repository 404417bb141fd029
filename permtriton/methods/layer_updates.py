"""Changes the linears layer by layer, with the Hessians of their inputs measured in the model as changed so far."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from permtriton.kernels.packing import pack, unpack_reference
from permtriton.methods.measure.statistics import hessians
from permtriton.methods.prune.sparsegpt_math import Curvature
from permtriton.methods.run import Run
from permtriton.passes.plan import Plan, Site, linear_module, weight_in_out
from permtriton.running.resume import StateFile
from permtriton.util import ranks

# Changes a linear, given the curvature of its site and the names of site and linear; returns its entry in the report.
Update = Callable[[Curvature, str, str], dict[str, Any] | None]


@torch.no_grad()
def update_layers(run: Run, step: str, update: Update) -> list[dict[str, Any]]:
    """Changes the linears layer by layer, and returns their entries in the report of the step with this name.

    Finished layers are stored, so that an interrupted run can continue.
    """
    state, parts = run.state(step), list[dict[str, Any]]()
    num_sequences = ranks.own_rows(len(run.samples)).numel()
    steps = (num_sequences + 1) * len(run.plan.layers())
    with run.placed_model_for_fit() as model, run.progress.stage(step, steps) as advance:
        for number, layer in enumerate(run.walk(model).walk_and_change()):
            layer_state = state.of_layer(number)
            layer_parts = read_layer(layer_state, model, run.plan, layer.sites)
            if layer_parts is None:
                layer_parts = update_linears(model, layer.sites, hessians(model, layer, advance), update)
                write_layer(layer_state, model, run.plan, layer.sites, layer_parts)
                advance()
            else:
                advance(num_sequences + 1)
            parts += layer_parts
    return parts


def update_linears(
    model: nn.Module, sites: Iterable[Site], hessian_by_site: Mapping[str, Tensor], update: Update
) -> list[dict[str, Any]]:
    """Changes the linears of ``sites``, a share of them on each rank, and returns their entries in the report.

    Consecutive linears of a site share its curvature; only one site's curvature is in memory.
    """
    curvature_of = lru_cache(maxsize=1)(lambda site: Curvature(hessian_by_site[site], site))
    linears = [(site.name, name) for site in sites for name in site.linears]
    parts = ranks.deal(linears, lambda linear: update(curvature_of(linear[0]), *linear))
    ranks.send_dealt([linear_module(model, name).get_parameter("weight") for _, name in linears])
    return [part for part in parts if part is not None]


def write_layer(
    state: StateFile, model: nn.Module, plan: Plan, sites: Sequence[Site], parts: Sequence[dict[str, Any]]
) -> None:
    """Stores the pruned weights of a layer, packed, and what the step reports of the layer."""
    tensors: dict[str, Tensor] = {}
    if state.path is not None and not ranks.number():  # the first rank writes
        for name, weight in _weights(model, sites).items():
            values, positions = pack(weight.T.contiguous(), plan.patterns[name])
            tensors |= {f"{name}.values": values, f"{name}.positions": positions}
    state.write(tensors, parts=parts)


def read_layer(state: StateFile, model: nn.Module, plan: Plan, sites: Sequence[Site]) -> list[dict[str, Any]] | None:
    """Copies a stored layer into the model, and returns what the step reports of the layer; None if none is stored."""
    if (saved_state := state.read()) is None:
        return None
    tensors, report = saved_state
    for name, weight in _weights(model, sites).items():
        values, positions = tensors[f"{name}.values"], tensors[f"{name}.positions"]
        weight.copy_(unpack_reference(values, positions, len(weight), plan.patterns[name]).T)
    return report["parts"]


def _weights(model: nn.Module, sites: Sequence[Site]) -> dict[str, Tensor]:
    """Returns linear -> its weight, ``[in_features, out_features]``, for all linears that read ``sites``."""
    return {name: weight_in_out(linear_module(model, name)) for site in sites for name in site.linears}
