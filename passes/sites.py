"""From channel provenance to the plan: the sites, their channel spaces, and which linears stay dense and why."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, fx, nn

from permtriton.config import CommonConfig
from permtriton.errors import ModelError, reasons_of
from permtriton.model.modules import LINEAR_MODULES
from permtriton.model.name import shared_parts
from permtriton.passes.graph import module_class, one_thread
from permtriton.passes.graph_values import Products
from permtriton.passes.plan import Axis, ChannelSpace, Destination, Plan, Site, layer_of
from permtriton.passes.provenance import Provenance
from permtriton.passes.residual import residual_finder
from permtriton.passes.routed import ranked_products, routed_nodes
from permtriton.passes.select_linears import check_own_patterns, left_out, own_patterns
from permtriton.passes.untraced import untraced_reach
from permtriton.util.sparsity import NMPattern

OUTSIDE = "does not feed the last hidden state (output head or pooler)"


@one_thread()
def find_sites(provenance: Provenance, model: nn.Module, config: CommonConfig) -> Plan:
    """Decides which linears are pruned, groups them into sites and finds each site's permutable channels.

    Only linears that feed the last hidden state are pruned.
    """
    owners = {products.owner for products in provenance.linears.values()}
    modules = model.named_modules(remove_duplicate=False)
    # the linears, and other modules whose weight the graph multiplies by, such as an embedding that is also the head
    linears = {name: module for name, module in modules if name in owners or isinstance(module, LINEAR_MODULES)}
    skipped = left_out(linears, config.targets, config.ignore)
    texts = own_patterns(linears, config.pattern)
    patterns = {name: NMPattern.of_some(texts[name])[1] if name in texts else config.sparsity for name in linears}
    feeding = {provenance.hidden_node}
    for node in reversed(provenance.hidden_node.graph.nodes):
        if not feeding.isdisjoint(node.users):
            feeding.add(node)
    by_sources: dict[tuple[fx.Node, ...], list[Products]] = defaultdict(list)
    for products in _prunable(provenance, model, feeding, patterns, config.skip_indivisible, skipped):
        by_sources[tuple(dict.fromkeys(products.sources))].append(products)
    _skip_the_rest(model, provenance, feeding, skipped)
    check_own_patterns(texts, config.pattern, skipped)
    if not by_sources:
        reasons = "; ".join(reasons_of(skipped))
        raise ModelError(f"no linear layer of this model can be pruned ({reasons or 'it has none'})")
    used = provenance.parameters
    untraced = tuple(name for name, p in model.named_parameters() if name not in used and p.numel() > 1)
    pruned = {products.owner: patterns[products.owner] for readers in by_sources.values() for products in readers}
    builder = _SpaceBuilder(provenance, model, pruned)
    sites = [builder.site(readers) for readers in by_sources.values()]
    spaces = builder.finish(sites, untraced)
    return Plan(sites, spaces, pruned, skipped, provenance.barriers, builder.hidden_site(), untraced)


def _prunable(
    provenance: Provenance,
    model: nn.Module,
    feeding: set[fx.Node],
    patterns: Mapping[str, NMPattern],
    skip_indivisible: bool,
    skipped: dict[str, str],
) -> list[Products]:
    """Returns the products of every linear to prune; adds every other linear to ``skipped``, with the reason."""
    prunable: list[Products] = []
    indivisible: dict[str, str] = {}
    nodes = {node for products in provenance.linears.values() for node in products.nodes}
    routers = ranked_products(provenance.hidden_node.graph, nodes)
    for weight, products in provenance.linears.items():
        owner, in_dim = products.owner, products.in_dim
        if owner in skipped:
            continue
        module, pattern = model.get_submodule(owner), patterns[owner]
        channels = provenance.axes[weight, in_dim].size
        if isinstance(module, nn.Embedding):
            skipped[weight] = "output head, tied to the embedding"
        elif not isinstance(module, LINEAR_MODULES) or weight != f"{owner}.weight" or not _returns_one_tensor(module):
            skipped[weight] = f"weight of a {type(module).__name__}, not of a linear layer"
        elif reason := _unlike_a_layer(module, products.nodes, routers, feeding):
            skipped[owner] = reason
        elif channels % pattern.group:
            reason = f"its {channels} input channels are not a multiple of {pattern.group} ({pattern} sparsity)"
            skipped[owner] = indivisible[owner] = reason
        elif provenance.axes[weight, 1 - in_dim].size == 1:
            skipped[owner] = "a single output: a gate, not a layer"
        else:
            prunable.append(products)
    if indivisible and not skip_indivisible:
        problems = "; ".join(reasons_of(indivisible))
        raise ModelError(
            f"{problems}; choose another pattern, or leave such linears dense with `skip_indivisible=True`"
        )
    return prunable


def _unlike_a_layer(module: nn.Module, nodes: Iterable[fx.Node], routers: set[fx.Node], feeding: set[fx.Node]) -> str:
    """Returns why a linear stays dense, because its products are not those of a layer; else empty."""
    if {*map(module_class, nodes)} != {f"{type(module).__module__}.{type(module).__qualname__}"}:
        return "its weight is read by another module than itself, which need not call it"
    if not routers.isdisjoint(nodes):
        return "its outputs are ranked: a router, not a layer"
    return OUTSIDE if feeding.isdisjoint(nodes) else ""


def _returns_one_tensor(module: nn.Module) -> bool:
    """Whether a linear returns one tensor, which a router of a class derived from ``nn.Linear`` need not do."""
    if type(module).forward in [kind.forward for kind in LINEAR_MODULES]:
        return True
    tensors = {name: parameter.detach().to("meta") for name, parameter in module.named_parameters()}
    try:
        inputs = torch.empty(1, tensors["weight"].shape[1], device="meta")
        result = torch.func.functional_call(module, tensors, inputs)
    except Exception:  # the model's code may raise any kind
        return False
    return isinstance(result, Tensor)


def _skip_the_rest(model: nn.Module, provenance: Provenance, feeding: set[fx.Node], skipped: dict[str, str]) -> None:
    """Adds to ``skipped`` the linears that the graph does not call, and weights with more than two dimensions."""
    used = provenance.parameters
    called = {id(model.get_parameter(weight)) for weight in provenance.linears}
    parameters_read = {str(node.target) for node in feeding if node.op == "get_attr"}

    def skip(name: str, parameter: str, reason: str) -> None:
        if parameter not in used:
            reason = "not used when the model runs on token ids"
        elif parameter not in parameters_read:
            reason = OUTSIDE
        skipped.setdefault(name, reason)

    for name, module in model.named_modules():
        if isinstance(module, LINEAR_MODULES) and id(module.weight) not in called:
            skip(name, f"{name}.weight", "its weight is read by an operator without a channel rule")
        for parameter_name, parameter in module.named_parameters(prefix=name, recurse=False):
            if parameter.ndim > 2:
                kind = f"{parameter.ndim}-dimensional weight of a {type(module).__name__}"
                skip(parameter_name, parameter_name, kind)


class _SpaceBuilder:
    """Groups the labels of the sites' input channels into channel spaces; a label belongs to at most one space."""

    def __init__(self, provenance: Provenance, model: nn.Module, patterns: Mapping[str, NMPattern]) -> None:
        graph = provenance.hidden_node.graph
        self._provenance, self._model, self._patterns = provenance, model, patterns
        self._find_residual, self._routed = residual_finder(graph, model), routed_nodes(graph)
        pruned = {products.nodes[0] for products in provenance.linears.values() if products.owner in patterns}
        self._depths: dict[fx.Node, int] = {}  # largest number of pruned linears on a path to a node, itself included
        for node in graph.nodes:
            before = max((self._depths[source] for source in node.all_input_nodes), default=0)
            self._depths[node] = before + (node in pruned)
        self._space_of = np.full(provenance.contexts.size, -1, np.int64)  # label -> number of its space
        self._unit_of = self._space_of.copy()  # label -> its unit in this space
        self._spaces: list[ChannelSpace] = []

    def site(self, readers: list[Products]) -> Site:
        """Returns the site of the linears that read one activation, and makes or finds its space."""
        first, names = readers[0], [products.owner for products in readers]
        labels = self._provenance.axes[first.parameter, first.in_dim]
        name = _common_name(names)
        space, units = self._space(name, labels)
        layers = frozenset(layer_of(self._model, name) for name in names)
        count = len(first.nodes)
        site = Site(
            name,
            tuple(names),
            labels.size,
            torch.from_numpy(units),
            space,
            layer_paths=layers if all(layers) else frozenset(),
            depth=self._depths[first.nodes[0]],
            num_calls=count,
            is_routed=first.sources[0] in self._routed,
            residual=self._find_residual(first.nodes[0], *layers) if all(layers) and len(names) == count == 1 else None,
        )
        group = math.lcm(*(self._patterns[name].group for name in names))
        if not space.frozen and (problem := _arrangement_problem(site, group)):
            space.freeze(problem)
        return site

    def _space(self, name: str, labels: np.ndarray) -> tuple[ChannelSpace, np.ndarray]:
        """Returns the space of a site's input channels and the unit at each of them, int64 ``[channels]``."""
        problem = ""
        distinct, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
        order = np.argsort(first)
        unique = distinct[order]  # the units: labels in the order of their first channels
        owners = np.unique(self._space_of[unique])
        if owners.size == 1 and owners[0] >= 0 and self._spaces[owners[0]].units == unique.size:
            return self._spaces[owners[0]], self._unit_of[labels]
        for owner in owners[owners >= 0]:
            problem = "linears read overlapping but different sets of its channels"
            self._spaces[owner].freeze(problem)
        contexts = self._provenance.contexts[unique]
        edges = np.flatnonzero(np.diff(contexts, prepend=contexts[:1] + 1, append=contexts[-1:] + 1))
        segments = tuple(int(size) for size in np.diff(edges))
        if not problem and max(segments) == 1:
            problem = self._provenance.reason(unique)
        placement = Destination.NONE if problem else Destination.FOLDED
        space = ChannelSpace(name, segments, (), placement, problem)
        is_new = self._space_of[unique] < 0  # all labels, unless sets overlap: a label keeps its first space
        self._space_of[unique[is_new]] = len(self._spaces)
        self._unit_of[unique[is_new]] = np.arange(unique.size)[is_new]
        self._spaces.append(space)
        return space, np.argsort(order)[inverse]

    def finish(self, sites: list[Site], untraced: Sequence[str]) -> list[ChannelSpace]:
        """Attaches parameter dimensions to their spaces, names the spaces of several sites, and returns all spaces."""
        embeddings = {name for name, module in self._model.named_modules() if isinstance(module, nn.Embedding)}
        linears = (products for products in self._provenance.linears.values() if products.owner not in embeddings)
        input_axes = {(products.parameter, products.in_dim) for products in linears}
        for (parameter, dim), labels in self._provenance.axes.items():
            spaces = self._space_of[labels]
            for number in np.unique(spaces[spaces >= 0]):
                units = torch.from_numpy(np.where(spaces == number, self._unit_of[labels], -1))
                roles = torch.from_numpy(np.unique(self._provenance.roles[parameter, dim], return_inverse=True)[1])
                self._spaces[number].axes += (Axis(parameter, dim, units, roles, (parameter, dim) in input_axes),)
        streams = 0
        for space in self._spaces:
            readers = [site for site in sites if site.space is space]
            if not space.frozen and (problem := self._axes_problem(space, readers, untraced)):
                space.freeze(problem)
            if len(readers) > 1:
                streams += 1
                space.name = "stream" if streams == 1 else f"stream.{streams}"
        return self._spaces

    def _axes_problem(self, space: ChannelSpace, readers: list[Site], untraced: Sequence[str]) -> str:
        """Returns which parameter forbids reordering the channels of a space, and why; empty if none does."""
        if fixed := [axis for axis in space.axes if not axis.exchangeable(space.segments)]:
            return f"{fixed[0].parameter} does not hold all of its channels in the same roles"
        parameters = {axis.parameter for axis in space.axes}
        if reason := untraced_reach(self._model, untraced, parameters, readers):
            return reason
        unsaved = parameters.intersection(getattr(self._model, "_keys_to_ignore_on_save", None) or ())
        return f"{min(unsaved)} is not saved with the model, so that its order cannot change" if unsaved else ""

    def hidden_site(self) -> Site | None:
        """Returns the last hidden state as a site; None unless one space orders all of its channels."""
        labels = self._provenance.hidden_labels
        owners = np.unique(self._space_of[labels])
        if owners.size != 1 or owners[0] < 0:
            return None
        return Site("", (), labels.size, torch.from_numpy(self._unit_of[labels]), self._spaces[owners[0]])


def _arrangement_problem(site: Site, group: int) -> str:
    """Returns why blocks of units would not be blocks of a site's input channels; empty if they would.

    The units of each segment must be at consecutive input channels that start at a multiple of the group, and fill
    whole groups.
    """
    if uneven := [size for size in site.space.segments if size % group]:
        return f"channels may move only inside segments of {uneven[0]}, not a multiple of {group}"
    if site.units.bincount(minlength=site.space.units).unique().numel() > 1:
        return f"{site.name} reads some of its channels more often than others"
    positions, starts = site.channels_by_unit, [start for start, _ in site.space.spans]
    consecutive = (positions[1:] == positions[:-1] + 1).all(1)
    follows = site.space.segment_of.diff() == 0
    if not bool(consecutive[follows].all()) or bool((positions[starts] % group).any()):
        return f"{site.name} reads its channels interleaved, so blocks would not match the sparsity groups"
    return ""


def _common_name(names: list[str]) -> str:
    """Returns the common path of modules, then their own names: ``layers.0.mlp.gate_proj+up_proj``.

    Modules of the same names in several layers are named once: ``decoder.layers.0+1.cross_attn.k_proj+v_proj``.
    """
    if len(names) == 1:
        return names[0]
    split = [name.split(".") for name in names]
    shared = len(shared_parts(split))
    prefix, inner = split[0][:shared], defaultdict(list)
    for parts in split:
        inner[parts[shared]].append(".".join(parts[shared + 1 :]))
    heads, (first, *others) = "+".join(inner), inner.values()
    if all(other == first for other in others) and all(first):
        return ".".join([*prefix, heads, _common_name(first)])
    return ".".join([*prefix, "+".join(".".join(parts[shared:]) for parts in split)])
