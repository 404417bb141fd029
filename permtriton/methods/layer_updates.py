"""Changes the linears layer by layer, with the Hessians of their inputs measured in the model as changed so far."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from permtriton.methods.measure.statistics import hessians
from permtriton.methods.run import Run
from permtriton.passes.plan import Site, linear_module, weight_in_out
from permtriton.running.layer_walk import LayerWalk
from permtriton.running.resume import FinishedLayers
from permtriton.util import ranks

Curved = TypeVar("Curved")
Update = Callable[[nn.Module, Curved, str, str], dict[str, Any] | None]


@torch.no_grad()
def update_layers(
    run: Run,
    step: str,
    curvatures: Callable[[Mapping[str, Tensor]], Callable[[str], Curved]],
    update: Update[Curved],
) -> list[dict[str, Any]]:
    """Changes the linears layer by layer; finished layers are stored so that an interrupted run can continue.

    Args:
        step: name of the step.
        curvatures: takes a layer's Hessians by site; returns the function site name -> curvature for ``update``.
        update: changes one linear, given the model, the curvature of its site, and the names of the site and the
            linear; returns the linear's entry in the step's report, or None.

    Returns:
        The entries of all linears.
    """
    plan, state, parts = run.plan, run.state(FinishedLayers, step), list[dict[str, Any]]()
    num_sequences = ranks.own_rows(len(run.samples)).numel()
    steps = (num_sequences + 1) * len(plan.layers())
    with run.placed_model_for_fit() as model, run.progress.stage(step, steps) as advance:
        walk = LayerWalk(model, plan, run.samples, run.batch_size, run.store)
        for number, layer in enumerate(walk.walk_and_change()):
            weights = weights_of_sites(model, layer.sites)
            if state is not None and (restored_parts := state.restore(number, weights, plan.patterns)) is not None:
                parts += restored_parts
                advance(num_sequences + 1)
                continue
            linears = [(site.name, name) for site in layer.sites for name in site.linears]
            results = ranks.deal(linears, _updating(model, curvatures(hessians(model, layer, advance)), update))
            ranks.send_dealt([linear_module(model, name).get_parameter("weight") for _, name in linears])
            new_parts = [part for part in results if part is not None]
            if state is not None:
                state.keep(number, weights, plan.patterns, new_parts)
            parts += new_parts
            advance()
    return parts


def _updating(
    model: nn.Module, curvature_of: Callable[[str], Curved], update: Update[Curved]
) -> Callable[[tuple[str, str]], dict[str, Any] | None]:
    return lambda linear: update(model, curvature_of(linear[0]), *linear)


def weights_of_sites(model: nn.Module, sites: Iterable[Site]) -> dict[str, Tensor]:
    """Returns linear -> its weight, ``[in_features, out_features]``, for all linears that read ``sites``."""
    return {name: weight_in_out(linear_module(model, name)) for site in sites for name in site.linears}
