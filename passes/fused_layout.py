"""Layout ``fused``: which sites get a permutation of their own, and where it is gathered at run time."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import fx, nn

from permtriton.config import OProj
from permtriton.model.experts import stacked_name
from permtriton.model.norms import match_norm
from permtriton.passes.graph import WEIGHT_PRODUCTS, module_path, norm_input, source_of
from permtriton.passes.graph_values import LinearCall
from permtriton.passes.plan import Axis, ChannelSpace, Destination, Norm, Plan, Site
from permtriton.passes.untraced import untraced_reach
from permtriton.util.permutation import identity


def fused_plan(plan: Plan, linears: Sequence[LinearCall], model: nn.Module, *, o_proj: OProj = "tied") -> Plan:
    """Returns the plan of layout ``fused``, in which every site has its own permutation.

    A site that is the only reader of a space that may move (``down``; ``o``, within its heads) keeps this space, whose
    permutation is folded. Every other site gets a space of its own, gathered in the norm before the site if only
    linears read the norm's output, else before each of the site's linears. A site keeps its order if neither the norm
    nor the linears can gather; if this is so for all sites of a space, they keep the space.

    Args:
        plan: Plan of layout ``portable``; its sites are changed.
        linears: All products with a weight in the graph.
        o_proj: With ``free``, a site whose channels have copies or may move only within heads gets its own space, too.
    """
    shared = {id(space) for space in plan.spaces if len(plan.sites_of(space)) > 1}
    barriers = list(plan.barriers)
    finder = _NormFinder(linears, model, plan.untraced)
    needed = {site.name for site in plan.sites if site.space.frozen or id(site.space) in shared}
    within_heads = {site.name for site in plan.sites if len(site.space.segments) > 1 or site.copies > 1}
    own_orders = {
        site.name: _own_space(finder, site)
        for site in plan.sites
        if site.name in needed or (site.name in within_heads and o_proj == "free")
    }
    gathered = {id(site.space) for site in plan.sites if isinstance(own_orders.get(site.name), ChannelSpace)}
    for site in plan.sites:
        space_or_reason = own_orders.get(site.name)
        if isinstance(space_or_reason, ChannelSpace):
            site.space, site.units = space_or_reason, identity(site.channels)
        elif space_or_reason and site.name in needed and (site.space.frozen or id(site.space) in gathered):
            reason = site.space.reason or space_or_reason
            site.space = ChannelSpace(site.name, (site.channels,), (), Destination.NONE, reason)
            site.units = identity(site.channels)
        elif space_or_reason and site.name not in needed:
            barriers.append(f"{site.name} stays within its heads: {space_or_reason}")
    spaces = {id(site.space): site.space for site in plan.sites}  # in order of first use
    hidden_site = plan.hidden_site if plan.hidden_site and id(plan.hidden_site.space) in spaces else None
    return Plan(plan.sites, list(spaces.values()), plan.patterns, plan.skipped, barriers, hidden_site, plan.untraced)


def _own_space(finder: "_NormFinder", site: Site) -> ChannelSpace | str:
    """Returns a space for a site alone, or the reason why it cannot have one."""
    norm, readers = finder.norm_before(site)
    fixed = [name for name in site.linears if not finder.may_gather(name)]
    if norm is None and fixed:
        return (
            f"no norm before it can gather, and neither can {fixed[0]} itself (a Conv1D, one of stacked experts, part "
            "of a layer of torch.nn, or a linear with hooks or a shared weight)"
        )
    units = identity(site.channels)
    parameters = [*(f"{name}.weight" for name in site.linears), *readers]
    axes = [Axis(name, finder.in_dims[name], units, torch.zeros_like(units), is_input=True) for name in parameters]
    placement = Destination.IN_NORM if norm else Destination.GATHER
    return ChannelSpace(site.name, (site.channels,), tuple(axes), placement, norm=norm)


class _NormFinder:
    """Finds which norms and linears of a model can gather.

    Args:
        untraced: Names of the parameters that the trace did not use.

    Attributes:
        in_dims: Weight -> its dimension that is contracted.
    """

    def __init__(self, linears: Sequence[LinearCall], model: nn.Module, untraced: Sequence[str]) -> None:
        self.in_dims = {call.parameter: call.in_dim for call in linears}
        self._linears, self._model, self._untraced = linears, model, untraced
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._names = Counter(id(module) for module in self._modules.values())  # a shared module has several
        self._owners = Counter(id(p) for module in self._modules.values() for p in module._parameters.values())
        self._calls: dict[str, set[str]] = defaultdict(set)  # module name -> its calls in the trace
        self._uses: Counter[str] = Counter()  # parameter or buffer -> number of nodes that read it
        for node in linears[0].node.graph.nodes:
            self._uses.update(str(source.target) for source in node.all_input_nodes if source.op == "get_attr")
            if stack := list(node.meta.get("nn_module_stack") or {}):
                self._calls[module_path(node)].add(stack[-1])

    def may_gather(self, name: str) -> bool:
        """Whether a linear can be replaced by one that gathers: an ``nn.Linear``, not bypassed, hooked or shared."""
        module = self._modules[name]
        if type(module) is not nn.Linear or stacked_name(self._model, name) is not None or self._may_be_bypassed(name):
            return False
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        return not hooked and self._owners[id(module.weight)] == 1

    def _may_be_bypassed(self, name: str) -> bool:
        """Whether a module belongs to a layer of ``torch.nn``, which may read its weights instead of calling it."""
        parent = self._modules[name.rpartition(".")[0]]
        container = isinstance(parent, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        return type(parent).__module__.startswith("torch.nn.") and not container

    def norm_before(self, site: Site) -> tuple[Norm | None, list[str]]:
        """Finds the norm before a site, if only linears read the norm's output.

        Returns:
            The norm, or None if there is none that can gather; and the names of the weights of linears outside the site
            that read the norm's output.
        """
        weights = {f"{name}.weight" for name in site.linears}
        sources = {call.source for call in self._linears if call.parameter in weights}
        if len(sources) != 1:
            return None, []
        source = sources.pop()
        path = module_path(source)
        norm, readers = self._modules.get(path), self._weights_that_read(source)
        if not path or norm is None or readers is None or source.meta["val"].shape[-1] != site.channels:
            return None, []
        norm_source = norm_input(source, path)
        runs_once = len(self._calls[path]) == self._names[id(norm)] == 1
        if not runs_once or norm_source is None or self._may_be_bypassed(path):
            return None, []
        variant = match_norm(norm, site.channels)
        if variant is None:
            return None, []
        dtype_source = norm.get_parameter("weight") if variant.kind == "rms" else norm_source.meta["val"]
        if source.meta["val"].dtype != dtype_source.dtype:
            return None, []  # with mixed dtypes, the norm rounds differently from the one that would replace it
        if untraced_reach(self._model, self._untraced, [f"{path}.weight", *readers, *weights], [site]):
            return None, []  # what the trace did not run may read the norm's output, too
        return Norm(path, variant), [r for r in readers if r not in weights]

    def _weights_that_read(self, source: fx.Node) -> list[str] | None:
        """Returns the names of the weights of the linears that read ``source``.

        Returns None if anything else reads ``source``, or if one of the weights is also used elsewhere.
        """
        calls = {call.node: call.parameter for call in self._linears if call.source is source}
        weights: list[str] = []
        waiting = [source]
        while waiting:
            for user in waiting.pop().users:
                weight = calls.get(user)
                if weight is None and source_of(user) is source:
                    waiting.append(user)
                elif (
                    weight is None
                    or user.target not in WEIGHT_PRODUCTS
                    or self._model.get_parameter(weight).ndim != 2
                    or self._uses[weight] > 1
                ):
                    return None
                else:
                    weights.append(weight)
        return weights
