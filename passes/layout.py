"""The two layouts of a plan: which permutations are folded, and which work at run time."""

import torch
from torch import fx, nn

from permtriton.config import OProj
from permtriton.experts import stacked_name
from permtriton.modules import match_norm
from permtriton.passes.graph import (
    PRODUCTS,
    argument,
    input_dim,
    module_path,
    parameter_node,
    products,
    source_of,
    tail,
)
from permtriton.plan import Axis, ChannelSpace, Norm, Plan, Site


def separate(plan: Plan, graph_module: fx.GraphModule, model: nn.Module, *, o_proj: OProj = "tied") -> Plan:
    """Returns the plan of layout ``fused``: every site has its own permutation.

    A site that alone reads channels that fold freely (``down``; ``o``, within its heads) keeps folding. Every other
    site gets a space of its own, gathered in the norm before it where that norm's output goes to linears only, else
    before each of its linears.

    Args:
        plan: of layout ``portable``; its sites are changed.
        graph_module: the traced graph.
        model: the model, for its norms.
        o_proj: ``free`` gives a site whose channels are tied or kept within heads a permutation over all of them, too.
    """
    shared = {id(space) for space in plan.spaces if len(plan.sites_of(space)) > 1}
    spaces: list[ChannelSpace] = []
    barriers = list(plan.barriers)
    for site in plan.sites:
        within_heads = len(site.space.segments) > 1
        needed = bool(site.space.frozen) or id(site.space) in shared
        if needed or (within_heads and o_proj == "free"):
            reason = _give_own_space(graph_module, model, site)
            if reason and needed:
                site.space = ChannelSpace(site.name, (), (), site.space.frozen or reason)
            elif reason:
                barriers.append(f"{site.name} stays within its heads: {reason}")
        if not any(site.space is space for space in spaces):
            spaces.append(site.space)
    moves = any(space is plan.hidden_space for space in spaces)
    hidden = (plan.hidden_space, plan.hidden_units) if moves else (None, torch.empty(0, dtype=torch.int64))
    return Plan(plan.sites, spaces, plan.skipped, barriers, *hidden)


def _give_own_space(graph_module: fx.GraphModule, model: nn.Module, site: Site) -> str:
    """Gives a site a space of its own and returns an empty text, or returns why it cannot have one."""
    norm, readers = _norm_before(graph_module, model, site)
    fixed = [name for name in site.linears if not _may_gather(model, name)]
    if norm is None and fixed:
        return f"no norm before it can gather, and neither can {fixed[0]} itself (a Conv1D, or one of stacked experts)"
    site.norm = norm
    site.space, site.units = _own_space(graph_module, site, readers), torch.arange(site.channels)
    return ""


def _may_gather(model: nn.Module, name: str) -> bool:
    return type(model.get_submodule(name)) is nn.Linear and stacked_name(model, name) is None


def _own_space(graph_module: fx.GraphModule, site: Site, readers: list[str]) -> ChannelSpace:
    """A space of one site, whose only axes are the columns of what reads it."""
    units = torch.arange(site.channels)
    axes = []
    for parameter in [*(f"{name}.weight" for name in site.linears), *readers]:
        node = parameter_node(graph_module, parameter)
        assert node is not None
        axes.append(Axis(parameter, input_dim(node), units, torch.zeros_like(units), reads=True))
    return ChannelSpace(site.name, (site.channels,), tuple(axes), at_run_time=True)


def _norm_before(graph_module: fx.GraphModule, model: nn.Module, site: Site) -> tuple[Norm | None, list[str]]:
    """Finds the norm whose output only linears read, and the weights of those that are not the site's own."""
    calls = [call for name in site.linears for call in _calls(graph_module, f"{name}.weight")]
    sources = {source_of(argument(call, PRODUCTS[call.target])) for call in calls}
    if len(sources) != 1:
        return None, []
    source = sources.pop()
    path = module_path(source)
    readers = _only_weights_that_read(source)
    if not path or readers is None or source.meta["val"].shape[-1] != site.channels:
        return None, []
    if len({key for node in graph_module.graph.nodes if module_path(node) == path for key in _stack_key(node)}) != 1:
        return None, []  # the module runs more than once
    norm = model.get_submodule(path)
    variant = match_norm(norm, site.channels)
    if variant is None:
        return None, []
    own = {f"{name}.weight" for name in site.linears}
    return Norm(path, variant.kind, variant.eps, variant.offset), [r for r in readers if r not in own]


def _calls(graph_module: fx.GraphModule, parameter: str) -> list[fx.Node]:
    node = parameter_node(graph_module, parameter)
    return [call for call, _ in products(node)] if node else []


def _only_weights_that_read(source: fx.Node) -> list[str] | None:
    """The weights of the linears behind ``source``, or None where anything else reads it, or one of them elsewhere."""
    found: list[str] = []
    waiting = [source]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if source_of(user) is source and user is not source:
                waiting.append(user)
                continue
            if user.target not in PRODUCTS or user.args[PRODUCTS[user.target]] is not node:
                return None
            weight = user.args[PRODUCTS[user.target] + 1]
            while isinstance(weight, fx.Node) and weight.op == "call_function" and weight.args:
                weight = weight.args[0]
            if not isinstance(weight, fx.Node) or weight.op != "get_attr" or weight.meta["val"].ndim != 2:
                return None
            if [call for call, _ in products(weight)] != [user] or len(tail(weight).users) != 1:
                return None
            found.append(str(weight.target))
    return found


def _stack_key(node: fx.Node) -> list[str]:
    return list(node.meta.get("nn_module_stack") or {})[-1:]
