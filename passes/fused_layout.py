"""Layout ``fused``: which sites get a separate permutation, and where it is gathered at run time."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx, nn

from permtriton.config import OProj
from permtriton.model.experts import stacked_name
from permtriton.model.norms import match_norm
from permtriton.passes.graph import WEIGHT_PRODUCTS, module_path, norm_input, source_of
from permtriton.passes.graph_values import Products
from permtriton.passes.plan import Axis, ChannelSpace, Destination, Norm, Plan, Site
from permtriton.passes.untraced import untraced_reach
from permtriton.util.permutation import identity


def fused_plan(plan: Plan, linears: Mapping[str, Products], model: nn.Module, *, o_proj: OProj = "tied") -> Plan:
    """Returns the plan of layout ``fused``, in which every site has its own permutation.

    A site that is the only reader of a space that may move (``down``; ``o``, within its heads) keeps this space, whose
    permutation is folded. Every other site gets a separate space, gathered in the norm before the site if only
    linears read the norm's output, else before each of the site's linears. A site keeps its order if neither the norm
    nor the linears can gather; if no site of a space can gather, all of them keep the space.

    Args:
        plan: Plan of layout ``portable``; its sites are changed.
        linears: Weight -> all products with it in the graph.
        o_proj: With ``free``, a site whose channels have copies or may move only within heads gets its own space, too.
    """
    barriers = list(plan.barriers)
    own_spaces = _OwnSpaces(linears, model, plan.untraced)
    readers = Counter(id(site.space) for site in plan.sites)  # a mixture has thousands of sites
    needed = {site.name for site in plan.sites if site.space.frozen or readers[id(site.space)] > 1}
    own_orders: dict[str, ChannelSpace | str] = {}  # site -> its own space, or why it cannot have one
    for site in plan.sites:
        within_heads = len(site.space.segments) > 1 or site.copies > 1
        if site.name in needed or (within_heads and o_proj == "free"):
            own_orders[site.name] = own_spaces.own_space(site)
    gathered = {id(site.space) for site in plan.sites if isinstance(own_orders.get(site.name), ChannelSpace)}
    for site in plan.sites:
        own = own_orders.get(site.name, "")
        if isinstance(own, str) and site.name in needed and (site.space.frozen or id(site.space) in gathered):
            own = ChannelSpace(site.name, (site.channels,), (), Destination.NONE, site.space.reason or own)
        if isinstance(own, ChannelSpace):
            site.space, site.units = own, identity(site.channels)
        elif own and site.name not in needed:
            barriers.append(f"{site.name} stays within its heads: {own}")
    spaces = {id(site.space): site.space for site in plan.sites}  # in order of first use
    hidden_site = plan.hidden_site if plan.hidden_site and id(plan.hidden_site.space) in spaces else None
    return replace(plan, spaces=list(spaces.values()), barriers=barriers, hidden_site=hidden_site)


class _OwnSpaces:
    """Makes spaces for single sites, where a norm or the linears of a model can gather.

    Args:
        untraced: Names of the parameters that the trace did not use.
    """

    def __init__(self, linears: Mapping[str, Products], model: nn.Module, untraced: Sequence[str]) -> None:
        self._linears, self._model, self._untraced = linears, model, untraced
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._names = Counter(id(module) for module in self._modules.values())  # a shared module has several
        self._owners = Counter(id(p) for module in self._modules.values() for p in module._parameters.values())
        self._calls: dict[str, set[str]] = defaultdict(set)  # module name -> its calls in the trace
        self._uses: Counter[str] = Counter()  # parameter or buffer -> number of nodes that read it
        for node in next(iter(linears.values())).nodes[0].graph.nodes:
            self._uses.update(str(source.target) for source in node.all_input_nodes if source.op == "get_attr")
            if stack := list(node.meta.get("nn_module_stack") or {}):
                self._calls[module_path(node)].add(stack[-1])

    def own_space(self, site: Site) -> ChannelSpace | str:
        """Returns a space for a site alone, or the reason why it cannot have one."""
        norm, readers = self._norm_before(site)
        fixed = [name for name in site.linears if not self._may_gather(name)]
        if norm is None and fixed:
            return (
                f"no norm before it can gather, and neither can {fixed[0]} itself (a Conv1D, one of stacked experts, "
                "part of a layer of torch.nn, or a linear with hooks or a shared weight)"
            )
        units = identity(site.channels)
        roles = torch.zeros_like(units)
        axes = [Axis(name, self._linears[name].in_dim, units, roles, is_input=True) for name in readers]
        placement = Destination.IN_NORM if norm else Destination.GATHER
        return ChannelSpace(site.name, (site.channels,), tuple(axes), placement, norm=norm)

    def _may_gather(self, name: str) -> bool:
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

    def _norm_before(self, site: Site) -> tuple[Norm | None, list[str]]:
        """Finds the norm before a site, if only linears read the norm's output.

        Returns:
            The norm, or None if there is none that can gather; and the names of the weights that read the channels:
            those of the site, and those of other linears that read the norm's output.
        """
        weights = [f"{name}.weight" for name in site.linears]
        source, *others = {source for weight in weights for source in self._linears[weight].sources}
        path, readers = module_path(source), self._weights_that_read(source)
        norm = self._modules.get(path) if path else None
        if others or norm is None or readers is None or source.meta["val"].shape[-1] != site.channels:
            return None, weights
        runs_once = len(self._calls[path]) == self._names[id(norm)] == 1
        norm_source, variant = norm_input(source, path), match_norm(norm, site.channels)
        if not runs_once or norm_source is None or variant is None or self._may_be_bypassed(path):
            return None, weights
        dtype_source = norm.get_parameter("weight") if variant.kind == "rms" else norm_source.meta["val"]
        if source.meta["val"].dtype != dtype_source.dtype:
            return None, weights  # with mixed dtypes, the norm rounds differently from the one that would replace it
        if untraced_reach(self._model, self._untraced, [f"{path}.weight", *readers], [site]):
            return None, weights  # what the trace did not run may read the norm's output, too
        return Norm(path, variant), list(dict.fromkeys([*weights, *readers]))

    def _weights_that_read(self, source: fx.Node) -> list[str] | None:
        """Returns the names of the weights of the linears that read ``source``.

        Returns None if anything else reads ``source``, or if one of the weights is also used elsewhere.
        """
        plain_products = {
            node: weight
            for weight, products in self._linears.items()
            if source in products.sources and self._uses[weight] == 1 and self._model.get_parameter(weight).ndim == 2
            for node in products.nodes
            if node.target in WEIGHT_PRODUCTS
        }
        weights: list[str] = []
        waiting = [source]
        while waiting:
            for user in waiting.pop().users:
                if user in plain_products:
                    weights.append(plain_products[user])
                elif source_of(user) is source:
                    waiting.append(user)
                else:
                    return None
        return weights
