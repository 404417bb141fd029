"""From channel provenance to the plan: the sites, their channel spaces, and which linears stay dense and why."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, fx, nn

from permtriton.config import CommonConfig
from permtriton.errors import ModelError, reasons_of
from permtriton.model.modules import LINEAR_MODULES
from permtriton.model.name import shared_parts
from permtriton.passes.graph import module_class, one_thread
from permtriton.passes.graph_values import LinearCall
from permtriton.passes.plan import Axis, ChannelSpace, Plan, Site, layer_of
from permtriton.passes.provenance import Provenance
from permtriton.passes.residual import residual_finder
from permtriton.passes.routed import ranked_products, routed_nodes
from permtriton.passes.select_linears import check_own_patterns, left_out, own_patterns
from permtriton.passes.untraced import untraced_reach
from permtriton.util.sparsity import NMPattern


@one_thread()
def find_sites(provenance: Provenance, model: nn.Module, hidden_node: fx.Node, config: CommonConfig) -> Plan:
    """Decides which linears are pruned, groups them into sites and finds each site's permutable channels.

    Args:
        hidden_node: Graph node of the last hidden state; only linears that feed it are pruned.
    """
    linears = _linears(provenance, model)
    skipped = left_out(linears, config.targets, config.ignore)
    texts = own_patterns(linears, config.pattern)
    patterns = {name: NMPattern.of_some(texts[name])[1] if name in texts else config.sparsity for name in linears}
    calls = [call for call in provenance.linears if call.parameter.rpartition(".")[0] not in skipped]
    sources: dict[str, dict[fx.Node, None]] = defaultdict(dict)  # weight -> activations of all its products
    for call in provenance.linears:
        sources[call.parameter][call.source] = None
    by_sources: dict[tuple[fx.Node, ...], list[LinearCall]] = defaultdict(list)
    graph, feeding = hidden_node.graph, {hidden_node}
    for node in reversed(graph.nodes):
        if not feeding.isdisjoint(node.users):
            feeding.add(node)
    for call in _prunable(calls, provenance, model, feeding, patterns, config.skip_indivisible, skipped):
        by_sources[tuple(sources[call.parameter])].append(call)
    _skip_the_rest(model, provenance, feeding, skipped)
    check_own_patterns(texts, config.pattern, skipped)
    if not by_sources:
        reasons = "; ".join(reasons_of(skipped))
        raise ModelError(f"no linear layer of this model can be pruned ({reasons or 'it has none'})")
    used = {parameter for parameter, _ in provenance.axes}
    untraced = tuple(name for name, p in model.named_parameters() if name not in used and p.numel() > 1)
    depths = _depths(graph, {call.node for calls in by_sources.values() for call in calls})
    builder = _SpaceBuilder(provenance, model, patterns, depths)
    sites = [builder.site(calls) for calls in by_sources.values()]
    spaces = builder.finish(sites, untraced)
    pruned = {name: patterns[name] for site in sites for name in site.linears}
    hidden_site = builder.located(provenance.hidden_labels)
    return Plan(sites, spaces, pruned, skipped, provenance.barriers, hidden_site, untraced)


def _linears(provenance: Provenance, model: nn.Module) -> dict[str, nn.Module]:
    """Returns the linears of a model, by name, and the other modules with a weight that the trace multiplies by."""
    owners = {call.parameter.rpartition(".")[0] for call in provenance.linears}
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if name in owners or isinstance(module, LINEAR_MODULES)}


def _prunable(
    calls: Iterable[LinearCall],
    provenance: Provenance,
    model: nn.Module,
    feeding: set[fx.Node],
    patterns: Mapping[str, NMPattern],
    skip_indivisible: bool,
    skipped: dict[str, str],
) -> Iterable[LinearCall]:
    """Yields the first call of every linear to prune; adds every other linear to ``skipped``, with the reason."""
    seen: set[str] = set()
    indivisible: dict[str, str] = {}
    special = _special(provenance, model)
    for call in calls:
        owner, _, attribute = call.parameter.rpartition(".")
        module = model.get_submodule(owner)
        channels = provenance.axes[call.parameter, call.in_dim].size
        if isinstance(module, nn.Embedding):
            skipped.setdefault(call.parameter, "output head, tied to the embedding")
        elif not isinstance(module, LINEAR_MODULES) or attribute != "weight" or not _returns_one_tensor(module):
            skipped.setdefault(call.parameter, f"weight of a {type(module).__name__}, not of a linear layer")
        elif call.parameter in special:
            skipped.setdefault(owner, special[call.parameter])
        elif call.node not in feeding:
            skipped.setdefault(owner, "does not feed the last hidden state (output head or pooler)")
        elif channels % (pattern := patterns[owner]).group:
            reason = f"its {channels} input channels are not a multiple of {pattern.group} ({pattern} sparsity)"
            indivisible.setdefault(owner, skipped.setdefault(owner, reason))
        elif provenance.axes[call.parameter, 1 - call.in_dim].size == 1:
            skipped.setdefault(owner, "a single output: a gate, not a layer")
        elif owner not in seen:
            seen.add(owner)
            yield call
    if indivisible and not skip_indivisible:
        problems = "; ".join(reasons_of(indivisible))
        raise ModelError(
            f"{problems}; choose another pattern, or leave such linears dense with `skip_indivisible=True`"
        )


def _special(provenance: Provenance, model: nn.Module) -> dict[str, str]:
    """Returns weight -> why its linear stays dense, for linears that are used in another way than as a layer."""
    reasons: dict[str, str] = {}
    products = {call.node for call in provenance.linears}
    routers = {node for graph in {node.graph for node in products} for node in ranked_products(graph, products)}
    for call in provenance.linears:
        owner = type(model.get_submodule(call.parameter.rpartition(".")[0]))
        if module_class(call.node) != f"{owner.__module__}.{owner.__qualname__}":
            reasons[call.parameter] = "its weight is read by another module than itself, which need not call it"
        elif call.node in routers:
            reasons.setdefault(call.parameter, "its outputs are ranked: a router, not a layer")
    return reasons


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
    called = {call.parameter for call in provenance.linears}
    used = {parameter for parameter, _ in provenance.axes}
    parameters_read = {str(node.target) for node in feeding if node.op == "get_attr"}

    def outside(name: str) -> str:
        if name not in used:
            return "not used when the model runs on token ids"
        return "" if name in parameters_read else "does not feed the last hidden state (output head or pooler)"

    for name, module in model.named_modules():
        if isinstance(module, LINEAR_MODULES) and f"{name}.weight" not in called:
            is_tied = any(module.weight is p for n, p in model.named_parameters() if n in called)
            if not is_tied:
                barrier = "its weight is read by an operator without a channel rule"
                skipped.setdefault(name, outside(f"{name}.weight") or barrier)
        for parameter_name, parameter in module.named_parameters(prefix=name, recurse=False):
            if parameter.ndim > 2:
                kind = f"{parameter.ndim}-dimensional weight of a {type(module).__name__}"
                skipped.setdefault(parameter_name, outside(parameter_name) or kind)


def _depths(graph: fx.Graph, products: Collection[fx.Node]) -> dict[fx.Node, int]:
    """Returns node -> the largest number of ``products`` on a path through the graph to it, itself included."""
    depths: dict[fx.Node, int] = {}
    for node in graph.nodes:
        depths[node] = max((depths[source] for source in node.all_input_nodes), default=0) + (node in products)
    return depths


class _SpaceBuilder:
    """Groups the labels of the sites' input channels into channel spaces; a label belongs to at most one space."""

    def __init__(
        self,
        provenance: Provenance,
        model: nn.Module,
        patterns: Mapping[str, NMPattern],
        depths: Mapping[fx.Node, int],
    ) -> None:
        graph = provenance.linears[0].node.graph
        self._provenance, self._model, self._patterns, self._depths = provenance, model, patterns, depths
        self._find_residual, self._routed = residual_finder(graph, model), routed_nodes(graph)
        labels = provenance.contexts.size
        self._space_of = np.full(labels, -1, np.int64)
        self._unit_of = np.full(labels, -1, np.int64)
        self._spaces: list[ChannelSpace] = []

    def site(self, calls: list[LinearCall]) -> Site:
        """Returns the site of the linears that read one activation, and makes or finds its space."""
        names = [call.parameter.rpartition(".")[0] for call in calls]
        labels = self._provenance.axes[calls[0].parameter, calls[0].in_dim]
        name = _common_name(names)
        problem = next((call.problem for call in calls if call.problem), "")
        space, units = self._space(name, labels, problem)
        count = sum(call.parameter == calls[0].parameter for call in self._provenance.linears)
        layers = frozenset(layer_of(self._model, name) for name in names)
        if "" in layers:
            layers = frozenset()
        site = Site(
            name,
            tuple(names),
            labels.size,
            torch.from_numpy(units),
            space,
            layer_paths=layers,
            depth=self._depths[calls[0].node],
            num_calls=count,
            is_routed=calls[0].source in self._routed,
            residual=self._find_residual(calls[0].node, *layers) if layers and len(names) == count == 1 else None,
        )
        for group in dict.fromkeys(self._patterns[name].group for name in names):
            if not space.frozen and (problem := _arrangement_problem(site, group)):
                space.freeze(problem)
        return site

    def _space(self, name: str, labels: np.ndarray, problem: str) -> tuple[ChannelSpace, np.ndarray]:
        """Returns the space of a site's input channels and the unit at each of them, int64 ``[channels]``.

        Args:
            problem: Why the channels may not move; empty if no reason is known.
        """
        unique, first = np.unique(labels, return_index=True)
        unique = labels[np.sort(first)]  # the units: labels in the order of their first channels
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
        space = ChannelSpace(name, segments, ())
        if problem:
            space.freeze(problem)
        is_new = self._space_of[unique] < 0  # all labels, unless sets overlap: a label keeps its first space
        self._space_of[unique[is_new]] = len(self._spaces)
        self._unit_of[unique[is_new]] = np.arange(unique.size)[is_new]
        self._spaces.append(space)
        order = np.argsort(unique)
        return space, order[np.searchsorted(unique, labels, sorter=order)]

    def finish(self, sites: list[Site], untraced: Sequence[str]) -> list[ChannelSpace]:
        """Attaches parameter dimensions to their spaces, names the spaces of several sites, and returns all spaces."""
        axes_by_space: list[list[Axis]] = [[] for _ in self._spaces]
        input_axes = {(call.parameter, call.in_dim) for call in self._provenance.linears}
        input_axes -= self._provenance.embedding_columns
        for (parameter, dim), labels in self._provenance.axes.items():
            spaces = self._space_of[labels]
            for number in np.unique(spaces[spaces >= 0]):
                units = torch.from_numpy(np.where(spaces == number, self._unit_of[labels], -1))
                roles = torch.from_numpy(np.unique(self._provenance.roles[parameter, dim], return_inverse=True)[1])
                axes_by_space[number].append(Axis(parameter, dim, units, roles, (parameter, dim) in input_axes))
        streams = 0
        for space, axes_of_space in zip(self._spaces, axes_by_space, strict=True):
            space.axes = tuple(axes_of_space)
            readers = [site for site in sites if site.space is space]
            if not space.frozen and (problem := self._axes_problem(space, readers, untraced)):
                space.freeze(problem)
            if len(readers) > 1:
                streams += 1
                space.name = "stream" if streams == 1 else f"stream.{streams}"
        return self._spaces

    def _axes_problem(self, space: ChannelSpace, readers: list[Site], untraced: Sequence[str]) -> str:
        """Returns why parameters keep the channels of a space in their order; empty if they do not."""
        if fixed := [axis for axis in space.axes if not axis.exchangeable(space.segments)]:
            return f"{fixed[0].parameter} does not hold all of its channels in the same roles"
        parameters = {axis.parameter for axis in space.axes}
        if reason := untraced_reach(self._model, untraced, parameters, readers):
            return reason
        unsaved = parameters.intersection(getattr(self._model, "_keys_to_ignore_on_save", None) or ())
        return f"{min(unsaved)} is not saved with the model, so that its order cannot change" if unsaved else ""

    def located(self, labels: np.ndarray) -> Site | None:
        """Returns the activation with channels of ``labels`` as a site; None unless one space orders all of them."""
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
