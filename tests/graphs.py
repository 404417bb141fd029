"""Graphs of every architecture, traced and compiled once for all tests of passes."""

import copy
import functools
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from permtriton.config import CommonConfig
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.swap_gains import RankOneCurvature
from permtriton.methods.prune.mask import mask_weights
from permtriton.model.experts import unstack_experts
from permtriton.passes.fused_layout import fused_plan
from permtriton.passes.graph import (
    NM_MASK,
    NORM_PERMUTE,
    PACK,
    PERMUTE,
    SITE,
    SPARSE_LINEAR,
    absorb_folds,
    copied,
    parameter_nodes,
)
from permtriton.passes.pipeline import Pass, permutation_passes, pruning_passes, run_passes
from permtriton.passes.plan import Plan, linear_module, weight_in_out
from permtriton.passes.provenance import Provenance, propagate
from permtriton.passes.sites import find_sites
from permtriton.passes.trace import trace
from permtriton.passes.weight_folds import moves_of
from permtriton.util.permutation import compose, identity

from . import zoo

# Each architecture folds, joins or transposes as none of the others does, and each layout occurs.
CASES = [
    ("llama", "fused"), ("gpt2", "fused"), ("bert", "portable"), ("gemma2", "fused"), ("phi3", "portable"),
    ("olmo2", "free"), ("mixtral", "portable"),
]  # fmt: skip
ALWAYS = ("llama", "gpt2", "olmo2")
every_case = pytest.mark.parametrize(
    ("name", "layout"),
    [case if case[0] in ALWAYS else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
BATCH = zoo.token_ids(1, 4)


def run(graph_module: fx.GraphModule) -> Tensor:
    with torch.no_grad():
        return graph_module(BATCH)[0]


def built(name: str) -> PreTrainedModel:
    if name in zoo.ARCHITECTURES:
        return zoo.build(name)
    model = zoo.build(name)
    unstack_experts(model)
    return model


@functools.cache
def traced(name: str) -> tuple[PreTrainedModel, fx.GraphModule, Provenance, Plan]:
    model = built(name)
    graph_module, outputs = trace(model)
    provenance = propagate(graph_module, outputs)
    return model, graph_module, provenance, find_sites(provenance, model, CommonConfig())


def planned(name: str, layout: str) -> tuple[PreTrainedModel, Plan, fx.GraphModule]:
    """Returns a shared model that must not be changed, a copy of its plan, and its graph."""
    model, graph_module, provenance, plan = traced(name)
    plan = copy.deepcopy(plan)
    if layout != "portable":
        plan = fused_plan(plan, provenance.linears, model, o_proj="free" if layout == "free" else "tied")
    return model, plan, graph_module


def private(name: str, layout: str) -> tuple[PreTrainedModel, Plan, fx.GraphModule]:
    """Returns a model that may be changed, its plan, and a graph over its own parameters."""
    model = built(name)
    graph_module = copied(traced(name)[1])
    for parameter, value in model.named_parameters():
        if parameter_nodes(graph_module).get(parameter) is not None:
            owner, _, attribute = parameter.rpartition(".")
            graph_module.get_submodule(owner).register_parameter(attribute, value)
    return model, planned(name, layout)[1], graph_module


def random_importances(plan: Plan, model: nn.Module, seed: int = 0) -> dict[str, ImportanceFactors]:
    """Returns factors of each form in turn: scale alone, squared weights, and sums of a row and a column factor."""
    generator = torch.Generator().manual_seed(seed)

    def factor(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    found = {}
    for number, (site, name) in enumerate(plan.linears()):
        more = (factor(weight_in_out(linear_module(model, name)).shape[1]), factor(site.channels))
        found[name] = ImportanceFactors(1 + number % 2, factor(site.channels), *(more if number % 3 == 0 else ()))
    return found


def random_curvatures(plan: Plan, model: nn.Module) -> dict[str, RankOneCurvature]:
    """Returns a curvature of the loss for each pruned linear, small enough not to outweigh the gradient."""
    generator, found = torch.Generator().manual_seed(1), {}
    for site, name in plan.linears():
        rows = weight_in_out(linear_module(model, name)).shape[1]
        row, column = (torch.rand(size, generator=generator) * 0.1 for size in (rows, site.channels))
        found[name] = RankOneCurvature(row, column)
    return found


def moved_importances(
    plan: Plan, model: nn.Module, indices: dict[str, Tensor], importances: dict[str, ImportanceFactors]
) -> dict[str, ImportanceFactors]:
    """Reorders importances from the channel order before ``indices`` were folded to the order after."""
    found = {}
    for site, name in plan.linears():
        order = site.expand(indices[site.space.name]) if site.space.name in indices else identity(site.channels)
        given, weight = importances[name], weight_in_out(linear_module(model, name))
        row = None if given.row is None else given.row[row_order(plan, indices, name, weight.shape[1])]
        column = None if given.column is None else given.column[order]
        found[name] = ImportanceFactors(given.power, given.scale[order], row, column)
    return found


def mask(model: nn.Module, plan: Plan, indices: dict[str, Tensor], importances: dict[str, ImportanceFactors]) -> None:
    """Zeroes what the importances, given in the order before ``indices`` were folded, do not keep."""
    mask_weights(model, plan, moved_importances(plan, model, indices, importances))


def row_order(plan: Plan, indices: dict[str, Tensor], name: str, rows: int) -> Tensor:
    """The order that folding ``indices`` gives the rows of a linear's weight."""
    order = identity(rows)
    for space in plan.spaces:
        for axis in space.axes:
            if axis.parameter == f"{name}.weight" and not axis.is_input and space.name in indices:
                order = compose(order, axis.expand(indices[space.name]))
    return order


@dataclass
class Compiled:
    """The result of the whole compiler on a model, and of each pass on the way."""

    model: PreTrainedModel
    plan: Plan
    indices: dict[str, Tensor]
    importances: dict[str, ImportanceFactors]
    graph_module: fx.GraphModule
    permuted: dict[str, int] = field(default_factory=dict)  # node counts after the permutation passes
    passes: list[str] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)  # before the first pass, and after each
    printed: list[str] = field(default_factory=list)


@functools.cache
def compiled(name: str, layout: str) -> Compiled:
    model, plan, graph_module = private(name, layout)
    indices, importances = zoo.random_indices(plan), random_importances(plan, model)
    found = Compiled(model, plan, indices, importances, graph_module, outputs=[run(graph_module)])

    def after_all(passes: tuple[Pass, ...], graph_module: fx.GraphModule) -> fx.GraphModule:
        for apply in passes:
            graph_module = run_passes(graph_module, [apply])
            graph_module.graph.lint()
            found.passes.append((apply.func if isinstance(apply, functools.partial) else apply).__name__)
            found.outputs.append(run(graph_module))
            found.printed.append(graph_module.print_readable(print_output=False))
        return graph_module

    permuted = after_all(permutation_passes(moves_of(plan, indices)), graph_module)
    found.permuted = counted(permuted)
    zoo.fold(model, plan, indices)
    passes = pruning_passes(plan, moved_importances(plan, model, indices, importances))
    found.graph_module = after_all(passes, absorb_folds(permuted))
    return found


def counted(graph_module: fx.GraphModule) -> dict[str, int]:
    nodes = list(graph_module.graph.nodes)
    sparse = [node for node in nodes if node.target is SPARSE_LINEAR]
    return {
        "folded": sum(node.target is PERMUTE and SITE not in node.meta for node in nodes),
        "activations": sum(node.target is PERMUTE and SITE in node.meta for node in nodes),
        "norms": sum(node.target is NORM_PERMUTE for node in nodes),
        "gathers": sum(node.args[4] is not None for node in sparse),
        "sparse": len(sparse),
        "packs": sum(node.target is PACK for node in nodes),
        "masks": sum(node.target is NM_MASK for node in nodes),
    }
