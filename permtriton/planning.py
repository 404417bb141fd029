"""From a model to its plan: traced, followed by channels, divided into sites; and what a plan says of the outputs."""

from collections.abc import Mapping

import torch
from torch import Tensor, fx
from transformers import PreTrainedModel

from permtriton.config import CompileConfig, Layout, OProj
from permtriton.errors import ModelError
from permtriton.experts import unstacked_experts
from permtriton.passes.layout import separate
from permtriton.passes.provenance import propagate
from permtriton.passes.sites import find_sites
from permtriton.placement import is_packed, is_permuted
from permtriton.plan import Axis, Plan
from permtriton.sparsity import NMPattern
from permtriton.trace import trace


def find_plan(
    model: PreTrainedModel,
    pattern: NMPattern,
    *,
    skip_indivisible: bool = False,
    layout: Layout = "portable",
    o_proj: OProj = "tied",
) -> Plan:
    """Traces a model, on any device including meta, and finds its sites.

    Raises:
        ModelError: the model cannot be traced or holds a linear that the pattern does not fit.
    """
    config = CompileConfig(
        sparsity=pattern, permutation="none", skip_indivisible=skip_indivisible, layout=layout, o_proj=o_proj
    )
    return plan_model(model, config)[0]


def plan_model(model: PreTrainedModel, config: CompileConfig) -> tuple[Plan, fx.GraphModule]:
    """Returns the plan, and the graph that it was made from; see `find_plan`."""
    with unstacked_experts(model) as experts:
        traced = trace(model)
        provenance = propagate(traced.graph_module, traced.outputs, traced.hidden)
        skip = config.skip_indivisible
        plan = find_sites(provenance, model, traced.hidden_node, config.sparsity, skip_indivisible=skip)
        if config.layout == "fused":
            plan = separate(plan, traced.graph_module, model, o_proj=config.o_proj)
    plan.skipped.update(experts.refused)
    return plan, traced.graph_module


def hidden_order(plan: Plan, indices: Mapping[str, Tensor]) -> Tensor | None:
    """Returns the index of the last hidden state's channels after folding ``indices``, or None where they stayed."""
    space, units = plan.hidden_space, plan.hidden_units
    if space is None or space.frozen:
        return None
    return Axis("", 0, units, torch.zeros_like(units), reads=False).expand(indices[space.name])


def check_not_compiled(model: PreTrainedModel) -> None:
    """Refuses a model that permutes channels at run time, or holds packed weights: it is no dense model.

    Raises:
        ModelError: naming the first such module.
    """
    for name, module in model.named_modules():
        if is_permuted(module) or is_packed(module):
            raise ModelError(
                f"this model is compiled already ({name} is a {type(module).__name__}): compile the original model "
                "instead"
            )
